// `lockstep chat`: see chat.h.
#include "tools/cli/chat.h"

#include <unistd.h>

#include <iostream>
#include <memory>
#include <string>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/strings/str_cat.h"
#include "proto/inference.grpc.pb.h"
#include "tools/cli/common.h"
#include "tools/cli/sampling_flags.h"

namespace lockstep {
namespace cli {
namespace {

using inference::v1::Chat;
using inference::v1::GenerateEvent;
using inference::v1::GenerateRequest;
using inference::v1::InferenceService;

struct Flags {
  ClientFlags client;
  SamplingFlags sampling;
};

void AddMessage(Chat* chat, const std::string& role, const std::string& content) {
  auto* message = chat->add_messages();
  message->set_role(role);
  message->set_content(content);
}

// Streams the assistant's answer and adds it to the conversation.
int Answer(const Flags& flags, InferenceService::Stub* stub, Chat* chat) {
  GenerateRequest request;
  flags.sampling.Fill(&request);
  *request.mutable_chat() = *chat;
  grpc::ClientContext context;
  flags.client.Prepare(&context);
  auto reader = stub->Generate(&context, request);
  GenerateEvent event;
  std::string answer;
  while (reader->Read(&event)) {
    if (!event.has_delta()) continue;
    answer += event.delta().text();
    std::cout << event.delta().text() << std::flush;
  }
  std::cout << std::endl;
  AddMessage(chat, "assistant", answer);
  return TellFailure(reader->Finish());
}

int Run(const Flags& flags) {
  if (const std::string json_only = flags.sampling.ShownByJsonOnly(); !json_only.empty()) {
    Talk(absl::StrCat("error: a chat cannot show what ", json_only,
                      " asks for; use `lockstep generate --chat --json`"));
    return kExitUsage;
  }
  const auto channel = flags.client.Connect();
  if (channel == nullptr) return kExitCannotConnect;
  const auto stub = InferenceService::NewStub(channel);
  Chat chat;
  chat.set_enable_thinking(flags.sampling.think);
  if (!flags.sampling.system.empty()) AddMessage(&chat, "system", flags.sampling.system);
  const bool prompting = isatty(STDIN_FILENO) != 0;
  if (prompting) Talk("One message a line; an empty line or the end of input ends the chat.");
  std::string line;
  while (true) {
    if (prompting) std::cerr << "> " << std::flush;
    if (!std::getline(std::cin, line) || line.empty()) return kExitOk;
    AddMessage(&chat, "user", line);
    const int exit_code = Answer(flags, stub.get(), &chat);
    if (exit_code != kExitOk) return exit_code;
  }
}

}  // namespace

void AddChat(CLI::App* app, int* exit_code) {
  CLI::App* verb = app->add_subcommand("chat", "Talk with the model, one message a line");
  auto flags = std::make_shared<Flags>();
  flags->client.AddTo(verb);
  flags->sampling.AddTo(verb);
  verb->callback([flags, exit_code]() { *exit_code = Run(*flags); });
}

}  // namespace cli
}  // namespace lockstep
