// Metrics: what a coordinator counts and measures, as a Prometheus endpoint (GET /metrics, text
// format). Names begin with "lockstep_"; README.md lists them. Thread safe.
//
// Three kinds of values: what the engine tells as an EngineObserver (requests and latencies, all
// under one lock, so that started = ended + running + queued in every scrape), what others tell
// through the calls below, and what is read from the Source when somebody scrapes.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "coordinator/engine.h"
#include "coordinator/engine_observer.h"

namespace lockstep {

// What is true at the moment of a scrape.
struct MetricsSample {
  struct Rank {
    bool up = false;                                      // its lease holds
    absl::Duration lease_age = absl::InfiniteDuration();  // infinite: it has never answered
    double load_progress = 0;                             // 0 to 1
  };
  absl::optional<EngineStats> engine;  // absent while the model is loading
  uint64_t epoch = 0;
  std::vector<Rank> ranks;
};

class Metrics : public EngineObserver {
 public:
  using Source = std::function<MetricsSample()>;

  // `source` is called at every scrape, from the endpoint's threads, until Shutdown or destruction.
  explicit Metrics(Source source);
  ~Metrics() override;

  // Serves GET /metrics on host:port; port 0 takes any free one. Once. FAILED_PRECONDITION when the
  // address cannot be had.
  absl::Status Listen(const std::string& host, int port);
  // 0 before Listen.
  int port() const;
  // Ends the endpoint and waits for scrapes that run: up to two seconds, which the library takes
  // to notice. Idempotent.
  void Shutdown();

  // EngineObserver.
  void OnRejected(absl::string_view reason) override;
  void OnStarted(int64_t prompt_tokens) override;
  void OnScheduled(int64_t prompt_tokens, absl::Duration queued) override;
  void OnFirstToken(absl::Duration since_submitted) override;
  void OnNextToken(absl::Duration since_last) override;
  // The reason SLOW_CONSUMER also counts as a slow consumer.
  void OnEnd(RequestEnd how, absl::string_view reason, int64_t prompt_tokens, bool scheduled,
             absl::Duration since_submitted) override;
  void OnStep(absl::Duration duration) override;

  // A recovery has ended: its cause ("stream_reset", "lease_expired", ...) and the time of each of
  // its phases ("detect", "abort", "replace", "load", "join", "replay").
  void OnRecovery(absl::string_view cause, const std::map<std::string, absl::Duration>& phases);
  void OnWorkerRestart(int rank, absl::string_view cause);
  // Ranks disagreed on a step. (A replay that disagrees with the log is counted by the engine.)
  void OnStepDigestMismatch();
  // A message of an old term, epoch or incarnation was refused.
  void OnStaleMessageRefused();
  // The model has been loaded on all ranks.
  void OnLoad(absl::Duration duration);

  // What a scrape gives.
  std::string Text() const;

 private:
  class Impl;
  // Shared with the endpoint, which holds it weakly.
  std::shared_ptr<Impl> impl_;
};

}  // namespace lockstep
