#include <algorithm>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/sampling/sampling.h"

namespace lockstep {

void SamplingState::Reset(SamplingParams params, int64_t vocab_size,
                          const std::vector<int32_t>& prompt, const std::vector<int32_t>& output) {
  params_ = std::move(params);
  num_output_ = 0;
  output_counts_.assign(static_cast<size_t>(vocab_size), 0);
  in_prompt_.assign(static_cast<size_t>(vocab_size), 0);
  for (int32_t id : prompt) {
    CHECK(id >= 0 && id < vocab_size) << "prompt id " << id << " of " << vocab_size << " ";
    in_prompt_[static_cast<size_t>(id)] = 1;
  }
  for (int32_t id : output) Append(id);
}

void SamplingState::Append(int32_t id) {
  CHECK(id >= 0 && id < vocab_size()) << "id " << id << " of " << vocab_size() << " ";
  ++output_counts_[static_cast<size_t>(id)];
  ++num_output_;
}

}  // namespace lockstep
