// `lockstep generate`: see generate.h.
#include "tools/cli/generate.h"

#include <unistd.h>

#include <cstdint>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/strings/str_cat.h"
#include "google/protobuf/util/json_util.h"
#include "proto/inference.grpc.pb.h"
#include "tools/cli/common.h"
#include "tools/cli/sampling_flags.h"

namespace lockstep {
namespace cli {
namespace {

using inference::v1::GenerateEvent;
using inference::v1::GenerateRequest;

struct Flags {
  ClientFlags client;
  SamplingFlags sampling;
  std::string prompt = "-";
  std::vector<int32_t> token_ids;
  bool chat = false;
  bool json = false;
  bool echo = false;
  std::string request_id;
};

GenerateRequest MakeRequest(const Flags& flags) {
  GenerateRequest request;
  flags.sampling.Fill(&request);
  request.set_request_id(flags.request_id);
  if (flags.echo) request.mutable_output()->set_echo(true);
  if (!flags.token_ids.empty()) {
    for (const int32_t id : flags.token_ids) request.mutable_token_ids()->add_ids(id);
    return request;
  }
  const std::string prompt = flags.prompt == "-" ? ReadStdin() : flags.prompt;
  if (!flags.chat) {
    request.set_text(prompt);
    return request;
  }
  if (!flags.sampling.system.empty()) {
    auto* system = request.mutable_chat()->add_messages();
    system->set_role("system");
    system->set_content(flags.sampling.system);
  }
  auto* user = request.mutable_chat()->add_messages();
  user->set_role("user");
  user->set_content(prompt);
  request.mutable_chat()->set_enable_thinking(flags.sampling.think);
  return request;
}

void PrintJson(const GenerateEvent& event) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string line;
  if (!google::protobuf::util::MessageToJsonString(event, &line, options).ok()) return;
  std::cout << line << std::endl;
}

// Text as it comes; ids where the server gives no text.
void PrintDelta(const inference::v1::Delta& delta, bool* ids_only) {
  if (delta.text().empty() && *ids_only) {
    for (const int32_t id : delta.token_ids()) std::cout << id << " ";
  }
  if (!delta.text().empty()) *ids_only = false;
  std::cout << delta.text() << std::flush;
}

int Run(const Flags& flags) {
  const std::string json_only = flags.sampling.ShownByJsonOnly();
  if (!json_only.empty() && !flags.json) {
    Talk(absl::StrCat("error: plain text cannot show what ", json_only, " asks for; add --json"));
    return kExitUsage;
  }
  const GenerateRequest request = MakeRequest(flags);
  const auto channel = flags.client.Connect();
  if (channel == nullptr) return kExitCannotConnect;
  bool has_tokenizer = false;
  const int known = ModelHasTokenizer(flags.client, channel, &has_tokenizer);
  if (known != kExitOk) return known;

  const auto stub = inference::v1::InferenceService::NewStub(channel);
  grpc::ClientContext context;
  flags.client.Prepare(&context);
  auto reader = stub->Generate(&context, request);
  GenerateEvent event;
  bool ids_only = !has_tokenizer;
  while (reader->Read(&event)) {
    if (flags.json) {
      PrintJson(event);
    } else if (event.has_delta()) {
      PrintDelta(event.delta(), &ids_only);
    }
    if (event.has_finished()) {
      // For people only: what a program reads is the text and nothing else.
      if (!flags.json && isatty(STDOUT_FILENO) != 0) std::cout << std::endl;
      Talk(Summary(event.finished()));
    }
  }
  return TellFailure(reader->Finish());
}

}  // namespace

void AddGenerate(CLI::App* app, int* exit_code) {
  CLI::App* verb = app->add_subcommand("generate", "Stream the continuation of a prompt to stdout");
  auto flags = std::make_shared<Flags>();
  flags->client.AddTo(verb);
  flags->sampling.AddTo(verb);
  CLI::Option* prompt =
      verb->add_option("prompt", flags->prompt, "The prompt; - or nothing reads stdin");
  CLI::Option* chat =
      verb->add_flag("--chat", flags->chat, "The prompt is a message of a user to an assistant");
  verb->add_option("--token-ids", flags->token_ids, "The prompt as token ids: 1,2,3")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->excludes(prompt)
      ->excludes(chat);
  verb->add_flag("--echo", flags->echo, "Print the prompt first");
  verb->add_flag("--json", flags->json, "Print every event as a line of JSON");
  verb->add_option("--request-id", flags->request_id, "Id of the request, for cancellation");
  verb->footer("Example: lockstep generate --temperature 0 --max-tokens 32 \"Once upon a time\"");
  verb->callback([flags, exit_code]() { *exit_code = Run(*flags); });
}

}  // namespace cli
}  // namespace lockstep
