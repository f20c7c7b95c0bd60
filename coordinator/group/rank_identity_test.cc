#include "coordinator/group/rank_identity.h"

#include "coordinator/errors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

worker::v1::GetInfoResponse Info(const std::string& id, uint64_t incarnation,
                                 const std::string& uuid) {
  worker::v1::GetInfoResponse info;
  info.mutable_identity()->set_worker_id(id);
  info.mutable_identity()->set_incarnation(incarnation);
  info.set_device_uuid(uuid);
  info.set_device_name("NVIDIA H200");
  return info;
}

TEST(RankIdentityTest, TwoRanksOnOneDeviceAreBothNamed) {
  const std::vector<worker::v1::GetInfoResponse> infos = {
      Info("a/cuda:0", 1, "GPU-1"), Info("a/cuda:1", 2, "GPU-2"), Info("b/cuda:0", 3, "GPU-1")};
  const absl::Status status = CheckDistinctRanks(infos, /*share_devices=*/false);
  EXPECT_THAT(status, testing::StatusIs(absl::StatusCode::kAlreadyExists,
                                        AllOf(HasSubstr("rank 0 (a/cuda:0)"),
                                              HasSubstr("rank 2 (b/cuda:0)"), HasSubstr("GPU-1"))));
  EXPECT_EQ(ReasonOf(status), "DEVICE_TAKEN");
  EXPECT_OK(CheckDistinctRanks(infos, /*share_devices=*/true));
}

TEST(RankIdentityTest, OneProcessIsNeverTwoRanks) {
  const std::vector<worker::v1::GetInfoResponse> infos = {Info("a", 7, "cpu-7"),
                                                          Info("a", 7, "cpu-7")};
  EXPECT_THAT(CheckDistinctRanks(infos, /*share_devices=*/true),
              testing::StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("the same process")));
}

TEST(RankIdentityTest, DifferentDevicesAndSilentOldWorkersPass) {
  EXPECT_OK(CheckDistinctRanks({Info("a", 1, "GPU-1"), Info("b", 2, "GPU-2")}, false));
  EXPECT_OK(CheckDistinctRanks({Info("a", 0, ""), Info("b", 0, "")}, false));
  EXPECT_OK(CheckDistinctRanks({Info("a", 1, "GPU-1")}, false));
}

}  // namespace
}  // namespace lockstep
