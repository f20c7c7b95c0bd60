// Renders chat turns as the ChatML prompt of Qwen3.5.
#include "models/tokenizer/chat_ml.h"

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace lockstep {
namespace {

constexpr char kThinkOpen[] = "<think>";
constexpr char kThinkClose[] = "</think>";

absl::Status CheckTurns(const std::vector<ChatTurn>& turns) {
  if (turns.empty()) {
    return absl::InvalidArgumentError("a chat needs at least one message; none was given");
  }
  for (size_t i = 0; i < turns.size(); ++i) {
    const std::string& role = turns[i].role;
    if (role == "system" && i > 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "message ", i, " has the role \"system\"; a system message can only be the first"));
    }
    if (role != "system" && role != "user" && role != "assistant" && role != "tool") {
      return absl::InvalidArgumentError(
          absl::StrCat("message ", i, " has the role \"", role,
                       "\"; expected \"system\", \"user\", \"assistant\" or \"tool\""));
    }
  }
  return absl::OkStatus();
}

// A user turn that is a tool result written out by the client does not begin a new question.
bool IsToolResponse(absl::string_view content) {
  return absl::StartsWith(content, "<tool_response>") &&
         absl::EndsWith(content, "</tool_response>");
}

// Index of the last turn in which a user asks something; -1 when there is none.
int LastQuery(const std::vector<ChatTurn>& turns) {
  for (int i = static_cast<int>(turns.size()) - 1; i >= 0; --i) {
    if (turns[i].role == "user" && !IsToolResponse(absl::StripAsciiWhitespace(turns[i].content))) {
      return i;
    }
  }
  return -1;
}

struct AssistantText {
  absl::string_view reasoning;
  absl::string_view answer;
};

AssistantText SplitReasoning(absl::string_view content) {
  const size_t first_close = content.find(kThinkClose);
  if (first_close == absl::string_view::npos) {
    return {"", content};
  }
  const size_t last_close = content.rfind(kThinkClose);
  absl::string_view reasoning = content.substr(0, first_close);
  const size_t open = reasoning.rfind(kThinkOpen);
  if (open != absl::string_view::npos) {
    reasoning.remove_prefix(open + sizeof(kThinkOpen) - 1);
  }
  return {absl::StripAsciiWhitespace(reasoning),
          absl::StripAsciiWhitespace(content.substr(last_close + sizeof(kThinkClose) - 1))};
}

void AppendAssistant(absl::string_view content, bool keep_reasoning, std::string* prompt) {
  const AssistantText text = SplitReasoning(content);
  absl::StrAppend(prompt, "<|im_start|>assistant\n");
  if (keep_reasoning) {
    absl::StrAppend(prompt, kThinkOpen, "\n", text.reasoning, "\n", kThinkClose, "\n\n");
  }
  absl::StrAppend(prompt, text.answer, "<|im_end|>\n");
}

}  // namespace

absl::StatusOr<std::string> RenderChatMl(const std::vector<ChatTurn>& turns, bool enable_thinking,
                                         bool add_generation_prompt) {
  const absl::Status valid = CheckTurns(turns);
  if (!valid.ok()) {
    return valid;
  }
  const int last_query = LastQuery(turns);
  std::string prompt;
  for (size_t i = 0; i < turns.size(); ++i) {
    const std::string& role = turns[i].role;
    const absl::string_view content = absl::StripAsciiWhitespace(turns[i].content);
    if (role == "assistant") {
      AppendAssistant(content, static_cast<int>(i) > last_query, &prompt);
    } else if (role == "tool") {
      if (i == 0 || turns[i - 1].role != "tool") {
        absl::StrAppend(&prompt, "<|im_start|>user");
      }
      absl::StrAppend(&prompt, "\n<tool_response>\n", content, "\n</tool_response>");
      if (i + 1 == turns.size() || turns[i + 1].role != "tool") {
        absl::StrAppend(&prompt, "<|im_end|>\n");
      }
    } else {
      absl::StrAppend(&prompt, "<|im_start|>", role, "\n", content, "<|im_end|>\n");
    }
  }
  if (add_generation_prompt) {
    absl::StrAppend(&prompt, "<|im_start|>assistant\n", kThinkOpen, "\n");
    if (!enable_thinking) {
      absl::StrAppend(&prompt, "\n", kThinkClose, "\n\n");
    }
  }
  return prompt;
}

}  // namespace lockstep
