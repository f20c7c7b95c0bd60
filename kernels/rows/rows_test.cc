#include "kernels/rows/rows.h"

#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "kernels/runtime/testing/arm_test.h"

namespace lockstep {
namespace {

using testing::ArmContext;
using testing::ArmTensor;
using testing::CpuArmScope;
using testing::DryRunContext;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::RandomFloats;
using testing::StatusIs;

TEST(Rows, GatherTakesTheNamedRows) {
  ArmContext context;
  ArmTensor source(DType::kF32, {3, 2}, {0, 1, 10, 11, 20, 21});
  ArmTensor rows({3}, {2, 0, 2}), out(DType::kF32, {3, 2});
  ASSERT_OK(GatherRows(context.get(), source.view(), rows.view(), out.view()));
  EXPECT_THAT(out.Get(), ElementsAre(20, 21, 0, 1, 20, 21));
  EXPECT_EQ(context.op_launches(), 1);
}

// Copies in accesses of 1, 2, 4 and 16 bytes, with rows longer than one block of threads.
TEST(Rows, GatherHonoursStridesOfEveryAlignment) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kU8, DType::kI32}) {
    for (int64_t dim : {1, 3, 8, 48, 5120}) {
      for (int64_t offset : {0, 1, 16}) {
        const auto run = [&] {
          ArmContext context;
          ArmTensor source(dtype, {5, dim + offset}), out(dtype, {3, dim + 2 * offset});
          std::vector<uint8_t> bytes(static_cast<size_t>(source.view().bytes()));
          for (size_t i = 0; i < bytes.size(); ++i)
            bytes[i] = static_cast<uint8_t>(i * 7 + i / 251);
          source.SetBytes(bytes);
          ArmTensor rows({3}, {4, 0, 4});
          EXPECT_OK(GatherRows(context.get(), source.view().Columns(offset, dim), rows.view(),
                               out.view().Columns(offset, dim)));
          return out.GetBytes();
        };
        const std::vector<uint8_t> got = run();
        const size_t width = static_cast<size_t>(SizeOf(dtype));
        const size_t d = static_cast<size_t>(dim), o = static_cast<size_t>(offset);
        for (size_t i = 0; i < got.size(); ++i) {
          const size_t r = i / ((d + 2 * o) * width), c = i % ((d + 2 * o) * width);
          const size_t source_at = (r == 1 ? 0 : 4 * (d + o) * width) + c;
          const bool inside = c >= o * width && c < (o + d) * width;
          const int want = inside ? (source_at * 7 + source_at / 251) & 0xff : 0;
          ASSERT_EQ(got[i], want) << Name(dtype) << " " << dim << " " << offset << " byte " << i;
        }
      }
    }
  }
}

TEST(Rows, IndicesOutsideAreRefusedOnTheCpuAndNanOnADevice) {
  const auto gather = [](ArmTensor* out) {
    ArmContext context;
    ArmTensor source(DType::kF32, {3, 2}, {0, 1, 10, 11, 20, 21}), rows({3}, {2, 3, -1});
    return GatherRows(context.get(), source.view(), rows.view(), out->view());
  };
  const auto assemble = [](ArmTensor* out) {
    ArmContext context;
    ArmTensor gathered(DType::kF32, {2, 3, 1}, {0, 10, 20, 1, 11, 21}), order({3}, {2, 3, -1});
    return AssembleLogits(context.get(), gathered.view(), order.view(), out->view());
  };
  if (testing::TestDevice() != DeviceType::kCpu) {
    for (bool is_gather : {true, false}) {
      ArmTensor out(DType::kF32, {3, 2});
      ASSERT_OK(is_gather ? gather(&out) : assemble(&out));
      const std::vector<float> got = out.Get();
      EXPECT_EQ(got[0], 20.0f);
      EXPECT_EQ(got[1], 21.0f);
      for (size_t i = 2; i < 6; ++i) EXPECT_TRUE(std::isnan(got[i]));
    }
  }
  CpuArmScope cpu;
  ArmTensor out(DType::kF32, {3, 2});
  EXPECT_THAT(gather(&out),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("gather_rows: row 3 of 3")));
  EXPECT_THAT(assemble(&out), StatusIs(absl::StatusCode::kInvalidArgument,
                                       HasSubstr("assemble_logits: row 3 of 3")));
}

TEST(Rows, FillHonoursTheStride) {
  ArmContext context;
  ArmTensor data(DType::kF32, {2, 3}, std::vector<float>(6, 1.0f));
  ASSERT_OK(Fill(context.get(), 7.0f, data.view().Columns(1, 2)));
  EXPECT_THAT(data.Get(), ElementsAre(1, 7, 7, 1, 7, 7));
  ArmTensor narrow(DType::kBF16, {3, 700});
  ASSERT_OK(Fill(context.get(), 7.0f, narrow.view()));
  EXPECT_EQ(narrow.Get(), std::vector<float>(2100, 7.0f));
  ArmTensor wrong(DType::kU8, {2, 2});
  EXPECT_THAT(Fill(context.get(), 0.0f, wrong.view()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("fill: out is U8[2, 2]")));
}

TEST(Rows, JoinPutsPiecesSideBySide) {
  ArmContext context;
  ArmTensor pieces(DType::kF32, {2, 2, 2}, {0, 1, 2, 3, 4, 5, 6, 7});
  ArmTensor out(DType::kF32, {2, 4});
  ASSERT_OK(JoinColumns(context.get(), pieces.view(), out.view()));
  EXPECT_THAT(out.Get(), ElementsAre(0, 1, 4, 5, 2, 3, 6, 7));
}

TEST(Rows, AssembleLogitsPutsRowsInVocabularyOrderWithoutPadding) {
  ArmContext context;
  // Two ranks, three rows, two columns each; the vocabulary has three ids.
  ArmTensor gathered(DType::kF32, {2, 3, 2}, {0, 1, 10, 11, 20, 21, 2, -1, 12, -1, 22, -1});
  ArmTensor order({2}, {2, 0}), out(DType::kF32, {2, 3});
  ASSERT_OK(AssembleLogits(context.get(), gathered.view(), order.view(), out.view()));
  EXPECT_THAT(out.Get(), ElementsAre(20, 21, 22, 0, 1, 2));
}

TEST(Rows, AssembledRowsAreThoseOfTheReferenceArm) {
  // The vocabulary ends inside the third of four ranks.
  for (int64_t local : {384, 130}) {
    for (int64_t vocab : {2 * local + 5, 4 * local, local - 1}) {
      const auto run = [&] {
        ArmContext context;
        ArmTensor gathered(DType::kF32, {4, 6, local}, RandomFloats(24 * local, 1));
        ArmTensor order({4}, {5, 0, 3, 3}), out(DType::kF32, {4, vocab});
        EXPECT_OK(AssembleLogits(context.get(), gathered.view(), order.view(), out.view()));
        return out.GetBytes();
      };
      const std::vector<uint8_t> got = run();
      CpuArmScope cpu;
      EXPECT_EQ(got, run());
    }
  }
}

TEST(Rows, AssembleLogitsRefusesAVocabularyThatTheRanksDoNotHold) {
  ArmContext context;
  ArmTensor gathered(DType::kF32, {2, 1, 2}), order({1}, {0}), out(DType::kF32, {1, 5});
  EXPECT_THAT(AssembleLogits(context.get(), gathered.view(), order.view(), out.view()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("F32[1, 5]")));
}

TEST(Rows, DryRunTouchesNothing) {
  DryRunContext context;
  const DeviceType device = testing::TestDevice();
  const TensorView x(nullptr, DType::kF32, {2, 8}, device), i(nullptr, DType::kI32, {2}, device);
  EXPECT_OK(GatherRows(context.get(), x, i, x));
  EXPECT_OK(Fill(context.get(), 1.0f, x));
  const TensorView pieces(nullptr, DType::kF32, {2, 2, 4}, device);
  EXPECT_OK(JoinColumns(context.get(), pieces, x));
  EXPECT_OK(AssembleLogits(context.get(), pieces, i, x));
}

}  // namespace
}  // namespace lockstep
