// test_coordinator: lockstep_coordinator, linked from the same libraries, with conditions that
// tests impose: how prompts are cut into chunks, preemption, late results.
#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "CLI/App.hpp"
#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/time/clock.h"
#include "coordinator/serve_loop.h"
#include "coordinator/serving_flags.h"
#include "coordinator/step_transport.h"
#include "kernels/base/log.h"

namespace lockstep {
namespace {

// "grid": 64 tokens; "one": single tokens; "random:<seed>".
std::function<int64_t(int64_t, int64_t, int64_t)> ChunkPolicy(const std::string& name) {
  if (name.empty()) return nullptr;
  if (name == "grid") {
    return [](int64_t, int64_t remaining, int64_t budget) {
      return std::min<int64_t>({64, remaining, budget});
    };
  }
  if (name == "one") return [](int64_t, int64_t, int64_t) { return int64_t{1}; };
  auto random = std::make_shared<std::mt19937>(
      static_cast<uint32_t>(std::stoul(name.substr(name.find(':') + 1))));
  return [random](int64_t, int64_t remaining, int64_t budget) {
    const int64_t most = std::min<int64_t>({100, remaining, budget});
    return 1 + static_cast<int64_t>((*random)() % static_cast<uint32_t>(most));
  };
}

// Results arrive, and are kept from the engine until their time has come.
class DelayedTransport : public StepTransport {
 public:
  DelayedTransport(StepTransport* transport, absl::Duration delay)
      : transport_(transport), delay_(delay) {}

  absl::Status Send(const worker::v1::StepRequest& request) override {
    return transport_->Send(request);
  }
  absl::StatusOr<worker::v1::StepResult> Receive(absl::Time deadline) override {
    auto result = transport_->Receive(deadline);
    if (result.ok()) absl::SleepFor(delay_);
    return result;
  }
  void Wake() override { transport_->Wake(); }
  absl::StatusOr<StepEpoch> AwaitEpoch(absl::Time deadline) override {
    return transport_->AwaitEpoch(deadline);
  }
  void Distrust(const absl::Status& status) override { transport_->Distrust(status); }
  Fault last_fault() const override { return transport_->last_fault(); }
  void OnReplayed(int64_t requests, int64_t tokens_recomputed) override {
    transport_->OnReplayed(requests, tokens_recomputed);
  }

 private:
  StepTransport* const transport_;
  const absl::Duration delay_;
};

int Main(int argc, char** argv) {
  BlockStopSignals();
  CLI::App app("lockstep_coordinator with injected conditions, for tests");
  ServingFlags flags;
  flags.AddTo(&app);
  std::vector<std::string> workers;
  std::string chunk_policy;
  int64_t preempt_every = 0, delay_ms = 0;
  app.add_option("--workers", workers)->delimiter(',')->required();
  app.add_option("--chunk-policy", chunk_policy);
  app.add_option("--preempt-every", preempt_every);
  app.add_option("--delay-results-ms", delay_ms);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  flags.ApplyToLog();
  auto options = flags.Coordinator();
  if (!options.ok()) {
    LogError(options.status().message());
    return 2;
  }
  options->workers = workers;
  options->engine.chunk_policy = ChunkPolicy(chunk_policy);
  options->engine.preempt_every = preempt_every;
  if (delay_ms > 0) {
    options->wrap_transport = [delay_ms](StepTransport* transport) {
      return std::make_unique<DelayedTransport>(transport, absl::Milliseconds(delay_ms));
    };
  }
  return RunServer(*options, flags.Loop());
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) { return lockstep::Main(argc, argv); }
