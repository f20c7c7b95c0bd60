#include "kernels/runtime/workspace.h"

#include <cstdint>

#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace {

void TakeTwoLevels(Workspace* workspace) {
  Workspace::Scope outer(workspace);
  workspace->Take(DType::kF32, {3, 5});
  for (int i = 0; i < 3; ++i) {
    Workspace::Scope inner(workspace);
    workspace->Take(DType::kBF16, {100});
  }
}

TEST(Workspace, CountingSizesExactlyWhatTheSameCodeTakes) {
  Workspace counting;
  TakeTwoLevels(&counting);
  EXPECT_TRUE(counting.counting());
  EXPECT_EQ(counting.used(), 0);
  EXPECT_EQ(counting.peak(), 64 + 256);

  Workspace real;
  ASSERT_OK(real.Allocate(DeviceType::kCpu, counting.peak()));
  TakeTwoLevels(&real);
  EXPECT_EQ(real.peak(), counting.peak());
}

TEST(Workspace, TakesAlignedDisjointMemory) {
  Workspace workspace;
  ASSERT_OK(workspace.Allocate(DeviceType::kCpu, 1024));
  Workspace::Scope scope(&workspace);
  TensorView a = workspace.Take(DType::kU8, {1});
  TensorView b = workspace.Take(DType::kU8, {1});
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data) % 64, 0u);
  EXPECT_EQ(static_cast<uint8_t*>(b.data) - static_cast<uint8_t*>(a.data), 64);
}

TEST(WorkspaceDeathTest, TooSmallNamesTheTensor) {
  Workspace workspace;
  ASSERT_OK(workspace.Allocate(DeviceType::kCpu, 64));
  EXPECT_DEATH(workspace.Take(DType::kF32, {17}), "F32\\[17\\]");
}

}  // namespace
}  // namespace lockstep
