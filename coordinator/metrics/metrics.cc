// Metrics: see metrics.h.
#include "coordinator/metrics/metrics.h"

#include <exception>
#include <iterator>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "prometheus/collectable.h"
#include "prometheus/counter.h"
#include "prometheus/exposer.h"
#include "prometheus/family.h"
#include "prometheus/histogram.h"
#include "prometheus/metric_family.h"
#include "prometheus/registry.h"
#include "prometheus/text_serializer.h"

namespace lockstep {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::map<std::string, std::string>;

// Upper bounds in seconds.
const prometheus::Histogram::BucketBoundaries kRequestSeconds = {
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600};
const prometheus::Histogram::BucketBoundaries kTokenSeconds = {
    0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 5, 30};
const prometheus::Histogram::BucketBoundaries kLongSeconds = {
    0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800};

// A family that is filled value by value.
class FamilyBuilder {
 public:
  FamilyBuilder(const char* name, const char* help, MetricType type) {
    family_.name = name;
    family_.help = help;
    family_.type = type;
  }
  FamilyBuilder& Add(double value, const Labels& labels = {}) {
    ClientMetric metric;
    for (const auto& [name, text] : labels) metric.label.push_back({name, text});
    if (family_.type == MetricType::Counter) {
      metric.counter.value = value;
    } else {
      metric.gauge.value = value;
    }
    family_.metric.push_back(std::move(metric));
    return *this;
  }
  MetricFamily Take() { return std::move(family_); }

 private:
  MetricFamily family_;
};

FamilyBuilder Counter(const char* name, const char* help) {
  return FamilyBuilder(name, help, MetricType::Counter);
}
FamilyBuilder Gauge(const char* name, const char* help) {
  return FamilyBuilder(name, help, MetricType::Gauge);
}

const char* OutcomeName(RequestEnd how) {
  switch (how) {
    case RequestEnd::kFinished:
      return "finished";
    case RequestEnd::kFailed:
      return "failed";
    case RequestEnd::kCancelled:
      break;
  }
  return "cancelled";
}

void AddEngine(const EngineStats& stats, int64_t rank_mismatches, std::vector<MetricFamily>* out) {
  const auto counter = [&stats](const char* name) -> double {
    const auto found = stats.counters.find(name);
    return found == stats.counters.end() ? 0 : static_cast<double>(found->second);
  };
  out->push_back(Counter("lockstep_tokens_total", "Tokens by how they came to be")
                     .Add(counter("tokens_prefilled"), {{"kind", "prompt"}})
                     .Add(counter("tokens_cached"), {{"kind", "cached"}})
                     .Add(counter("tokens_generated"), {{"kind", "generated"}})
                     .Add(counter("tokens_replayed"), {{"kind", "replayed"}})
                     .Take());
  out->push_back(Counter("lockstep_step_digest_mismatch_total",
                         "Digests that ranks, or a replay and its log, disagreed on")
                     .Add(counter("digest_mismatches") + static_cast<double>(rank_mismatches))
                     .Take());
  out->push_back(Counter("lockstep_nan_logits_total", "Requests that ended for a NaN in the logits")
                     .Add(counter("nan_logits"))
                     .Take());
  out->push_back(
      Gauge("lockstep_kv_blocks", "KV blocks of 64 positions by state; the states add up to all")
          .Add(static_cast<double>(stats.kv_blocks_free), {{"state", "free"}})
          .Add(static_cast<double>(stats.kv_blocks_active - stats.kv_blocks_pinned_without_owner),
               {{"state", "active"}})
          .Add(static_cast<double>(stats.kv_blocks_cached), {{"state", "cached"}})
          .Add(static_cast<double>(stats.kv_blocks_pinned_without_owner),
               {{"state", "pinned_without_owner"}})
          .Take());
}

void AddRanks(const std::vector<MetricsSample::Rank>& ranks, std::vector<MetricFamily>* out) {
  FamilyBuilder up = Gauge("lockstep_worker_up", "1 while the lease of the rank holds");
  FamilyBuilder age =
      Gauge("lockstep_worker_lease_age_seconds", "Time since the rank answered last");
  FamilyBuilder progress =
      Gauge("lockstep_model_load_progress_ratio", "Share of the checkpoint that the rank has read");
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const Labels labels = {{"rank", absl::StrCat(rank)}};
    up.Add(ranks[rank].up ? 1 : 0, labels);
    age.Add(absl::ToDoubleSeconds(ranks[rank].lease_age), labels);
    progress.Add(ranks[rank].load_progress, labels);
  }
  out->push_back(up.Take());
  out->push_back(age.Take());
  out->push_back(progress.Take());
}

}  // namespace

class Metrics::Impl : public prometheus::Collectable {
 public:
  explicit Impl(Source source) : source_(std::move(source)) {}

  std::vector<MetricFamily> Collect() const override {
    const MetricsSample sample = source_();
    std::vector<MetricFamily> families = registry_.Collect();
    int64_t rank_mismatches;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      AddRequests(&families);
      rank_mismatches = rank_mismatches_;
    }
    AddEngine(sample.engine.value_or(EngineStats()), rank_mismatches, &families);
    families.push_back(Gauge("lockstep_epoch", "Epoch of the group of ranks; 0 before the first")
                           .Add(static_cast<double>(sample.epoch))
                           .Take());
    AddRanks(sample.ranks, &families);
    return families;
  }

  absl::Status Listen(const std::string& host, int port) {
    const std::string address = absl::StrCat(host, ":", port);
    std::unique_ptr<prometheus::Exposer> exposer;
    try {
      exposer = std::make_unique<prometheus::Exposer>(address, /*num_threads=*/2);
    } catch (const std::exception& error) {
      return absl::FailedPreconditionError(
          absl::StrCat("cannot serve metrics on ", address, " (", error.what(),
                       "): the port is in use, or the address is none of this machine; choose "
                       "another with --metrics-host and --metrics-port"));
    }
    const std::vector<int> ports = exposer->GetListeningPorts();
    if (ports.empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat("cannot serve metrics on ", address, ": no port was bound"));
    }
    exposer_ = std::move(exposer);
    port_ = ports.front();
    return absl::OkStatus();
  }

  prometheus::Histogram& MakeHistogram(const char* name, const char* help,
                                       const prometheus::Histogram::BucketBoundaries& bounds) {
    return prometheus::BuildHistogram().Name(name).Help(help).Register(registry_).Add({}, bounds);
  }
  prometheus::Family<prometheus::Counter>& MakeCounters(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(registry_);
  }

  const Source source_;
  prometheus::Registry registry_;
  prometheus::Histogram& time_to_first_token_ =
      MakeHistogram("lockstep_time_to_first_token_seconds",
                    "From submission to the first token of an output", kRequestSeconds);
  prometheus::Histogram& inter_token_ = MakeHistogram(
      "lockstep_inter_token_seconds", "Between two tokens of an output", kTokenSeconds);
  prometheus::Histogram& queue_ = MakeHistogram(
      "lockstep_queue_seconds",
      "From submission to the first place in a step, of scheduled requests", kRequestSeconds);
  prometheus::Histogram& e2e_ =
      MakeHistogram("lockstep_e2e_seconds", "From submission to the end of a request, of all ends",
                    kRequestSeconds);
  prometheus::Histogram& step_ =
      MakeHistogram("lockstep_step_seconds", "Steps as rank 0 measured them", kTokenSeconds);
  prometheus::Histogram& load_ = MakeHistogram(
      "lockstep_load_seconds", "Loading the model on all ranks, connecting included", kLongSeconds);
  prometheus::Family<prometheus::Histogram>& recovery_ = prometheus::BuildHistogram()
                                                             .Name("lockstep_recovery_seconds")
                                                             .Help("Phases of recoveries")
                                                             .Register(registry_);
  prometheus::Family<prometheus::Counter>& rejected_ = MakeCounters(
      "lockstep_admission_rejected_total", "Requests that were refused when they were submitted");
  prometheus::Family<prometheus::Counter>& recoveries_ =
      MakeCounters("lockstep_recoveries_total", "Recoveries of the group of ranks by their cause");
  prometheus::Family<prometheus::Counter>& restarts_ =
      MakeCounters("lockstep_worker_restarts_total", "Workers that were replaced or restarted");
  prometheus::Counter& slow_consumers_ =
      MakeCounters("lockstep_slow_consumer_total",
                   "Requests that ended because their client did not read")
          .Add({});
  prometheus::Counter& poison_ =
      MakeCounters("lockstep_poison_total", "Requests that were found to kill ranks").Add({});
  prometheus::Counter& stale_ =
      MakeCounters("lockstep_stale_message_refused_total",
                   "Messages of an old term, epoch or incarnation that were refused")
          .Add({});

  std::unique_ptr<prometheus::Exposer> exposer_;
  int port_ = 0;

  mutable std::mutex mutex_;
  // Guarded by mutex_:
  std::map<std::pair<RequestEnd, std::string>, int64_t> ended_;
  int64_t started_ = 0;
  int64_t running_ = 0;
  int64_t queued_ = 0;
  int64_t queue_tokens_ = 0;
  int64_t rank_mismatches_ = 0;

 private:
  // Requires mutex_.
  void AddRequests(std::vector<MetricFamily>* out) const {
    FamilyBuilder ended =
        Counter("lockstep_requests_total", "Requests that have ended, by outcome and reason");
    for (const auto& [key, count] : ended_) {
      ended.Add(static_cast<double>(count),
                {{"outcome", OutcomeName(key.first)}, {"reason", key.second}});
    }
    out->push_back(ended.Take());
    out->push_back(Counter("lockstep_requests_started_total", "Requests that were accepted")
                       .Add(static_cast<double>(started_))
                       .Take());
    out->push_back(Gauge("lockstep_requests", "Requests that have not ended, by state")
                       .Add(static_cast<double>(running_), {{"state", "running"}})
                       .Add(static_cast<double>(queued_), {{"state", "queued"}})
                       .Take());
    out->push_back(Gauge("lockstep_queue_tokens", "Prompt tokens of the queued requests")
                       .Add(static_cast<double>(queue_tokens_))
                       .Take());
  }
};

Metrics::Metrics(Source source) : impl_(std::make_shared<Impl>(std::move(source))) {}
Metrics::~Metrics() { Shutdown(); }

absl::Status Metrics::Listen(const std::string& host, int port) {
  const absl::Status status = impl_->Listen(host, port);
  if (status.ok()) impl_->exposer_->RegisterCollectable(impl_);
  return status;
}
int Metrics::port() const { return impl_->port_; }
void Metrics::Shutdown() { impl_->exposer_.reset(); }

void Metrics::OnRejected(absl::string_view reason) {
  impl_->rejected_.Add({{"reason", std::string(reason)}}).Increment();
}

void Metrics::OnStarted(int64_t prompt_tokens) {
  std::lock_guard<std::mutex> lock(impl_->mutex_);
  ++impl_->started_;
  ++impl_->queued_;
  impl_->queue_tokens_ += prompt_tokens;
}

void Metrics::OnScheduled(int64_t prompt_tokens, absl::Duration queued) {
  impl_->queue_.Observe(absl::ToDoubleSeconds(queued));
  std::lock_guard<std::mutex> lock(impl_->mutex_);
  --impl_->queued_;
  ++impl_->running_;
  impl_->queue_tokens_ -= prompt_tokens;
}

void Metrics::OnFirstToken(absl::Duration since_submitted) {
  impl_->time_to_first_token_.Observe(absl::ToDoubleSeconds(since_submitted));
}
void Metrics::OnNextToken(absl::Duration since_last) {
  impl_->inter_token_.Observe(absl::ToDoubleSeconds(since_last));
}

void Metrics::OnEnd(RequestEnd how, absl::string_view reason, int64_t prompt_tokens, bool scheduled,
                    absl::Duration since_submitted) {
  impl_->e2e_.Observe(absl::ToDoubleSeconds(since_submitted));
  if (reason == "SLOW_CONSUMER") impl_->slow_consumers_.Increment();
  if (reason == "POISON_REQUEST") impl_->poison_.Increment();
  std::lock_guard<std::mutex> lock(impl_->mutex_);
  ++impl_->ended_[{how, std::string(reason)}];
  if (scheduled) {
    --impl_->running_;
  } else {
    --impl_->queued_;
    impl_->queue_tokens_ -= prompt_tokens;
  }
}

void Metrics::OnStep(absl::Duration duration) {
  impl_->step_.Observe(absl::ToDoubleSeconds(duration));
}

void Metrics::OnRecovery(absl::string_view cause,
                         const std::map<std::string, absl::Duration>& phases) {
  impl_->recoveries_.Add({{"cause", std::string(cause)}}).Increment();
  for (const auto& [phase, duration] : phases) {
    impl_->recovery_.Add({{"phase", phase}}, kLongSeconds).Observe(absl::ToDoubleSeconds(duration));
  }
}

void Metrics::OnWorkerRestart(int rank, absl::string_view cause) {
  impl_->restarts_.Add({{"rank", absl::StrCat(rank)}, {"cause", std::string(cause)}}).Increment();
}

void Metrics::OnStepDigestMismatch() {
  std::lock_guard<std::mutex> lock(impl_->mutex_);
  ++impl_->rank_mismatches_;
}

void Metrics::OnStaleMessageRefused() { impl_->stale_.Increment(); }
void Metrics::OnLoad(absl::Duration duration) {
  impl_->load_.Observe(absl::ToDoubleSeconds(duration));
}

std::string Metrics::Text() const {
  return prometheus::TextSerializer().Serialize(impl_->Collect());
}

}  // namespace lockstep
