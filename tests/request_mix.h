// A mixture of requests and what a client gets for them, with everything that must not depend on
// faults: ids, digests, and a numbering of events without gaps.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "grpcpp/grpcpp.h"
#include "proto/inference.grpc.pb.h"

namespace lockstep {
namespace testing {

// Request `i`: greedy and sampled, with penalties, prompts of 3 to 152 ids below 300.
inference::v1::GenerateRequest MixedRequest(int i, int max_tokens);

struct Answer {
  grpc::Status status;
  std::vector<int32_t> ids;
  uint64_t digest = 0;
  int32_t recoveries = 0;
  int events = 0;
  int finished = 0;    // events that say so
  std::string breach;  // of the numbering
};

// Reads the stream to its end. `tokens`, when given, grows as they come.
Answer ReadAnswer(inference::v1::InferenceService::Stub* stub,
                  const inference::v1::GenerateRequest& request, std::atomic<int64_t>* tokens);

// Requests 0 to count - 1, all at once; `disturb` runs beside them, once `after` tokens have come
// or all have ended.
std::vector<Answer> ReadAnswers(inference::v1::InferenceService::Stub* stub, int count,
                                int max_tokens, int64_t after,
                                const std::function<void()>& disturb);

// "" when `found` ended well, once, with the ids and digest of `wanted`.
std::string Difference(const Answer& found, const Answer& wanted);
void ExpectSameAnswers(const std::vector<Answer>& found, const std::vector<Answer>& wanted);

}  // namespace testing
}  // namespace lockstep
