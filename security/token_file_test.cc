#include "security/token_file.h"

#include <stdio.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace {

using ::lockstep::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class TokenFileTest : public ::testing::Test {
 protected:
  void Write(const std::string& text) {
    const std::string beside = absl::StrCat(path_, ".new");
    {
      std::ofstream file(beside);
      file << text;
    }
    ASSERT_EQ(rename(beside.c_str(), path_.c_str()), 0);
  }
  const std::string path_ = absl::StrCat(::testing::TempDir(), "/tokens");
};

TEST_F(TokenFileTest, ReadsOneTokenALine) {
  Write("# who may\n\n  first-token \nsecond/token+=\r\n");
  ASSERT_OK_AND_ASSIGN(const auto tokens, ReadTokens(path_, "--auth-token-file"));
  EXPECT_THAT(tokens, ElementsAre("first-token", "second/token+="));
  ASSERT_OK_AND_ASSIGN(const auto file, TokenFile::Open(path_, "--auth-token-file"));
  EXPECT_TRUE(file->Accepts("first-token"));
  EXPECT_TRUE(file->Accepts("second/token+="));
  for (const char* wrong : {"", "first-toke", "first-token ", "first-tokem", "# who may", "#"}) {
    EXPECT_FALSE(file->Accepts(wrong)) << wrong;
  }
}

TEST_F(TokenFileTest, FollowsTheFile) {
  Write("old-token\n");
  ASSERT_OK_AND_ASSIGN(const auto file, TokenFile::Open(path_, "--auth-token-file"));
  EXPECT_TRUE(file->Accepts("old-token"));
  Write("new-token\n");
  EXPECT_FALSE(file->Accepts("old-token"));
  EXPECT_TRUE(file->Accepts("new-token"));
  Write("old-token\nnew-token\n");
  EXPECT_TRUE(file->Accepts("old-token"));
  EXPECT_TRUE(file->Accepts("new-token"));
  // Nobody is let in by a file that is gone or says nothing.
  ASSERT_EQ(unlink(path_.c_str()), 0);
  EXPECT_FALSE(file->Accepts("new-token"));
  Write("# none\n");
  EXPECT_FALSE(file->Accepts("new-token"));
  Write("new-token\n");
  EXPECT_TRUE(file->Accepts("new-token"));
}

TEST_F(TokenFileTest, ErrorsNameFlagFileAndLineButNoToken) {
  EXPECT_THAT(
      TokenFile::Open("/nowhere/tokens", "--auth-token-file").status(),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("--auth-token-file /nowhere/tokens")));
  Write("\n# only a comment\n");
  EXPECT_THAT(TokenFile::Open(path_, "--auth-token-file").status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("has no token")));
  Write("good\nhush hush\n");
  EXPECT_THAT(TokenFile::Open(path_, "--auth-token-file").status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("line 2"), Not(HasSubstr("hush")))));
}

}  // namespace
}  // namespace lockstep
