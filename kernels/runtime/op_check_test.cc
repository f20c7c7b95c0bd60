#include "kernels/runtime/op_check.h"

#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;
using testing::StatusIs;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

TEST(OpCheck, TheFirstFailureNamesOpTensorAndBothSides) {
  ExecContext ctx;
  const ConstTensorView x(nullptr, DType::kF32, {2, 8});
  EXPECT_OK(OpCheck(ctx, "op").Rank("x", x, 2).Tensor("x", x, {DType::kF32}, {2, 8}).status());
  EXPECT_THAT(OpCheck(ctx, "op").Rank("x", x, 3).That(false, "later").status(),
              StatusIs(kInvalid, HasSubstr("op: x is F32[2, 8], rank 3 is needed")));
  EXPECT_THAT(OpCheck(ctx, "op").Tensor("x", x, {DType::kF32}, {2, 9}).status(),
              StatusIs(kInvalid, HasSubstr("op: x is F32[2, 8], shape [2, 9] is needed")));
  EXPECT_THAT(OpCheck(ctx, "op").Tensor("x", x, {DType::kBF16, DType::kI32}, {2, 8}).status(),
              StatusIs(kInvalid, HasSubstr("dtype BF16 or I32 is needed")));
  const ConstTensorView remote(nullptr, DType::kF32, {2, 8}, DeviceType::kCuda);
  EXPECT_THAT(OpCheck(ctx, "op").Tensor("x", remote, {DType::kF32}, {2, 8}).status(),
              StatusIs(kInvalid, HasSubstr("op: x is on cuda, the op runs on cpu")));
}

TEST(OpCheck, BatchesNeedTheirViews) {
  ExecContext ctx;
  ForwardBatch batch;
  EXPECT_THAT(OpCheck(ctx, "op").Batch(batch).status(),
              StatusIs(kInvalid, HasSubstr("0 tokens of 0 sequences")));
  batch.num_tokens = 3;
  batch.num_sequences = 2;
  batch.positions = ConstTensorView(nullptr, DType::kI32, {3});
  batch.row_offsets = ConstTensorView(nullptr, DType::kI32, {2});
  EXPECT_THAT(OpCheck(ctx, "op").Batch(batch).status(),
              StatusIs(kInvalid, HasSubstr("row_offsets is I32[2], shape [3] is needed")));
}

}  // namespace
}  // namespace lockstep
