// The tile of a launch is no part of the result.
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "kernels/gemm/gemm_cuda_problem.h"
#include "kernels/gemm/testing/gemm_problem.h"
#include "kernels/runtime/testing/arm_test.h"

namespace lockstep {
namespace {

using testing::ArmTensor;
using testing::GemmCase;
using testing::GemmCases;
using testing::PackedPart;
using testing::RunGemm;
using testing::TestInput;
using testing::TestWeight;

class GemmTileTest : public ::testing::TestWithParam<GemmCase> {};

TEST_P(GemmTileTest, EveryTileGivesTheSameBits) {
  const GemmCase& c = GetParam();
  const TestWeight w(c);
  const PackedPart part(w, 0, c.n, 0, 1);
  for (int64_t m : {1, 13, 70}) {
    const TestInput x(c, m);
    const TestInput::Part input = x.Rows(0, m);
    const std::vector<float> want = RunGemm(part, input);
    ConstTensorView scales;
    if (input.scales != nullptr) scales = input.scales->view();
    for (int token_blocks : {1, 2, 4}) {
      for (int warps : {4, 8}) {
        for (int groups : {1, 3}) {
          for (bool phases : {false, true}) {
            ArmTensor out(DType::kF32, {m, c.n});
            const GemmCudaProblem p = MakeGemmCudaProblem(
                part.weight(), input.view, input.scales == nullptr ? nullptr : &scales, out.view());
            GemmTile tile;
            tile.token_blocks = token_blocks;
            tile.warps = warps;
            tile.groups = groups;
            tile.stages = warps == 4 ? 2 : 4;
            tile.phase_steps = phases ? 16 : static_cast<int>(p.leaf_k / 16);
            if (GemmSharedBytes(tile, m) > 200 << 10) continue;
            ASSERT_EQ(LaunchGemm(p, tile, nullptr), LaunchStatus::kOk);
            ASSERT_EQ(out.Get(), want) << m << " tokens, blocks " << token_blocks << ", warps "
                                       << warps << ", groups " << groups << ", phases " << phases;
          }
        }
      }
    }
  }
}

TEST_P(GemmTileTest, WarpgroupInstructionsGiveTheSameBits) {
  const GemmCase& c = GetParam();
  const TestWeight w(c);
  const PackedPart part(w, 0, c.n, 0, 1);
  for (int64_t m : {1, 70, 300}) {
    const TestInput x(c, m);
    const TestInput::Part input = x.Rows(0, m);
    ConstTensorView scales;
    if (input.scales != nullptr) scales = input.scales->view();
    // F32, BF16, and shards kept apart; by instructions of a warp, then by those of a warpgroup.
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (int64_t shards : {int64_t{0}, c.shards}) {
        if (shards > 0 && dtype == DType::kBF16) continue;
        const Shape shape = shards > 0 ? Shape{shards, m, c.n} : Shape{m, c.n};
        ArmTensor want(dtype, shape), got(dtype, shape);
        GemmCudaProblem p = MakeGemmCudaProblem(
            part.weight(), input.view, input.scales == nullptr ? nullptr : &scales, want.view());
        // The cases whose segments end inside of chunks.
        const bool odd = c.name == "fp8_block_rows" || c.name == "fp8_block_w8a8" ||
                         c.name == "fp8_block_w8a8_rows";
        ASSERT_EQ(CanRunGemmWgmma(p), !odd);
        if (odd) continue;
        ASSERT_EQ(LaunchGemm(p, ChooseGemmTile(ShapeOf(p)), nullptr), LaunchStatus::kOk);
        p.out = got.view().data;
        ArmTensor scratch(DType::kF32, {GemmWgmmaScratch(ShapeOf(p)) + 1});
        ArmTensor expanded(DType::kBF16, {m, c.k});
        for (const GemmKernel kernel : {GemmKernel::kSomeTokens, GemmKernel::kManyTokens}) {
          got.SetBytes(std::vector<uint8_t>(want.GetBytes().size()));
          ASSERT_EQ(LaunchGemmWgmma(p, kernel, expanded.view().data,
                                    static_cast<float*>(scratch.view().data), nullptr),
                    LaunchStatus::kOk);
          ASSERT_EQ(got.GetBytes(), want.GetBytes())
              << m << " tokens, " << Name(dtype) << ", kernel " << static_cast<int>(kernel);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, GemmTileTest, ::testing::ValuesIn(GemmCases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace lockstep
