// Compares a running group of workers with the reference outputs in a checkpoint folder's
// golden.safetensors (tests/testdata/README.md says what they are and where the bounds come from).
// Everything goes through worker processes and the step stream: there is no second forward path.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/group/worker_group.h"
#include "models/tokenizer/tokenizer.h"
#include "models/weights/checkpoint.h"
#include "tools/eval/step_driver.h"

namespace lockstep {

// The reference outputs of one way of running a checkpoint.
struct GoldenSet {
  std::string name;    // "bf16", "weight_only", "w8a8"
  std::string prefix;  // of the tensor names: "", "weight_only.", "w8a8."
  std::string ids_prefix;
};

// The sets of a golden file: {bf16}, or those of {weight_only, w8a8} that are there.
std::vector<GoldenSet> GoldenSets(const Checkpoint& golden);

// Largest error of a row, relative to the row's largest magnitude, that is allowed.
struct GoldenBounds {
  double every_row = 0;  // 0: none, and no token is compared
  double median = 0;     // 0: no bound of its own
};
// `routed`: with BF16 activations a router may choose otherwise, so single rows have no bound.
GoldenBounds BoundsOf(const std::string& set, bool f32_activations, bool routed);
// Whether the model of a checkpoint folder routes tokens to experts.
absl::StatusOr<bool> IsRouted(const std::string& directory);

struct GoldenPrompt {
  int index = 0;
  int64_t prompt_tokens = 0;
  int64_t rows = 0;           // compared
  double worst = 0;           // largest relative logit error
  int64_t tokens_agreed = 0;  // of tokens_compared: steps whose margin exceeds the allowed error
  int64_t tokens_compared = 0;
  double smallest_margin = 0;  // reference top-1 minus top-2, over the greedy steps
  uint64_t digest = 0;         // over all logits rows
};
struct GoldenLinear {
  std::string module;
  int64_t bytes_differing = 0;  // quantized input bytes
  int64_t scales_differing = 0;
  double worst = 0;  // output error relative to the largest output
};
struct GoldenReport {
  std::vector<GoldenPrompt> prompts;
  std::vector<GoldenLinear> linears;
  double median = 0;  // of all rows' errors
  GoldenBounds bounds;
  std::vector<std::string> failures;  // one line each; empty: within bounds
};

// `driver` steps on `group`, which is joined and idle.
absl::StatusOr<GoldenReport> EvalGolden(const Checkpoint& golden, const GoldenSet& set,
                                        const GoldenBounds& bounds, StepDriver* driver,
                                        WorkerGroup* group);

// Perplexity of the first `max_tokens` tokens: exp of the mean negative log likelihood of each
// token given all before it.
absl::StatusOr<double> EvalPerplexity(const std::vector<int32_t>& tokens, int64_t chunk,
                                      StepDriver* driver);

}  // namespace lockstep
