// The closed-loop measurement behind `lockstep bench serve`.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "grpcpp/grpcpp.h"
#include "proto/model.pb.h"

namespace lockstep {
namespace cli {

struct BenchOptions {
  int concurrency = 1;        // streams; each sends its next request when the last one ended
  int prompt_tokens = 128;    // of random ids, different for every request
  int max_tokens = 128;       // per request; the end of text is ignored
  int requests = 4;           // per stream, after one request of warm-up
  bool prefix_cache = false;  // else requests bypass it
  uint64_t seed = 1;
  int64_t vocab_size = 0;
};

// Arrival of an answer, in seconds of a monotonic clock.
struct RequestTrace {
  double sent = 0;
  std::vector<double> tokens;  // one entry per token
};

// What is reported. Times in milliseconds.
struct BenchResult {
  int concurrency = 0;
  int64_t requests = 0;
  int64_t output_tokens = 0;     // in the window
  double window_seconds = 0;     // sum of consecutive intervals between token arrivals
  double tokens_per_second = 0;  // output_tokens / window_seconds
  double ttft_p50 = 0, ttft_p99 = 0;
  double inter_token_p50 = 0, inter_token_p99 = 0;
  // Of the whole row, warm-up included: steps of the engine, mean time of one in rank 0's worker,
  // and wall time per step. Their ratio is what coordinator, RPC and client add; 0 without a step.
  int64_t steps = 0;
  double step_ms = 0, wall_ms_per_step = 0, wall_per_step_ratio = 0;
};

// Value at `fraction` of the sorted sample (nearest rank); 0 for none.
double Percentile(std::vector<double> sample, double fraction);

// From the traces of every stream. The window begins when every stream has its first token and ends
// when the first stream has its last one, so that all of them run throughout. Tokens of the window
// without the first, divided by the summed intervals between consecutive arrivals.
BenchResult Summarize(int concurrency, const std::vector<std::vector<RequestTrace>>& streams);

// Fills the fields about steps from the server's counters before and after, `wall_seconds` apart.
void SummarizeSteps(const inference::v1::ServerStatus& before,
                    const inference::v1::ServerStatus& after, double wall_seconds,
                    BenchResult* result);

absl::StatusOr<BenchResult> RunBench(const std::shared_ptr<grpc::Channel>& channel,
                                     const BenchOptions& options);

}  // namespace cli
}  // namespace lockstep
