#include "tools/eval/golden.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/base/hash.h"
#include "kernels/base/status_macros.h"
#include "models/model_config.h"

namespace lockstep {
namespace {

constexpr int32_t kMaxPromptRows = 8;
constexpr double kLinearBound = 1e-5;

template <typename T>
absl::StatusOr<std::vector<T>> Read(const Checkpoint& golden, const std::string& name,
                                    DType dtype) {
  ASSIGN_OR_RETURN(const TensorInfo* tensor, golden.Get(name));
  if (tensor->dtype != dtype) {
    return absl::DataLossError(
        absl::StrCat(name, " is ", tensor->ToString(), ", expected ", Name(dtype)));
  }
  std::vector<T> values(static_cast<size_t>(tensor->num_elements()));
  std::memcpy(values.data(), tensor->data, values.size() * sizeof(T));
  return values;
}

struct PromptData {
  std::vector<int32_t> ids, greedy;
  std::vector<float> margins, logits, greedy_logits;
  size_t vocab = 0;
};

absl::StatusOr<PromptData> ReadPrompt(const Checkpoint& golden, const GoldenSet& set, int i) {
  PromptData p;
  const std::string name = absl::StrCat("prompt", i);
  ASSIGN_OR_RETURN(p.ids, Read<int32_t>(golden, set.ids_prefix + name + ".ids", DType::kI32));
  const std::string base = set.prefix + name;
  ASSIGN_OR_RETURN(p.greedy, Read<int32_t>(golden, base + ".greedy", DType::kI32));
  ASSIGN_OR_RETURN(p.margins, Read<float>(golden, base + ".greedy_margin", DType::kF32));
  ASSIGN_OR_RETURN(p.logits, Read<float>(golden, base + ".logits", DType::kF32));
  ASSIGN_OR_RETURN(p.greedy_logits, Read<float>(golden, base + ".greedy_logits", DType::kF32));
  ASSIGN_OR_RETURN(const TensorInfo* logits, golden.Get(base + ".logits"));
  p.vocab = static_cast<size_t>(logits->shape.back());
  return p;
}

// Largest difference relative to the largest magnitude of the reference.
double RelativeError(const float* got, const float* want, size_t n) {
  double worst = 0, scale = 0;
  for (size_t i = 0; i < n; ++i) {
    scale = std::max(scale, std::fabs(static_cast<double>(want[i])));
    const double d = std::fabs(static_cast<double>(got[i]) - static_cast<double>(want[i]));
    if (!(d <= worst)) worst = std::isnan(d) ? std::numeric_limits<double>::infinity() : d;
  }
  return scale > 0 ? worst / scale : worst;
}

double LargestMagnitude(const std::vector<float>& row) {
  double m = 0;
  for (float f : row) m = std::max(m, std::fabs(static_cast<double>(f)));
  return m;
}

class Evaluator {
 public:
  Evaluator(const Checkpoint& golden, const GoldenSet& set, const GoldenBounds& bounds,
            StepDriver* driver, WorkerGroup* group)
      : golden_(golden), set_(set), driver_(driver), group_(group) {
    report_.bounds = bounds;
  }

  absl::StatusOr<GoldenReport> Run() {
    for (int i = 0; golden_.Find(absl::StrCat(set_.ids_prefix, "prompt", i, ".ids")) != nullptr;
         ++i) {
      RETURN_IF_ERROR(Prompt(i));
    }
    if (report_.prompts.empty()) {
      return absl::NotFoundError(absl::StrCat(golden_.directory(), ": no ", set_.name, " prompts"));
    }
    std::sort(errors_.begin(), errors_.end());
    report_.median = errors_[errors_.size() / 2];
    if (report_.bounds.median > 0 && report_.median > report_.bounds.median) {
      report_.failures.push_back(absl::StrFormat("median row error %.3g, allowed %.3g",
                                                 report_.median, report_.bounds.median));
    }
    RETURN_IF_ERROR(Linears());
    return std::move(report_);
  }

 private:
  void Compare(const std::vector<float>& got, const float* want, const std::string& what,
               GoldenPrompt* prompt) {
    const double error = got.size() == vocab_ ? RelativeError(got.data(), want, vocab_)
                                              : std::numeric_limits<double>::infinity();
    errors_.push_back(error);
    prompt->rows++;
    prompt->worst = std::max(prompt->worst, error);
    if (report_.bounds.every_row > 0 && error > report_.bounds.every_row) {
      report_.failures.push_back(absl::StrFormat("prompt %d %s: row error %.3g, allowed %.3g",
                                                 prompt->index, what, error,
                                                 report_.bounds.every_row));
    }
  }

  // The reference's tokens are fed, whatever the model would have chosen: one early near-tie must
  // not hide the later positions.
  absl::Status Prompt(int index) {
    ASSIGN_OR_RETURN(const PromptData data, ReadPrompt(golden_, set_, index));
    vocab_ = data.vocab;
    GoldenPrompt prompt;
    prompt.index = index;
    prompt.prompt_tokens = static_cast<int64_t>(data.ids.size());
    prompt.smallest_margin = *std::min_element(data.margins.begin(), data.margins.end());
    const int32_t rows = static_cast<int32_t>(std::min<size_t>(kMaxPromptRows, data.ids.size()));
    ASSIGN_OR_RETURN(StepDriver::Rows step, driver_->Begin(data.ids, rows));
    for (int32_t r = 0; r < rows; ++r) {
      Compare(step.logits[static_cast<size_t>(r)],
              data.logits.data() + static_cast<size_t>(r) * vocab_, absl::StrCat("prompt row ", r),
              &prompt);
    }
    const size_t stored = data.greedy_logits.size() / vocab_;
    for (size_t k = 0; k < data.greedy.size(); ++k) {
      for (uint64_t d : step.digests) prompt.digest = Fold64(prompt.digest, d);
      if (k < stored) {
        Compare(step.logits.back(), data.greedy_logits.data() + k * vocab_,
                absl::StrCat("greedy row ", k), &prompt);
      }
      const double allowed = report_.bounds.every_row * LargestMagnitude(step.logits.back());
      if (allowed > 0 && data.margins[k] > 2 * allowed) {
        prompt.tokens_compared++;
        if (step.sampled_id == data.greedy[k]) {
          prompt.tokens_agreed++;
        } else {
          report_.failures.push_back(absl::StrCat("prompt ", index, " greedy token ", k, ": got ",
                                                  step.sampled_id, ", reference ", data.greedy[k],
                                                  " with margin ", data.margins[k]));
        }
      }
      if (k + 1 < data.greedy.size()) {
        ASSIGN_OR_RETURN(step, driver_->Continue({data.greedy[k]}, 1));
      }
    }
    report_.prompts.push_back(prompt);
    return absl::OkStatus();
  }

  absl::Status Linears() {
    const std::string begin = set_.prefix + "linear.", end = ".input";
    if (set_.prefix.empty()) return absl::OkStatus();
    for (const auto& entry : golden_.tensors()) {
      if (!absl::StartsWith(entry.first, begin) || !absl::EndsWith(entry.first, end)) continue;
      RETURN_IF_ERROR(OneLinear(
          entry.first.substr(begin.size(), entry.first.size() - begin.size() - end.size())));
    }
    return absl::OkStatus();
  }

  absl::Status OneLinear(const std::string& module) {
    const std::string base = set_.prefix + "linear." + module;
    ASSIGN_OR_RETURN(const TensorInfo* input, golden_.Get(base + ".input"));
    ASSIGN_OR_RETURN(const std::vector<uint8_t> bytes,
                     Read<uint8_t>(golden_, base + ".quantized", DType::kU8));
    ASSIGN_OR_RETURN(const std::vector<float> scales,
                     Read<float>(golden_, base + ".scale", DType::kF32));
    ASSIGN_OR_RETURN(const std::vector<float> output,
                     Read<float>(golden_, base + ".output", DType::kF32));
    const size_t tokens = static_cast<size_t>(input->shape[0]);
    const size_t k = static_cast<size_t>(input->shape[1]), n = output.size() / tokens;
    worker::v1::ProbeLinearRequest request;
    request.set_module(module);
    request.set_tokens(static_cast<int64_t>(tokens));
    request.set_input(
        std::string(reinterpret_cast<const char*>(input->data), static_cast<size_t>(input->bytes)));
    ASSIGN_OR_RETURN(const std::vector<worker::v1::ProbeLinearResponse> ranks,
                     group_->ProbeLinear(request));
    GoldenLinear result;
    result.module = module;
    result.bytes_differing = CompareBytes(ranks, bytes, tokens, k);
    result.scales_differing = CompareScales(ranks, scales, tokens);
    result.worst = CompareOutput(ranks, output, tokens, n);
    if (result.bytes_differing + result.scales_differing > 0 || !(result.worst <= kLinearBound)) {
      report_.failures.push_back(absl::StrFormat(
          "linear %s: %d quantized bytes and %d scales differ, output error %.3g "
          "(allowed 0, 0, %.3g)",
          module, result.bytes_differing, result.scales_differing, result.worst, kLinearBound));
    }
    report_.linears.push_back(std::move(result));
    return absl::OkStatus();
  }

  static int64_t CompareBytes(const std::vector<worker::v1::ProbeLinearResponse>& ranks,
                              const std::vector<uint8_t>& want, size_t tokens, size_t k) {
    int64_t differing = 0;
    size_t covered = 0;
    for (const auto& rank : ranks) {
      const size_t columns = static_cast<size_t>(rank.columns());
      const size_t first = static_cast<size_t>(rank.column_begin());
      if (rank.quantized().size() != tokens * columns || first + columns > k) {
        return static_cast<int64_t>(want.size());
      }
      covered += columns;
      for (size_t t = 0; t < tokens; ++t) {
        for (size_t c = 0; c < columns; ++c) {
          differing +=
              static_cast<uint8_t>(rank.quantized()[t * columns + c]) != want[t * k + first + c];
        }
      }
    }
    return covered >= k ? differing : static_cast<int64_t>(want.size());
  }

  // Stored: [tokens, groups], or [groups] for static scales. A row-parallel input's groups lie side
  // by side over the ranks; a column-parallel one's are the same on every rank.
  static int64_t CompareScales(const std::vector<worker::v1::ProbeLinearResponse>& ranks,
                               const std::vector<float>& want, size_t tokens) {
    const bool is_static = want.size() % tokens != 0 || want.size() < tokens;
    std::vector<std::vector<float>> got(tokens);
    for (const auto& rank : ranks) {
      const size_t groups = rank.scales().size() / sizeof(float) / tokens;
      std::vector<float> values(groups * tokens);
      std::memcpy(values.data(), rank.scales().data(), values.size() * sizeof(float));
      if (!rank.row_parallel() && &rank != &ranks[0]) {
        for (size_t t = 0; t < tokens; ++t) {
          for (size_t g = 0; g < groups; ++g) {
            if (values[t * groups + g] != got[t][g]) return static_cast<int64_t>(want.size());
          }
        }
        continue;
      }
      for (size_t t = 0; t < tokens; ++t) {
        got[t].insert(got[t].end(), values.begin() + static_cast<int64_t>(t * groups),
                      values.begin() + static_cast<int64_t>((t + 1) * groups));
      }
    }
    const size_t stored = is_static ? want.size() : want.size() / tokens;
    int64_t differing = 0;
    for (size_t t = 0; t < tokens; ++t) {
      for (size_t g = 0; g < stored; ++g) {
        const float expected = is_static ? want[g] : want[t * stored + g];
        // A static scale is one value, however many shards it is stored for.
        const size_t mine = got[t].size() == stored ? g : 0;
        differing +=
            got[t].empty() || (got[t].size() != stored && !is_static) || got[t][mine] != expected;
      }
    }
    return differing;
  }

  static double CompareOutput(const std::vector<worker::v1::ProbeLinearResponse>& ranks,
                              const std::vector<float>& want, size_t tokens, size_t n) {
    std::vector<float> got(want.size(), std::nanf(""));
    for (const auto& rank : ranks) {
      const size_t local = static_cast<size_t>(rank.local_n());
      if (rank.output().size() != tokens * local * sizeof(float)) {
        return std::numeric_limits<double>::infinity();
      }
      std::vector<float> values(tokens * local);
      std::memcpy(values.data(), rank.output().data(), rank.output().size());
      for (size_t t = 0; t < tokens; ++t) {
        size_t from = t * local;
        for (int i = 0; i + 1 < rank.rows_size(); i += 2) {
          const size_t first = static_cast<size_t>(rank.rows(i));
          const size_t count = static_cast<size_t>(rank.rows(i + 1));
          if (first + count > n) return std::numeric_limits<double>::infinity();
          std::copy_n(values.begin() + static_cast<int64_t>(from), count,
                      got.begin() + static_cast<int64_t>(t * n + first));
          from += count;
        }
      }
    }
    return RelativeError(got.data(), want.data(), want.size());
  }

  const Checkpoint& golden_;
  const GoldenSet& set_;
  StepDriver* driver_;
  WorkerGroup* group_;
  size_t vocab_ = 0;
  std::vector<double> errors_;
  GoldenReport report_;
};

}  // namespace

std::vector<GoldenSet> GoldenSets(const Checkpoint& golden) {
  std::vector<GoldenSet> sets;
  if (golden.Find("prompt0.ids") != nullptr) sets.push_back({"bf16", "", ""});
  if (golden.Find("weight_only.prompt0.ids") != nullptr) {
    sets.push_back({"weight_only", "weight_only.", "weight_only."});
    if (golden.Find("w8a8.prompt0.logits") != nullptr) {
      sets.push_back({"w8a8", "w8a8.", "weight_only."});
    }
  }
  return sets;
}

GoldenBounds BoundsOf(const std::string& set, bool f32_activations, bool routed) {
  if (f32_activations) {
    return set == "w8a8" ? GoldenBounds{2.5e-1, 6e-2} : GoldenBounds{2e-3, 0};
  }
  if (routed) return set == "w8a8" ? GoldenBounds{0, 2.5e-1} : GoldenBounds{0, 5e-2};
  return set == "w8a8" ? GoldenBounds{5e-1, 1.8e-1} : GoldenBounds{1.2e-1, 2.5e-2};
}

absl::StatusOr<bool> IsRouted(const std::string& directory) {
  ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(directory));
  return config.IntOr("num_experts", 0) > 0 || config.IntOr("n_routed_experts", 0) > 0;
}

absl::StatusOr<GoldenReport> EvalGolden(const Checkpoint& golden, const GoldenSet& set,
                                        const GoldenBounds& bounds, StepDriver* driver,
                                        WorkerGroup* group) {
  return Evaluator(golden, set, bounds, driver, group).Run();
}

absl::StatusOr<double> EvalPerplexity(const std::vector<int32_t>& tokens, int64_t chunk,
                                      StepDriver* driver) {
  double sum = 0;
  for (size_t begin = 0; begin < tokens.size(); begin += static_cast<size_t>(chunk)) {
    const size_t end = std::min(tokens.size(), begin + static_cast<size_t>(chunk));
    const std::vector<int32_t> part(tokens.begin() + static_cast<int64_t>(begin),
                                    tokens.begin() + static_cast<int64_t>(end));
    const int32_t rows = static_cast<int32_t>(part.size());
    ASSIGN_OR_RETURN(const StepDriver::Rows step,
                     begin == 0 ? driver->Begin(part, rows) : driver->Continue(part, rows));
    for (size_t r = 0; r < part.size() && begin + r + 1 < tokens.size(); ++r) {
      const std::vector<float>& row = step.logits[r];
      const double top = *std::max_element(row.begin(), row.end());
      double total = 0;
      for (float f : row) total += std::exp(static_cast<double>(f) - top);
      sum += top + std::log(total) -
             static_cast<double>(row[static_cast<size_t>(tokens[begin + r + 1])]);
    }
  }
  return std::exp(sum / static_cast<double>(tokens.size() - 1));
}

}  // namespace lockstep
