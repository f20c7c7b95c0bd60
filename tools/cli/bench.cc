// `lockstep bench`: see bench.h.
#include "tools/cli/bench.h"

#include <stdio.h>

#include <iostream>
#include <memory>
#include <vector>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "CLI/Validators.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"
#include "proto/model.grpc.pb.h"
#include "tools/cli/bench_serve.h"
#include "tools/cli/common.h"

namespace lockstep {
namespace cli {
namespace {

struct Flags {
  ClientFlags client;
  std::vector<int> concurrency = {1, 4, 8, 16};
  BenchOptions bench;
};

nlohmann::json ToJson(const BenchOptions& options, const BenchResult& result) {
  return {{"concurrency", result.concurrency},
          {"prompt_tokens", options.prompt_tokens},
          {"max_tokens", options.max_tokens},
          {"requests", result.requests},
          {"output_tokens", result.output_tokens},
          {"window_seconds", result.window_seconds},
          {"tokens_per_second", result.tokens_per_second},
          {"ttft_ms_p50", result.ttft_p50},
          {"ttft_ms_p99", result.ttft_p99},
          {"inter_token_ms_p50", result.inter_token_p50},
          {"inter_token_ms_p99", result.inter_token_p99},
          {"steps", result.steps},
          {"step_ms_mean", result.step_ms},
          {"wall_ms_per_step", result.wall_ms_per_step},
          {"wall_per_step_ratio", result.wall_per_step_ratio}};
}

void TellRow(const BenchResult& result) {
  Talk(absl::StrFormat("%5d %9d %10.1f %9.1f %9.1f %9.2f %9.2f %9.3f %9.3f %6.2f",
                       result.concurrency, result.requests, result.tokens_per_second,
                       result.ttft_p50, result.ttft_p99, result.inter_token_p50,
                       result.inter_token_p99, result.step_ms, result.wall_ms_per_step,
                       result.wall_per_step_ratio));
}

int Run(const Flags& flags) {
  const auto channel = flags.client.Connect();
  if (channel == nullptr) return kExitCannotConnect;
  const auto models = inference::v1::ModelService::NewStub(channel);
  grpc::ClientContext context;
  inference::v1::Model model;
  const grpc::Status status = models->GetModel(&context, {}, &model);
  if (!status.ok()) return TellFailure(status);
  Talk(absl::StrFormat("%s, tp %d, %s; prompts of %d tokens, %d new tokens", model.name(),
                       model.tensor_parallel(), model.quantization(), flags.bench.prompt_tokens,
                       flags.bench.max_tokens));
  Talk(
      "    C  requests   tokens/s  ttft p50  ttft p99 inter p50 inter p99      step wall/step  "
      "ratio   (ms)");
  for (const int concurrency : flags.concurrency) {
    BenchOptions options = flags.bench;
    options.concurrency = concurrency;
    options.vocab_size = model.vocab_size();
    const auto result = RunBench(channel, options);
    if (!result.ok()) {
      Talk(absl::StrCat("error: with ", concurrency, " streams: ", result.status().ToString()));
      return kExitFailed;
    }
    TellRow(*result);
    std::cout << ToJson(options, *result).dump() << std::endl;
  }
  return kExitOk;
}

}  // namespace

void AddBench(CLI::App* app, int* exit_code) {
  CLI::App* bench = app->add_subcommand("bench", "Measure");
  bench->require_subcommand(1);
  CLI::App* serve = bench->add_subcommand(
      "serve", "Measure a running server with closed-loop streams: JSON lines and a table");
  auto flags = std::make_shared<Flags>();
  flags->client.AddTo(serve);
  serve->add_option("--concurrency", flags->concurrency, "Numbers of streams: 1,4,8,16")
      ->delimiter(',')
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  serve->add_option("--prompt-tokens", flags->bench.prompt_tokens, "Tokens of each prompt")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  serve->add_option("--max-tokens", flags->bench.max_tokens, "Tokens to generate per request")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  serve
      ->add_option("--requests", flags->bench.requests,
                   "Requests of each stream, after one that warms up")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  serve->add_flag("--prefix-cache", flags->bench.prefix_cache, "Let prompts use the prefix cache");
  serve->add_option("--seed", flags->bench.seed, "Of the random prompts")->capture_default_str();
  serve->callback([flags, exit_code]() { *exit_code = Run(*flags); });
}

}  // namespace cli
}  // namespace lockstep
