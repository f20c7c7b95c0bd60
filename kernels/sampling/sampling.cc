#include "kernels/sampling/sampling.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/base/hash.h"
#include "kernels/base/math.h"
#include "kernels/base/status_macros.h"
#include "kernels/runtime/arm_table.h"
#include "kernels/runtime/cpu_isa.h"
#include "kernels/runtime/op_check.h"
#include "kernels/sampling/gumbel_noise.h"
#include "kernels/sampling/logits_rows.h"

namespace lockstep {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();
// Rows that have temporaries at the same time.
constexpr int64_t kRowsAtOnce = 8;

struct LogitsFunctions {
  decltype(&generic::ScanRow) scan;
  decltype(&generic::FindFirst) find_first;
  decltype(&generic::SumExp) sum_exp;
  decltype(&generic::SumWeights) sum_weights;
  decltype(&generic::GumbelArgmax) gumbel_argmax;
};

LogitsFunctions SelectFunctions() {
  return {SelectIsa(generic::ScanRow, avx2::ScanRow, avx512::ScanRow),
          SelectIsa(generic::FindFirst, avx2::FindFirst, avx512::FindFirst),
          SelectIsa(generic::SumExp, avx2::SumExp, avx512::SumExp),
          SelectIsa(generic::SumWeights, avx2::SumWeights, avx512::SumWeights),
          SelectIsa(generic::GumbelArgmax, avx2::GumbelArgmax, avx512::GumbelArgmax)};
}

// Temporaries of one row.
struct Scratch {
  float* logits;  // [vocab]
  int32_t* ids;   // [vocab]
};

// Best first: by value, then by lower id.
struct Better {
  const float* logits;
  bool operator()(int32_t a, int32_t b) const {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  }
};

bool InVocabulary(int32_t id, int64_t vocab_size) { return id >= 0 && id < vocab_size; }

bool ChangesLogits(const SamplingState& state) {
  const SamplingParams& p = state.params();
  return p.presence_penalty != 0.0f || p.frequency_penalty != 0.0f ||
         p.repetition_penalty != 1.0f || !p.logit_bias.empty() || !p.allowed_ids.empty() ||
         !p.banned_ids.empty() || state.num_output() < p.min_tokens;
}

void ApplyPenalties(const SamplingState& state, int64_t vocab_size, float* x) {
  const SamplingParams& p = state.params();
  if (p.presence_penalty == 0.0f && p.frequency_penalty == 0.0f && p.repetition_penalty == 1.0f) {
    return;
  }
  for (int32_t id = 0; id < vocab_size; ++id) {
    const int32_t count = state.output_count(id);
    if (count > 0 || state.in_prompt(id)) {
      x[id] = x[id] > 0.0f ? x[id] / p.repetition_penalty : x[id] * p.repetition_penalty;
    }
    if (count > 0) {
      x[id] -= p.frequency_penalty * static_cast<float>(count);
      x[id] -= p.presence_penalty;
    }
  }
}

// Penalties, bias, masks, in this order. Ids beyond the vocabulary are of no effect.
void ChangeLogits(const SamplingState& state, int64_t vocab_size, const Scratch& scratch) {
  const SamplingParams& p = state.params();
  float* x = scratch.logits;
  ApplyPenalties(state, vocab_size, x);
  for (const auto& bias : p.logit_bias) {
    if (InVocabulary(bias.first, vocab_size)) x[bias.first] += bias.second;
  }
  if (!p.allowed_ids.empty()) {
    int32_t* allowed = scratch.ids;
    std::fill(allowed, allowed + vocab_size, 0);
    for (int32_t id : p.allowed_ids) {
      if (InVocabulary(id, vocab_size)) allowed[id] = 1;
    }
    for (int64_t id = 0; id < vocab_size; ++id) {
      if (allowed[id] == 0) x[id] = kMasked;
    }
  }
  for (int32_t id : p.banned_ids) {
    if (InVocabulary(id, vocab_size)) x[id] = kMasked;
  }
  if (state.num_output() < p.min_tokens) {
    for (int32_t id : p.stop_ids) {
      if (InVocabulary(id, vocab_size)) x[id] = kMasked;
    }
  }
}

uint64_t RowKey(const SamplingParams& p, int64_t position) {
  return RowNoiseKey(RequestNoiseKey(p.seed, p.output_index), position);
}

// Cuts the `count` best ids, sorting as many of them as needed, to the smallest set whose
// weights reach top_p of `total`. `sorted` of them are sorted already.
int64_t CutToTopP(const float* x, float maximum, float temperature, float top_p, uint64_t total,
                  int64_t count, int64_t sorted, int32_t* ids) {
  const double wanted = static_cast<double>(top_p) * static_cast<double>(total);
  uint64_t sum = 0;
  int64_t step = 256;
  for (int64_t i = 0; i < count; ++i) {
    if (i == sorted) {
      const int64_t end = std::min(count, sorted + step);
      std::partial_sort(ids + sorted, ids + end, ids + count, Better{x});
      sorted = end;
      step *= 4;
    }
    sum += NucleusWeight(ScaledLogit(x[ids[i]], maximum, temperature));
    if (static_cast<double>(sum) >= wanted) return i + 1;
  }
  return count;
}

// Gumbel-max within the set that top-k, top-p and min-p leave.
int32_t SampleRestricted(const LogitsFunctions& functions, const SamplingParams& p, const float* x,
                         int64_t vocab_size, float maximum, uint64_t key, int32_t* ids) {
  int64_t count = 0;
  for (int64_t id = 0; id < vocab_size; ++id) {
    if (x[id] > kMasked) ids[count++] = static_cast<int32_t>(id);
  }
  int64_t sorted = 0;
  if (p.top_k > 0 && p.top_k < count) {
    std::partial_sort(ids, ids + p.top_k, ids + count, Better{x});
    count = sorted = p.top_k;
  }
  if (p.top_p < 1.0f) {
    uint64_t total = 0;
    if (sorted > 0) {
      for (int64_t i = 0; i < count; ++i) {
        total += NucleusWeight(ScaledLogit(x[ids[i]], maximum, p.temperature));
      }
    } else {
      total = functions.sum_weights(x, vocab_size, maximum, p.temperature);
    }
    count = CutToTopP(x, maximum, p.temperature, p.top_p, total, count, sorted, ids);
  }
  int32_t best = -1;
  float best_score = kMasked;
  for (int64_t i = 0; i < count; ++i) {
    const float z = ScaledLogit(x[ids[i]], maximum, p.temperature);
    if (p.min_p > 0.0f && z != 0.0f && Exp(z) < p.min_p) continue;
    const float score = z + GumbelNoise(key, static_cast<uint64_t>(ids[i]));
    if (best < 0 || score > best_score || (score == best_score && ids[i] < best)) {
      best = ids[i];
      best_score = score;
    }
  }
  return best;
}

void AddLogprobs(const LogitsFunctions& functions, const float* logits, int64_t vocab_size,
                 float maximum, int32_t num_logprobs, int32_t* ids, SampleResult* result) {
  const float log_sum = Log(functions.sum_exp(logits, vocab_size, maximum, 1.0f));
  const auto logprob = [&](int32_t id) { return (logits[id] - maximum) - log_sum; };
  if (result->id >= 0) result->logprob = logprob(result->id);
  const int64_t count = std::min<int64_t>(num_logprobs, vocab_size);
  if (count <= 0) return;
  for (int64_t id = 0; id < vocab_size; ++id) ids[id] = static_cast<int32_t>(id);
  std::partial_sort(ids, ids + count, ids + vocab_size, Better{logits});
  for (int64_t i = 0; i < count; ++i) result->top_logprobs.emplace_back(ids[i], logprob(ids[i]));
}

void SampleRow(const LogitsFunctions& functions, const float* logits, int64_t vocab_size,
               const SamplingState& state, int64_t position, const Scratch& scratch,
               SampleResult* result) {
  const SamplingParams& p = state.params();
  const RowScan raw = functions.scan(logits, vocab_size);
  result->digest = raw.digest;
  if (raw.broken) {
    result->nan = true;
    return;
  }
  const float* x = logits;
  float maximum = raw.maximum;
  if (ChangesLogits(state)) {
    std::memcpy(scratch.logits, logits, static_cast<size_t>(vocab_size) * sizeof(float));
    ChangeLogits(state, vocab_size, scratch);
    x = scratch.logits;
    maximum = functions.scan(x, vocab_size).maximum;
  }
  if (maximum == kMasked) {
    result->all_masked = true;
    return;
  }
  if (p.temperature == 0.0f) {
    result->id = static_cast<int32_t>(functions.find_first(x, vocab_size, maximum));
  } else if (p.top_k > 0 || p.top_p < 1.0f || p.min_p > 0.0f) {
    result->id =
        SampleRestricted(functions, p, x, vocab_size, maximum, RowKey(p, position), scratch.ids);
  } else {
    result->id = static_cast<int32_t>(
        functions.gumbel_argmax(x, vocab_size, maximum, p.temperature, RowKey(p, position)));
  }
  if (p.num_logprobs >= 0) {
    AddLogprobs(functions, logits, vocab_size, raw.maximum, p.num_logprobs, scratch.ids, result);
  }
}

struct SampleProblem {
  ConstTensorView logits;
  int64_t vocab_size;
  const std::vector<const SamplingState*>* states;
  const std::vector<int64_t>* positions;
  std::vector<SampleResult>* results;
};

absl::Status SampleCpu(ExecContext* ctx, const SampleProblem& p) {
  const int64_t rows = p.logits.shape[0], at_once = std::min(rows, kRowsAtOnce);
  Workspace::Scope scope(ctx->workspace);
  const TensorView work = ctx->workspace->Take(DType::kF32, {at_once, p.vocab_size});
  const TensorView ids = ctx->workspace->Take(DType::kI32, {at_once, p.vocab_size});
  if (ctx->dry_run()) return absl::OkStatus();
  const LogitsFunctions functions = SelectFunctions();
  p.results->assign(static_cast<size_t>(rows), SampleResult());
  for (int64_t begin = 0; begin < rows; begin += at_once) {
    ctx->pool->ParallelFor(std::min(at_once, rows - begin), [&](int64_t i) {
      const size_t r = static_cast<size_t>(begin + i);
      SampleRow(functions, p.logits.row<float>(begin + i), p.vocab_size, *(*p.states)[r],
                (*p.positions)[r], {work.row<float>(i), ids.row<int32_t>(i)}, &(*p.results)[r]);
    });
  }
  return absl::OkStatus();
}

using SampleFn = absl::Status (*)(ExecContext*, const SampleProblem&);
constexpr Arm<SampleProblem, SampleFn> kArms[] = {{"cpu", DeviceType::kCpu, nullptr, SampleCpu}};

}  // namespace

uint64_t LogitsDigest(const float* logits, int64_t vocab_size) {
  return SelectFunctions().scan(logits, vocab_size).digest;
}

absl::Status Sample(ExecContext* ctx, ConstTensorView logits, int64_t vocab_size,
                    const std::vector<const SamplingState*>& states,
                    const std::vector<int64_t>& positions, std::vector<SampleResult>* results) {
  constexpr char kOp[] = "sample";
  RETURN_IF_ERROR(OpCheck(*ctx, kOp).Rank("logits", logits, 2).status());
  RETURN_IF_ERROR(
      OpCheck(*ctx, kOp)
          .Tensor("logits", logits, {DType::kF32}, logits.shape)
          .That(vocab_size > 0 && vocab_size <= logits.shape[1],
                absl::StrCat("vocab_size is ", vocab_size, ", logits is ", logits.ToString()))
          .status());
  const SampleProblem p{logits, vocab_size, &states, &positions, results};
  ASSIGN_OR_RETURN(const auto* arm, ChooseArm(kOp, kArms, ctx->device, p));
  if (!ctx->dry_run()) {
    const size_t rows = static_cast<size_t>(logits.shape[0]);
    OpCheck check(*ctx, kOp);
    check.That(states.size() == rows && positions.size() == rows,
               absl::StrCat(rows, " rows of logits with ", states.size(), " states and ",
                            positions.size(), " positions"));
    for (const SamplingState* state : states) {
      check.That(
          state != nullptr && state->vocab_size() == vocab_size,
          absl::StrCat("a state is for a vocabulary of ",
                       state == nullptr ? 0 : state->vocab_size(), ", vocab_size is ", vocab_size));
    }
    RETURN_IF_ERROR(check.status());
  }
  CountLaunch(ctx);
  return arm->run(ctx, p);
}

}  // namespace lockstep
