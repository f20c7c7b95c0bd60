// `lockstep eval`: see eval.h.
#include "tools/cli/eval.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "CLI/Validators.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "coordinator/group/worker_group.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"
#include "models/tokenizer/tokenizer.h"
#include "models/weights/checkpoint.h"
#include "nlohmann/json.hpp"
#include "tools/cli/common.h"
#include "tools/cli/local_workers.h"
#include "tools/eval/golden.h"
#include "tools/eval/step_driver.h"

namespace lockstep {
namespace cli {
namespace {

struct Flags {
  std::string model;
  std::string activations = "f32";
  std::string set;  // golden: empty: every set of the file
  std::string output = "table";
  std::string text;  // perplexity: a file
  int64_t first_tokens = 0;
  double expected = 0;
  double tolerance = 1e-3;
  LocalWorkersOptions workers;
};

// Tokens of a step of the perplexity.
constexpr int64_t kPerplexityChunk = 256;

worker::v1::ConfigureRequest OneSequence(int64_t blocks, int64_t step_tokens, int64_t logit_rows) {
  worker::v1::ConfigureRequest limits;
  limits.set_kv_blocks(blocks);
  limits.set_slots(1);
  limits.set_max_batch_tokens(step_tokens);
  limits.set_max_batch_sequences(1);
  limits.set_max_logit_rows(logit_rows);
  limits.set_max_sequence_blocks(blocks);
  return limits;
}

struct Group {
  std::unique_ptr<LocalWorkers> workers;
  std::unique_ptr<WorkerGroup> group;
  StepEpoch epoch;
};

absl::StatusOr<Group> StartGroup(const Flags& flags, bool w8a8,
                                 const worker::v1::ConfigureRequest& limits) {
  Group g;
  ASSIGN_OR_RETURN(g.workers, LocalWorkers::Start(flags.workers));
  WorkerGroupOptions options;
  options.addresses = g.workers->addresses();
  options.share_devices = true;
  options.model_path = flags.model;
  options.activation_dtype =
      flags.activations == "f32" ? worker::v1::ACTIVATION_F32 : worker::v1::ACTIVATION_BF16;
  options.activation_quant =
      w8a8 ? worker::v1::ACTIVATION_QUANT_CHECKPOINT : worker::v1::ACTIVATION_QUANT_NONE;
  g.group = std::make_unique<WorkerGroup>(options);
  RETURN_IF_ERROR(g.group->Load(1, nullptr).status());
  ASSIGN_OR_RETURN(g.epoch, g.group->Join(1, limits));
  return g;
}

void PrintTable(const std::string& set, const GoldenReport& report) {
  for (const GoldenPrompt& p : report.prompts) {
    std::cout << absl::StrFormat(
        "%-11s  prompt %d  %4d tokens  %2d rows  worst %.3e  tokens %2d/%2d  smallest margin %.4f  "
        "digest %016x\n",
        set, p.index, p.prompt_tokens, p.rows, p.worst, p.tokens_agreed, p.tokens_compared,
        p.smallest_margin, p.digest);
  }
  if (!report.linears.empty()) {
    double worst = 0;
    int64_t bytes = 0, scales = 0;
    for (const GoldenLinear& l : report.linears) {
      worst = std::max(worst, l.worst);
      bytes += l.bytes_differing;
      scales += l.scales_differing;
    }
    std::cout << absl::StrFormat(
        "%-11s  %d linears: %d quantized bytes and %d scales differ, worst output error %.3e\n",
        set, report.linears.size(), bytes, scales, worst);
  }
  std::cout << absl::StrFormat("%-11s  median row error %.3e; allowed", set, report.median);
  if (report.bounds.every_row > 0) {
    std::cout << absl::StrFormat(" %.1e", report.bounds.every_row);
  }
  if (report.bounds.median > 0) std::cout << absl::StrFormat(" median %.1e", report.bounds.median);
  std::cout << (report.failures.empty() ? ": within bounds\n" : ": OUT OF BOUNDS\n");
}

void PrintJson(const std::string& set, const GoldenReport& report) {
  for (const GoldenPrompt& p : report.prompts) {
    std::cout << nlohmann::json{{"set", set},
                                {"prompt", p.index},
                                {"prompt_tokens", p.prompt_tokens},
                                {"rows", p.rows},
                                {"worst_relative_error", p.worst},
                                {"tokens_agreed", p.tokens_agreed},
                                {"tokens_compared", p.tokens_compared},
                                {"smallest_margin", p.smallest_margin},
                                {"digest", absl::StrFormat("%016x", p.digest)}}
                     .dump()
              << "\n";
  }
  for (const GoldenLinear& l : report.linears) {
    std::cout << nlohmann::json{{"set", set},
                                {"linear", l.module},
                                {"bytes_differing", l.bytes_differing},
                                {"scales_differing", l.scales_differing},
                                {"worst_relative_error", l.worst}}
                     .dump()
              << "\n";
  }
  std::cout << nlohmann::json{{"set", set},
                              {"median_relative_error", report.median},
                              {"allowed", report.bounds.every_row},
                              {"within_bounds", report.failures.empty()}}
                   .dump()
            << "\n";
}

absl::StatusOr<bool> EvalSet(const Flags& flags, const Checkpoint& golden, const GoldenSet& set) {
  ASSIGN_OR_RETURN(Group g, StartGroup(flags, set.name == "w8a8", OneSequence(16, 512, 8)));
  ASSIGN_OR_RETURN(const bool routed, IsRouted(flags.model));
  StepDriver driver(g.group.get(), g.epoch);
  ASSIGN_OR_RETURN(const GoldenReport report,
                   EvalGolden(golden, set, BoundsOf(set.name, flags.activations == "f32", routed),
                              &driver, g.group.get()));
  if (flags.output == "json") {
    PrintJson(set.name, report);
  } else {
    PrintTable(set.name, report);
  }
  for (const std::string& failure : report.failures) Talk(absl::StrCat(set.name, ": ", failure));
  g.group->Shutdown();
  return report.failures.empty();
}

absl::StatusOr<bool> EvalAll(const Flags& flags) {
  ASSIGN_OR_RETURN(const auto golden,
                   Checkpoint::OpenFile(absl::StrCat(flags.model, "/golden.safetensors")));
  bool found = false, good = true;
  for (const GoldenSet& set : GoldenSets(*golden)) {
    if (!flags.set.empty() && flags.set != set.name) continue;
    found = true;
    ASSIGN_OR_RETURN(const bool within, EvalSet(flags, *golden, set));
    good = good && within;
  }
  if (!found) {
    return absl::NotFoundError(absl::StrCat(flags.model, "/golden.safetensors has no set",
                                            flags.set.empty() ? "" : " ", flags.set));
  }
  return good;
}

absl::StatusOr<std::vector<int32_t>> FirstTokens(const Flags& flags) {
  std::ifstream file(flags.text, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::Load(flags.model));
  ASSIGN_OR_RETURN(std::vector<int32_t> ids, tokenizer->Encode(text));
  if (flags.first_tokens > 0 && static_cast<int64_t>(ids.size()) > flags.first_tokens) {
    ids.resize(static_cast<size_t>(flags.first_tokens));
  }
  if (ids.size() < 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("--text ", flags.text, " has ", ids.size(), " tokens; 2 are needed"));
  }
  return ids;
}

absl::StatusOr<bool> Perplexity(const Flags& flags) {
  ASSIGN_OR_RETURN(const std::vector<int32_t> ids, FirstTokens(flags));
  const int64_t blocks = static_cast<int64_t>(ids.size()) / 64 + 1;
  ASSIGN_OR_RETURN(
      Group g, StartGroup(flags, false, OneSequence(blocks, kPerplexityChunk, kPerplexityChunk)));
  StepDriver driver(g.group.get(), g.epoch);
  ASSIGN_OR_RETURN(const double perplexity, EvalPerplexity(ids, kPerplexityChunk, &driver));
  g.group->Shutdown();
  const double error = flags.expected > 0 ? std::fabs(perplexity / flags.expected - 1) : 0;
  // NaN is not within anything.
  const bool within = std::isfinite(perplexity) && error <= flags.tolerance;
  if (flags.output == "json") {
    nlohmann::json line{{"tokens", ids.size()}, {"perplexity", perplexity}};
    if (flags.expected > 0) {
      line["expected"] = flags.expected;
      line["relative_error"] = error;
      line["within_bounds"] = within;
    }
    std::cout << line.dump() << "\n";
    return within;
  }
  std::cout << absl::StrFormat("perplexity %.6f over %d tokens", perplexity, ids.size());
  if (flags.expected > 0) {
    std::cout << absl::StrFormat(", expected %.6f, off by %.4f%%: %s", flags.expected, 100 * error,
                                 within ? "within bounds" : "OUT OF BOUNDS");
  }
  std::cout << "\n";
  return within;
}

int Run(const Flags& flags, absl::StatusOr<bool> (*evaluate)(const Flags&)) {
  SetLogRole("eval");
  SetLogLevel(Severity::kWarning);
  const auto good = evaluate(flags);
  if (!good.ok()) {
    Talk(absl::StrCat("error: ", good.status().ToString()));
    return kExitFailed;
  }
  return *good ? kExitOk : kExitCheckFailed;
}

// The flags of both evaluations.
void AddCommon(CLI::App* verb, Flags* flags) {
  verb->add_option("--model", flags->model, "The checkpoint folder")
      ->required()
      ->check(CLI::ExistingDirectory);
  verb->add_option("--tp,--tensor-parallel-size", flags->workers.count, "Workers")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  AddDeviceFlag(verb, &flags->workers);
  verb->add_option("--activations", flags->activations, "Dtype of activations")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  verb->add_option("--output", flags->output, "Form of the results")
      ->check(CLI::IsMember({"table", "json"}))
      ->capture_default_str();
  verb->add_option("--worker-binary", flags->workers.binary,
                   "The lockstep_worker program. Default: the one beside this program");
}

}  // namespace

void AddEval(CLI::App* app, int* exit_code) {
  CLI::App* verb = app->add_subcommand("eval", "Compare a model with reference outputs");
  verb->require_subcommand(1);
  auto flags = std::make_shared<Flags>();
  flags->workers.log_level = "warning";

  CLI::App* golden = verb->add_subcommand(
      "golden",
      "Serve a checkpoint folder on local workers and compare its logits, greedy tokens and "
      "quantized linears with the golden.safetensors in it. Exit code 5 when out of bounds");
  AddCommon(golden, flags.get());
  golden->add_option("--set", flags->set,
                     "bf16, weight_only or w8a8. Default: all that the file has");
  golden->footer("Example: lockstep eval golden --model tests/testdata/qwen3_5 --tp 2");
  golden->callback([flags, exit_code]() { *exit_code = Run(*flags, EvalAll); });

  CLI::App* perplexity = verb->add_subcommand(
      "perplexity",
      "Serve a checkpoint folder on local workers and measure how well it predicts a text, without "
      "quantized activations. Exit code 5 when that is not what was expected");
  AddCommon(perplexity, flags.get());
  perplexity->add_option("--text", flags->text, "The file with the text")
      ->required()
      ->check(CLI::ExistingFile);
  perplexity->add_option("--first-tokens", flags->first_tokens, "Tokens of it. Default (0): all")
      ->check(CLI::NonNegativeNumber);
  perplexity->add_option("--expected", flags->expected, "What it is to be")
      ->check(CLI::PositiveNumber);
  perplexity->add_option("--tolerance", flags->tolerance, "Relative difference that is allowed")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  perplexity->callback([flags, exit_code]() { *exit_code = Run(*flags, Perplexity); });
}

}  // namespace cli
}  // namespace lockstep
