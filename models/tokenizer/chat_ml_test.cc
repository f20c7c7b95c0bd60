// Tests of the ChatML prompt, by exact strings.
#include "models/tokenizer/chat_ml.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace {

using ::lockstep::testing::StatusIs;
using ::testing::HasSubstr;

std::string Render(const std::vector<ChatTurn>& turns, bool thinking = false,
                   bool generation = false) {
  const auto prompt = RenderChatMl(turns, thinking, generation);
  EXPECT_THAT(prompt, ::lockstep::testing::IsOk());
  return prompt.value_or("");
}

TEST(ChatMlTest, GenerationPrompt) {
  EXPECT_EQ(Render({{"user", "Hi"}}), "<|im_start|>user\nHi<|im_end|>\n");
  EXPECT_EQ(Render({{"user", "Hi"}}, true, true),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n");
  EXPECT_EQ(Render({{"user", "Hi"}}, false, true),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n");
}

TEST(ChatMlTest, SystemAndEarlierReasoning) {
  EXPECT_EQ(Render({{"system", " Be brief.\n"},
                    {"user", "1+1?"},
                    {"assistant", "<think>\nEasy.\n</think>\n\n2"},
                    {"user", "2+2?"}}),
            "<|im_start|>system\nBe brief.<|im_end|>\n"
            "<|im_start|>user\n1+1?<|im_end|>\n"
            "<|im_start|>assistant\n2<|im_end|>\n"
            "<|im_start|>user\n2+2?<|im_end|>\n");
}

TEST(ChatMlTest, ReasoningWithoutAnOpeningTagIsDroppedToo) {
  EXPECT_EQ(Render({{"user", "a"}, {"assistant", "Easy.</think>\n2"}, {"user", "b"}}),
            "<|im_start|>user\na<|im_end|>\n"
            "<|im_start|>assistant\n2<|im_end|>\n"
            "<|im_start|>user\nb<|im_end|>\n");
}

TEST(ChatMlTest, ToolResultsFormOneUserTurnAndReasoningStays) {
  EXPECT_EQ(Render({{"user", "Weather?"},
                    {"assistant", "<think>\nAsk.\n</think>\n\n<tool_call>\nx\n</tool_call>"},
                    {"tool", "sunny"},
                    {"tool", "warm\n"},
                    {"assistant", "Fine."},
                    {"tool", "late"}}),
            "<|im_start|>user\nWeather?<|im_end|>\n"
            "<|im_start|>assistant\n<think>\nAsk.\n</think>\n\n<tool_call>\nx\n</tool_call>"
            "<|im_end|>\n"
            "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n"
            "<tool_response>\nwarm\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\nFine.<|im_end|>\n"
            "<|im_start|>user\n<tool_response>\nlate\n</tool_response><|im_end|>\n");
}

TEST(ChatMlTest, AToolResponseWrittenByTheUserIsNoQuery) {
  EXPECT_THAT(Render({{"user", "q"},
                      {"assistant", "<think>r</think>a"},
                      {"user", "<tool_response>\nx\n</tool_response>"}}),
              HasSubstr("<think>\nr\n</think>\n\na<|im_end|>"));
}

TEST(ChatMlTest, Refusals) {
  EXPECT_THAT(RenderChatMl({}, true, true),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("at least one message")));
  EXPECT_THAT(RenderChatMl({{"user", "a"}, {"narrator", "b"}}, true, true),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("message 1 has the role \"narrator\"; expected")));
  EXPECT_THAT(RenderChatMl({{"user", "a"}, {"system", "b"}}, true, true),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("can only be the first")));
}

}  // namespace
}  // namespace lockstep
