// Counters that one rank's execution keeps: what proves "no weight byte moves after load", "this
// arm ran" and "a step's only copies are the plan in and the ids out". Written by the executor
// thread, read by any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace lockstep {

enum class Traffic : int {
  kWeightsToDevice,    // during load only
  kPlanToDevice,       // the step plan
  kResultsToHost,      // sampled ids, digests, flags
  kLogitsToHost,       // logprobs or logits that a request asked for
  kDiagnosticsToHost,  // probes of `lockstep eval`
  kCollectivesSent,    // bytes given to peers
  kNumKinds,
};

// Names of the kinds, as exported: "weights_to_device", ...
const char* Name(Traffic kind);

struct Counters {
  std::array<std::atomic<int64_t>, static_cast<int>(Traffic::kNumKinds)> bytes{};
  std::atomic<int64_t> op_launches{0};     // calls of ops; equal for any number of tokens in a step
  std::atomic<int64_t> graph_launches{0};  // steps queued as one captured graph
  std::atomic<int64_t> collectives{0};

  void Add(Traffic kind, int64_t n) {
    bytes[static_cast<int>(kind)].fetch_add(n, std::memory_order_relaxed);
  }
  int64_t Get(Traffic kind) const {
    return bytes[static_cast<int>(kind)].load(std::memory_order_relaxed);
  }
};

}  // namespace lockstep
