// `lockstep eval`: see eval.h.
#include "tools/cli/eval.h"

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "CLI/Validators.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "coordinator/worker_group.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"
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
  std::string set;  // empty: every set of the file
  std::string output = "table";
  LocalWorkersOptions workers;
};

struct Group {
  std::unique_ptr<LocalWorkers> workers;
  std::unique_ptr<WorkerGroup> group;
};

absl::StatusOr<Group> StartGroup(const Flags& flags, bool w8a8) {
  Group g;
  ASSIGN_OR_RETURN(g.workers, LocalWorkers::Start(flags.workers));
  WorkerGroupOptions options;
  options.addresses = g.workers->addresses();
  options.model_path = flags.model;
  options.activation_dtype =
      flags.activations == "f32" ? worker::v1::ACTIVATION_F32 : worker::v1::ACTIVATION_BF16;
  options.activation_quant =
      w8a8 ? worker::v1::ACTIVATION_QUANT_CHECKPOINT : worker::v1::ACTIVATION_QUANT_NONE;
  g.group = std::make_unique<WorkerGroup>(options);
  RETURN_IF_ERROR(g.group->Load(1, nullptr).status());
  worker::v1::ConfigureRequest limits;
  limits.set_kv_blocks(16);
  limits.set_slots(1);
  limits.set_max_batch_tokens(512);
  limits.set_max_batch_sequences(1);
  limits.set_max_logit_rows(8);
  limits.set_max_sequence_blocks(16);
  RETURN_IF_ERROR(g.group->Join(1, 1, limits));
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
  ASSIGN_OR_RETURN(Group g, StartGroup(flags, set.name == "w8a8"));
  ASSIGN_OR_RETURN(const bool routed, IsRouted(flags.model));
  StepDriver driver(g.group.get(), 1, 1);
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

int Run(const Flags& flags) {
  SetLogRole("eval");
  SetLogLevel(Severity::kWarning);
  const auto good = EvalAll(flags);
  if (!good.ok()) {
    Talk(absl::StrCat("error: ", good.status().ToString()));
    return kExitFailed;
  }
  return *good ? kExitOk : kExitCheckFailed;
}

}  // namespace

void AddEval(CLI::App* app, int* exit_code) {
  CLI::App* verb = app->add_subcommand("eval", "Compare a model with reference outputs");
  verb->require_subcommand(1);
  CLI::App* golden = verb->add_subcommand(
      "golden",
      "Serve a checkpoint folder on local workers and compare its logits, greedy tokens and "
      "quantized "
      "linears with the golden.safetensors in it. Exit code 5 when out of bounds");
  auto flags = std::make_shared<Flags>();
  flags->workers.log_level = "warning";
  golden->add_option("--model", flags->model, "The checkpoint folder")
      ->required()
      ->check(CLI::ExistingDirectory);
  golden->add_option("--tp,--tensor-parallel-size", flags->workers.count, "Workers")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  AddDeviceFlag(golden, &flags->workers);
  golden->add_option("--activations", flags->activations, "Dtype of activations")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  golden->add_option("--set", flags->set,
                     "bf16, weight_only or w8a8. Default: all that the file has");
  golden->add_option("--output", flags->output, "Form of the results")
      ->check(CLI::IsMember({"table", "json"}))
      ->capture_default_str();
  golden->add_option("--worker-binary", flags->workers.binary,
                     "The lockstep_worker program. Default: the one beside this program");
  golden->footer("Example: lockstep eval golden --model tests/testdata/qwen3_5 --tp 2");
  golden->callback([flags, exit_code]() { *exit_code = Run(*flags); });
}

}  // namespace cli
}  // namespace lockstep
