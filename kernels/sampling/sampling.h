// Sampling and the determinism digest. Every rank has the whole row of logits and computes the same
// token. Order (numerics N11): penalties, bias, masks, temperature, top-k, top-p, min-p; ties by
// lower id. top-p keeps the smallest set of best ids whose weights (gumbel_noise.h) reach top_p of
// all weights that top-k leaves. Randomness is counter-based, keyed by (seed, output index,
// absolute position), so it depends on nothing else.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/base/tensor_view.h"
#include "kernels/runtime/exec_context.h"

namespace lockstep {

struct SamplingParams {
  float temperature = 1.0f;        // 0: greedy
  int32_t top_k = 0;               // 0: off
  float top_p = 1.0f;              // 1: off
  float min_p = 0.0f;              // 0: off
  float presence_penalty = 0.0f;   // subtracted once from every id that was generated
  float frequency_penalty = 0.0f;  // subtracted per occurrence among generated ids
  float repetition_penalty =
      1.0f;  // divides positive, multiplies negative logits of prompt and output ids
  uint64_t seed = 0;
  uint32_t output_index = 0;  // which of a request's n outputs
  std::vector<std::pair<int32_t, float>> logit_bias;
  std::vector<int32_t> allowed_ids;  // empty: all
  std::vector<int32_t> banned_ids;
  std::vector<int32_t> stop_ids;  // masked until min_tokens ids were generated
  int32_t min_tokens = 0;
  int32_t num_logprobs = -1;  // -1: none; 0: the sampled id only; k: and the k best
};

// The sampling state of one slot: a function of (params, token log) and nothing else. Built by
// Reset from the whole log; updated by Append with each token that the device sampled.
class SamplingState {
 public:
  // `prompt` and `output`: all token ids so far. Ids are in [0, vocab_size).
  void Reset(SamplingParams params, int64_t vocab_size, const std::vector<int32_t>& prompt,
             const std::vector<int32_t>& output);
  void Append(int32_t id);

  const SamplingParams& params() const { return params_; }
  int64_t vocab_size() const { return static_cast<int64_t>(output_counts_.size()); }
  int64_t num_output() const { return num_output_; }
  // Occurrences of `id` among generated ids; whether it occurs in the prompt.
  int32_t output_count(int32_t id) const { return output_counts_[static_cast<size_t>(id)]; }
  bool in_prompt(int32_t id) const { return in_prompt_[static_cast<size_t>(id)] != 0; }

 private:
  SamplingParams params_;
  int64_t num_output_ = 0;
  std::vector<int32_t> output_counts_;
  std::vector<uint8_t> in_prompt_;
};

struct SampleResult {
  int32_t id = -1;
  bool nan = false;         // the row holds a NaN or +infinity; id is then -1
  bool all_masked = false;  // every id is masked or at -infinity; id is then -1
  uint64_t digest = 0;      // LogitsDigest of the raw row
  float logprob = 0.0f;     // of id, under softmax of the raw logits; 0 without num_logprobs
  std::vector<std::pair<int32_t, float>> top_logprobs;  // best first, ties by lower id
};

// Digest of a row of logits: the sum modulo 2^64 over ids of Mix64(id << 32 | bits of the logit).
// A sum, so that shards of the vocabulary add up to it.
uint64_t LogitsDigest(const float* logits, int64_t vocab_size);

// Samples row r of `logits` (F32 [R, V]; columns >= vocab_size are padding and never chosen) with
// states[r] for the token at absolute position positions[r]. Does not change the states. Logits of
// -infinity are legal and never chosen. A row without a choosable id says so in its result (`nan`,
// `all_masked`); the other rows are sampled. Ids of bias and masks outside the vocabulary have no
// effect. InvalidArgument for shapes that do not fit; a dry run ignores states and positions.
absl::Status Sample(ExecContext* ctx, ConstTensorView logits, int64_t vocab_size,
                    const std::vector<const SamplingState*>& states,
                    const std::vector<int64_t>& positions, std::vector<SampleResult>* results);

}  // namespace lockstep
