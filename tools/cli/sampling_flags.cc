// Flags of the verbs that generate: see sampling_flags.h.
#include "tools/cli/sampling_flags.h"

#include <limits>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/model.grpc.pb.h"

namespace lockstep {
namespace cli {

namespace {

// The library's own parsing wraps negative numbers around, cuts large ones off, and takes a leading
// zero for octal.
std::string CheckSeed(const std::string& text) {
  uint64_t seed = 0;
  const bool plain = text.find_first_not_of("0123456789") == std::string::npos &&
                     (text.size() == 1 || text[0] != '0');
  if (plain && absl::SimpleAtoi(text, &seed)) return "";
  return absl::StrCat(text, " is no number from 0 to ", std::numeric_limits<uint64_t>::max());
}

}  // namespace

void SamplingFlags::AddTo(CLI::App* app) {
  app_ = app;
  app->add_option("--model", model_, "Model to ask for. Default: the served one");
  app->add_option("--temperature", temperature_, "0 takes the likeliest token. Default 1");
  app->add_option("--top-k", top_k_, "Sample among the k likeliest tokens. Default 0: all");
  app->add_option("--top-p", top_p_, "Sample among the tokens that make up this probability");
  app->add_option("--min-p", min_p_, "Drop tokens below this share of the likeliest one");
  app->add_option("--presence-penalty", presence_penalty_, "Against tokens that occurred");
  app->add_option("--frequency-penalty", frequency_penalty_, "The same per occurrence");
  app->add_option("--repetition-penalty", repetition_penalty_, "Above 1: against repetition");
  app->add_option("--seed", seed_, "Equal seeds give equal answers. Default: random")
      ->check(CheckSeed);
  app->add_option("--n", n_, "Outputs to generate. Default 1");
  app->add_option("--min-tokens", min_tokens_, "Do not end before this many tokens");
  app->add_option("--max-tokens", max_tokens_, "End after this many. Default: the context");
  app->add_option("--logprobs", logprobs_, "Log probabilities: 0 of the token, k of the k best");
  app->add_option("--stop", stop_, "Text that ends the output; may be given several times")
      ->allow_extra_args(false);
  app->add_option("--stop-token-ids", stop_token_ids_, "Ids that end the output: 1,2,3")
      ->delimiter(',')
      ->allow_extra_args(false);
  app->add_flag("--ignore-eos", ignore_eos_, "Do not end at the model's end of text");
  app->add_flag("--include-stop", include_stop_, "Keep the stop text in the output");
  app->add_option("--system", system, "System message of a chat");
  app->add_flag("--think", think, "Let the assistant of a chat reason first");
}

void SamplingFlags::Fill(inference::v1::GenerateRequest* request) const {
  const auto given = [this](const char* name) { return app_->count(name) > 0; };
  request->set_model(model_);
  auto* s = request->mutable_sampling();
  if (given("--temperature")) s->set_temperature(temperature_);
  if (given("--top-k")) s->set_top_k(top_k_);
  if (given("--top-p")) s->set_top_p(top_p_);
  if (given("--min-p")) s->set_min_p(min_p_);
  if (given("--presence-penalty")) s->set_presence_penalty(presence_penalty_);
  if (given("--frequency-penalty")) s->set_frequency_penalty(frequency_penalty_);
  if (given("--repetition-penalty")) s->set_repetition_penalty(repetition_penalty_);
  if (given("--seed")) s->set_seed(seed_);
  if (given("--n")) s->set_n(n_);
  if (given("--min-tokens")) s->set_min_tokens(min_tokens_);
  if (given("--max-tokens")) s->set_max_tokens(max_tokens_);
  if (given("--logprobs")) request->mutable_output()->set_logprobs(logprobs_);
  auto* stopping = request->mutable_stopping();
  for (const std::string& stop : stop_) stopping->add_stop_strings(stop);
  for (const int32_t id : stop_token_ids_) stopping->add_stop_token_ids(id);
  if (ignore_eos_) stopping->set_ignore_eos(true);
  if (include_stop_) stopping->set_include_stop_in_output(true);
}

std::string SamplingFlags::ShownByJsonOnly() const {
  if (n_ > 1) return "--n";
  return logprobs_ >= 0 ? "--logprobs" : "";
}

std::string Summary(const inference::v1::Finished& finished) {
  const auto& usage = finished.usage();
  const auto& timings = finished.timings();
  const double decode = timings.decode_seconds();
  // The first token belongs to the prefill.
  const double rate =
      decode > 0 ? static_cast<double>(usage.completion_tokens() - 1) / decode : 0.0;
  std::string line = absl::StrFormat(
      "%s after %d tokens (prompt %d, cached %d), first token after %.3f s, %.1f tokens/s, digest "
      "%016x",
      inference::v1::FinishReason_Name(finished.reason()), usage.completion_tokens(),
      usage.prompt_tokens(), usage.cached_prompt_tokens(),
      timings.queued_seconds() + timings.prefill_seconds(), rate, finished.determinism_digest());
  if (finished.preemptions() > 0) absl::StrAppend(&line, ", preempted ", finished.preemptions());
  return line;
}

int ModelHasTokenizer(const ClientFlags& client, const std::shared_ptr<grpc::Channel>& channel,
                      bool* has_tokenizer) {
  const auto stub = inference::v1::ModelService::NewStub(channel);
  grpc::ClientContext context;
  client.Prepare(&context);
  inference::v1::Model model;
  const grpc::Status status = stub->GetModel(&context, {}, &model);
  if (!status.ok()) return TellFailure(status);
  *has_tokenizer = model.has_tokenizer();
  return kExitOk;
}

}  // namespace cli
}  // namespace lockstep
