#include "kernels/rows/rows.h"

#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace {

using ::lockstep::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class RowsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(workspace_.Allocate(DeviceType::kCpu, 1 << 12));
    ctx_.workspace = &workspace_;
    ctx_.counters = &counters_;
  }
  Workspace workspace_;
  Counters counters_;
  ExecContext ctx_;
};

TEST_F(RowsTest, GatherTakesTheNamedRows) {
  std::vector<float> source = {0, 1, 10, 11, 20, 21};
  std::vector<int32_t> rows = {2, 0, 2};
  std::vector<float> out(6);
  ASSERT_OK(GatherRows(&ctx_, TensorView(source.data(), DType::kF32, {3, 2}),
                       TensorView(rows.data(), DType::kI32, {3}),
                       TensorView(out.data(), DType::kF32, {3, 2})));
  EXPECT_THAT(out, ElementsAre(20, 21, 0, 1, 20, 21));
  rows[1] = 3;
  EXPECT_THAT(GatherRows(&ctx_, TensorView(source.data(), DType::kF32, {3, 2}),
                         TensorView(rows.data(), DType::kI32, {3}),
                         TensorView(out.data(), DType::kF32, {3, 2})),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("row 3 of 3")));
}

TEST_F(RowsTest, FillHonoursTheStride) {
  std::vector<float> data(6, 1.0f);
  TensorView all(data.data(), DType::kF32, {2, 3});
  ASSERT_OK(Fill(&ctx_, 7.0f, all.Columns(1, 2)));
  EXPECT_THAT(data, ElementsAre(1, 7, 7, 1, 7, 7));
  std::vector<BF16> narrow(4);
  ASSERT_OK(Fill(&ctx_, 7.0f, TensorView(narrow.data(), DType::kBF16, {2, 2})));
  for (BF16 h : narrow) EXPECT_EQ(ToFloat(h), 7.0f);
  EXPECT_THAT(Fill(&ctx_, 0.0f, TensorView(narrow.data(), DType::kU8, {2, 2})),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("fill: out is U8[2, 2]")));
}

TEST_F(RowsTest, JoinPutsPiecesSideBySide) {
  std::vector<float> pieces = {0, 1, 2, 3, 4, 5, 6, 7};  // [2 ranks, 2 rows, 2 columns]
  std::vector<float> out(8);
  ASSERT_OK(JoinColumns(&ctx_, TensorView(pieces.data(), DType::kF32, {2, 2, 2}),
                        TensorView(out.data(), DType::kF32, {2, 4})));
  EXPECT_THAT(out, ElementsAre(0, 1, 4, 5, 2, 3, 6, 7));
}

}  // namespace
}  // namespace lockstep
