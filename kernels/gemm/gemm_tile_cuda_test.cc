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
    for (int token_blocks : {1, 2, 4, 8}) {
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

INSTANTIATE_TEST_SUITE_P(Formats, GemmTileTest, ::testing::ValuesIn(GemmCases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace lockstep
