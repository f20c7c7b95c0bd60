#include "tools/process/child_process.h"

#include <signal.h>

#include <fstream>
#include <string>

#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace {

using ::lockstep::testing::StatusIs;
using ::testing::HasSubstr;

TEST(ChildProcess, ReportsExitCodesAndSignals) {
  ASSERT_OK_AND_ASSIGN(ChildProcess seven, ChildProcess::Start({"/bin/sh", "-c", "exit 7"}, {}));
  ASSERT_TRUE(seven.Wait(absl::Seconds(10)));
  EXPECT_EQ(seven.exit_code(), 7);
  EXPECT_EQ(seven.Outcome(), "exit code 7");

  ASSERT_OK_AND_ASSIGN(ChildProcess killed, ChildProcess::Start({"/bin/sleep", "100"}, {}));
  EXPECT_TRUE(killed.running());
  EXPECT_FALSE(killed.Wait(absl::Milliseconds(20)));
  killed.Signal(SIGKILL);
  ASSERT_TRUE(killed.Wait(absl::Seconds(10)));
  EXPECT_THAT(killed.Outcome(), HasSubstr("signal 9"));
}

TEST(ChildProcess, MissingProgramIsNotFound) {
  EXPECT_THAT(ChildProcess::Start({"/no/such/program"}, {}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/no/such/program")));
}

TEST(ChildProcess, WaitForAddressFileSeesTheChildEnd) {
  const std::string path = ::testing::TempDir() + "/never";
  ASSERT_OK_AND_ASSIGN(ChildProcess child, ChildProcess::Start({"/bin/sh", "-c", "exit 3"}, {}));
  EXPECT_THAT(WaitForAddressFile(path, &child, absl::Seconds(30)),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("exit code 3")));
}

TEST(ChildProcess, WaitForAddressFileReadsTheLine) {
  const std::string path = ::testing::TempDir() + "/address";
  ASSERT_OK_AND_ASSIGN(
      ChildProcess child,
      ChildProcess::Start({"/bin/sh", "-c", "sleep 0.05; echo 127.0.0.1:5 > " + path + "; sleep 9"},
                          {}));
  ASSERT_OK_AND_ASSIGN(const std::string line, WaitForAddressFile(path, &child, absl::Seconds(30)));
  EXPECT_EQ(line, "127.0.0.1:5");
}

}  // namespace
}  // namespace lockstep
