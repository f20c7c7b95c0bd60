// What the tests of the engine share: a sink that checks the order of events, requests, and an
// engine over a FakeStepTransport.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "coordinator/engine.h"
#include "coordinator/fake_step_transport.h"
#include "coordinator/generation.h"
#include "proto/inference.pb.h"

namespace lockstep {
namespace testing {

// Keeps what it is given, and notes the first breach of the rules of events: each output begins
// with Accepted, is numbered 1, 2, 3, ..., has nothing after Finished; OnDone comes once, last, and
// is OK only when every output has finished.
class RecordingSink : public GenerationSink {
 public:
  explicit RecordingSink(int32_t outputs = 1) : outputs_(static_cast<size_t>(outputs)) {}

  void OnEvent(inference::v1::GenerateEvent event) override;
  void OnDone(const absl::Status& status) override;

  struct Output {
    uint64_t last_sequence = 0;
    std::vector<int32_t> ids;
    std::string text;
    std::vector<inference::v1::TokenLogprobs> logprobs;
    bool finished = false;
    inference::v1::Accepted accepted;
    inference::v1::Finished end;
  };

  // False when it takes more than 30 s.
  bool WaitDone();
  // Or until the request is done.
  bool WaitTokens(size_t count, int32_t output = 0);
  bool done() const;
  absl::Status status() const;
  Output output(int32_t index = 0) const;
  std::string breach() const;

 private:
  mutable std::mutex mu_;
  std::condition_variable changed_;
  // Guarded by mu_:
  std::vector<Output> outputs_;
  bool done_ = false;
  absl::Status status_;
  std::string breach_;
};

// Tokens 1, 2, ... of a pseudo-random prompt.
std::vector<int32_t> MakePrompt(int64_t length, uint64_t seed, int32_t vocab_size = 1000);

GenerationSpec MakeSpec(const std::string& id, std::vector<int32_t> prompt, int32_t max_tokens);

// Small pools: 64 blocks, 4 slots, 8 snapshots, 128 tokens a step.
EngineOptions SmallEngine();

// An engine that runs over a fake transport with the same limits.
struct EngineFixture {
  explicit EngineFixture(
      const EngineOptions& engine_options,
      std::function<void(const worker::v1::StepPlan&, worker::v1::StepResult*)> change = nullptr,
      const Tokenizer* tokenizer = nullptr);

  std::shared_ptr<RecordingSink> Submit(const GenerationSpec& spec);
  // Waits until the engine is idle; false when it takes more than 30 s.
  bool WaitIdle();
  // What the model gives for output `index` of `spec`.
  static FakeStepTransport::Expected Expect(const GenerationSpec& spec, int32_t index = 0);

  EngineOptions options;
  FakeStepTransport transport;
  Engine engine;
};

// Ids and digest of a finished output equal those of an undisturbed run. "" when they do.
std::string Difference(const RecordingSink& sink, const GenerationSpec& spec, int32_t index = 0);
// What is wrong with an idle engine: counters that do not balance, blocks or slots that are not
// back.
std::string Leaks(const Engine& engine);

}  // namespace testing
}  // namespace lockstep
