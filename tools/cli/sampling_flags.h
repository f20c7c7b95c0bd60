// Flags of the verbs that generate, and what they tell about an answer.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "CLI/App.hpp"
#include "grpcpp/grpcpp.h"
#include "proto/inference.pb.h"
#include "tools/cli/common.h"

namespace lockstep {
namespace cli {

// What is not given on the command line is left to the server's defaults.
class SamplingFlags {
 public:
  void AddTo(CLI::App* app);
  // Model, sampling, stopping and output options.
  void Fill(inference::v1::GenerateRequest* request) const;
  // The flag that was given whose effect plain text cannot show ("--n", "--logprobs"), or "".
  std::string ShownByJsonOnly() const;

  std::string system;  // for chats
  bool think = false;  // for chats

 private:
  CLI::App* app_ = nullptr;
  std::string model_;
  float temperature_ = 1;
  int32_t top_k_ = 0;
  float top_p_ = 1;
  float min_p_ = 0;
  float presence_penalty_ = 0;
  float frequency_penalty_ = 0;
  float repetition_penalty_ = 1;
  uint64_t seed_ = 0;
  int32_t n_ = 1;
  int32_t min_tokens_ = 0;
  int32_t max_tokens_ = 0;
  int32_t logprobs_ = -1;
  std::vector<std::string> stop_;
  std::vector<int32_t> stop_token_ids_;
  bool ignore_eos_ = false;
  bool include_stop_ = false;
};

// "EOS after 12 tokens (prompt 5, cached 0), first token after 0.031 s, 310 tokens/s, digest
// 0123..."
std::string Summary(const inference::v1::Finished& finished);

// Asks the server whether it has a tokenizer. An exit code; failures are told.
int ModelHasTokenizer(const ClientFlags& client, const std::shared_ptr<grpc::Channel>& channel,
                      bool* has_tokenizer);

}  // namespace cli
}  // namespace lockstep
