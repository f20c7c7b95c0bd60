// The ChatML prompt format of Qwen3.5.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace lockstep {

struct ChatTurn {
  std::string role;  // system, user, assistant, tool
  std::string content;
};

// The prompt of the ChatML template of Qwen3.5. InvalidArgument for no messages, an unknown role,
// or a system message that is not the first.
//  1. A turn is "<|im_start|>{role}\n{content}<|im_end|>\n", its content without outer white space.
//  2. Successive tool turns form one user turn, each as
//  "<tool_response>\n{content}\n</tool_response>".
//  3. Of assistant turns before the last user turn, everything up to and including "</think>" is
//  left
//     out; later ones (steps of an answer that calls tools) keep their reasoning in "<think>" tags.
//  4. The generation prompt opens an assistant turn: with thinking its "<think>" tag is open,
//  without
//     it is already closed and empty.
absl::StatusOr<std::string> RenderChatMl(const std::vector<ChatTurn>& turns, bool enable_thinking,
                                         bool add_generation_prompt);

}  // namespace lockstep
