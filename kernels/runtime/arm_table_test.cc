#include "kernels/runtime/arm_table.h"

#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::StatusIs;

struct Problem {
  int width;
};

const char* NeedsMultipleOf16(const Problem& p) {
  return p.width % 16 == 0 ? nullptr : "width is not a multiple of 16";
}

using RunFn = int (*)();
constexpr Arm<Problem, RunFn> kArms[] = {
    {"fast", DeviceType::kCpu, NeedsMultipleOf16, [] { return 1; }},
    {"generic", DeviceType::kCpu, nullptr, [] { return 2; }},
};
constexpr Arm<Problem, RunFn> kStrict[] = {
    {"fast", DeviceType::kCpu, NeedsMultipleOf16, [] { return 1; }},
};

TEST(ArmTable, TheFirstArmThatCanRunIsTaken) {
  ASSERT_OK_AND_ASSIGN(const auto* fast, ChooseArm("op", kArms, DeviceType::kCpu, Problem{32}));
  EXPECT_STREQ(fast->name, "fast");
  EXPECT_EQ(fast->run(), 1);
  ASSERT_OK_AND_ASSIGN(const auto* generic, ChooseArm("op", kArms, DeviceType::kCpu, Problem{33}));
  EXPECT_EQ(generic->run(), 2);
}

TEST(ArmTable, NoneNamesEveryArmWithItsReason) {
  EXPECT_THAT(ChooseArm("op", kStrict, DeviceType::kCpu, Problem{33}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("op: no arm of this build runs on cpu; fast: width is not")));
  EXPECT_THAT(ChooseArm("op", kArms, DeviceType::kCuda, Problem{32}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("fast: runs on the cpu only"),
                             HasSubstr("generic: runs on the cpu only"))));
}

}  // namespace
}  // namespace lockstep
