// `lockstep tokenize`: see tokenize.h.
#include "tools/cli/tokenize.h"

#include <cstdint>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/strings/escaping.h"
#include "absl/strings/str_join.h"
#include "proto/inference.grpc.pb.h"
#include "tools/cli/common.h"

namespace lockstep {
namespace cli {
namespace {

using inference::v1::InferenceService;

struct Flags {
  ClientFlags client;
  std::string text = "-";
  std::vector<int32_t> decode;
  bool ids_only = false;
  bool count = false;
};

int Decode(const Flags& flags, InferenceService::Stub* stub) {
  grpc::ClientContext context;
  flags.client.Prepare(&context);
  inference::v1::DetokenizeRequest request;
  for (const int32_t id : flags.decode) request.add_token_ids(id);
  inference::v1::DetokenizeResponse response;
  const grpc::Status status = stub->Detokenize(&context, request, &response);
  if (!status.ok()) return TellFailure(status);
  std::cout << response.raw_bytes() << std::flush;
  return kExitOk;
}

int Encode(const Flags& flags, InferenceService::Stub* stub) {
  grpc::ClientContext context;
  flags.client.Prepare(&context);
  inference::v1::TokenizeRequest request;
  request.set_text(flags.text == "-" ? ReadStdin() : flags.text);
  inference::v1::TokenizeResponse response;
  const grpc::Status status = stub->Tokenize(&context, request, &response);
  if (!status.ok()) return TellFailure(status);
  if (flags.count) {
    std::cout << response.token_ids_size() << std::endl;
  } else if (flags.ids_only) {
    std::cout << absl::StrJoin(response.token_ids(), ",") << std::endl;
  } else {
    for (int i = 0; i < response.token_ids_size(); ++i) {
      std::cout << response.token_ids(i) << "\t" << absl::CHexEscape(response.tokens(i)) << "\n";
    }
  }
  return kExitOk;
}

int Run(const Flags& flags) {
  const auto channel = flags.client.Connect();
  if (channel == nullptr) return kExitCannotConnect;
  const auto stub = InferenceService::NewStub(channel);
  return flags.decode.empty() ? Encode(flags, stub.get()) : Decode(flags, stub.get());
}

}  // namespace

void AddTokenize(CLI::App* app, int* exit_code) {
  CLI::App* verb = app->add_subcommand("tokenize", "Turn text into token ids, or ids into text");
  auto flags = std::make_shared<Flags>();
  flags->client.AddTo(verb);
  verb->add_option("text", flags->text, "Text; - or nothing reads stdin");
  verb->add_option("--decode", flags->decode, "Token ids to turn into text: 1,2,3")
      ->delimiter(',')
      ->allow_extra_args(false);
  verb->add_flag("--ids", flags->ids_only, "Print the ids alone, comma separated");
  verb->add_flag("--count", flags->count, "Print the number of tokens alone");
  verb->callback([flags, exit_code]() { *exit_code = Run(*flags); });
}

}  // namespace cli
}  // namespace lockstep
