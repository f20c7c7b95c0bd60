#include "worker/assemble_logits.h"

#include "kernels/base/check.h"
#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace {

using ::lockstep::testing::IsOk;
using ::lockstep::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class AssembleLogitsTest : public ::testing::Test {
 protected:
  AssembleLogitsTest() {
    CHECK_OK(workspace_.Allocate(DeviceType::kCpu, 64));
    ctx_.pool = &pool_;
    ctx_.workspace = &workspace_;
    ctx_.counters = &counters_;
  }
  ThreadPool pool_{1};
  Workspace workspace_;
  Counters counters_;
  ExecContext ctx_;
};

TEST_F(AssembleLogitsTest, PutsRowsInVocabularyOrderWithoutPadding) {
  // Two ranks, three rows, two columns each; the vocabulary has three ids.
  const std::vector<float> gathered = {0, 1, 10, 11, 20, 21, 2, -1, 12, -1, 22, -1};
  std::vector<float> out(6, 99.0f);
  ASSERT_OK(AssembleLogits(&ctx_, ConstTensorView(gathered.data(), DType::kF32, Shape{2, 3, 2}),
                           {2, 0}, TensorView(out.data(), DType::kF32, Shape{2, 3})));
  EXPECT_THAT(out, ElementsAre(20, 21, 22, 0, 1, 2));
}

TEST_F(AssembleLogitsTest, RefusesAVocabularyThatTheRanksDoNotHold) {
  const std::vector<float> gathered(4);
  std::vector<float> out(5);
  EXPECT_THAT(AssembleLogits(&ctx_, ConstTensorView(gathered.data(), DType::kF32, Shape{2, 1, 2}),
                             {0}, TensorView(out.data(), DType::kF32, Shape{1, 5})),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("F32[1, 5]")));
}

}  // namespace
}  // namespace lockstep
