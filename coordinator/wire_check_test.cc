// Broken bytes are the client's fault, with the field path of invalid UTF-8.
#include "coordinator/wire_check.h"

#include <string>

#include "coordinator/errors.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "proto/inference.pb.h"

namespace lockstep {
namespace {

using inference::v1::GenerateRequest;
using ::testing::HasSubstr;

// Serialized, with the marker "@@" replaced by two bytes that are not UTF-8.
std::string Broken(const GenerateRequest& request) {
  std::string bytes = request.SerializeAsString();
  bytes.replace(bytes.find("@@"), 2, "\xc3\x28");
  return bytes;
}

TEST(WireCheckTest, NamesTheFieldOfInvalidUtf8) {
  GenerateRequest text;
  text.set_text("a@@b");
  GenerateRequest stop;
  stop.mutable_stopping()->add_stop_strings("fine");
  stop.mutable_stopping()->add_stop_strings("@@");
  GenerateRequest chat;
  chat.mutable_chat()->add_messages()->set_role("user");
  chat.mutable_chat()->mutable_messages(0)->set_content("x@@");
  const std::pair<GenerateRequest, std::string> cases[] = {
      {text, "text"}, {stop, "stopping.stop_strings[1]"}, {chat, "chat.messages[0].content"}};
  for (const auto& [request, path] : cases) {
    GenerateRequest parsed;
    const absl::Status status = ParseRequest(Broken(request), &parsed);
    EXPECT_THAT(status, testing::StatusIs(absl::StatusCode::kInvalidArgument,
                                          HasSubstr(path + " is not valid UTF-8")));
    EXPECT_EQ(ReasonOf(status), "INVALID_UTF8");
  }
}

TEST(WireCheckTest, NulBytesAreText) {
  GenerateRequest request;
  request.set_text(std::string("a\0b", 3));
  GenerateRequest parsed;
  EXPECT_OK(ParseRequest(request.SerializeAsString(), &parsed));
  EXPECT_EQ(parsed.text(), request.text());
}

TEST(WireCheckTest, GarbageIsMalformed) {
  GenerateRequest parsed;
  const absl::Status status = ParseRequest("\xff\xff\xff", &parsed);
  EXPECT_THAT(status, testing::StatusIs(absl::StatusCode::kInvalidArgument,
                                        HasSubstr("lockstep.inference.v1.GenerateRequest")));
  EXPECT_EQ(ReasonOf(status), "MALFORMED_MESSAGE");
}

}  // namespace
}  // namespace lockstep
