#include "tests/soak.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <fstream>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/status_macros.h"
#include "nlohmann/json.hpp"
#include "tests/request_mix.h"
#include "tests/serve_process.h"

namespace lockstep {
namespace testing {
namespace {

constexpr int kKinds = 16;  // of requests

int MaxTokens(int kind) { return 24 + 8 * (kind % 8); }

double ResidentMib(pid_t pid) {
  std::ifstream statm(absl::StrCat("/proc/", pid, "/statm"));
  double size = 0, resident = 0;
  statm >> size >> resident;
  return resident * static_cast<double>(sysconf(_SC_PAGESIZE)) / (1 << 20);
}

struct Sample {
  double seconds;
  double server_mib;
  double worker_mib;
};

// Growth per minute of the second half.
double Slope(const std::vector<Sample>& samples, double Sample::*value) {
  const size_t begin = samples.size() / 2;
  const double n = static_cast<double>(samples.size() - begin);
  if (n < 2) return 0;
  double x = 0, y = 0, xx = 0, xy = 0;
  for (size_t i = begin; i < samples.size(); ++i) {
    x += samples[i].seconds;
    y += samples[i].*value;
    xx += samples[i].seconds * samples[i].seconds;
    xy += samples[i].seconds * samples[i].*value;
  }
  const double spread = n * xx - x * x;
  return spread > 0 ? 60 * (n * xy - x * y) / spread : 0;
}

double Median(const std::vector<admin::v1::FaultRecord>& records,
              double (*seconds)(const admin::v1::FaultPhases&)) {
  std::vector<double> values;
  for (const auto& record : records) values.push_back(1000 * seconds(record.phases()));
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

class Run {
 public:
  Run(const SoakOptions& options, ServeProcess* serve)
      : options_(options), serve_(serve), random_(options.seed) {}

  SoakResult Drive() {
    std::vector<Answer> wanted;
    for (int kind = 0; kind < kKinds; ++kind) {
      wanted.push_back(
          ReadAnswer(serve_->inference(), MixedRequest(kind, MaxTokens(kind)), nullptr));
    }
    begin_ = absl::Now();
    std::atomic<bool> over{false};
    std::thread killer([&] { Kill(&over); });
    std::thread sampler([&] { TakeSamples(&over); });
    Load(wanted);
    over = true;
    killer.join();
    sampler.join();
    Finish();
    return result_;
  }

 private:
  void Load(const std::vector<Answer>& wanted) {
    std::uniform_real_distribution<double> place(0, absl::ToDoubleSeconds(options_.time));
    std::vector<double> arrivals(static_cast<size_t>(options_.requests));
    for (double& arrival : arrivals) arrival = place(random_);
    std::sort(arrivals.begin(), arrivals.end());
    std::vector<std::thread> threads;
    for (int i = 0; i < options_.requests; ++i) {
      absl::SleepFor(begin_ + absl::Seconds(arrivals[static_cast<size_t>(i)]) - absl::Now());
      threads.emplace_back([this, &wanted, kind = i % kKinds] {
        Count(ReadAnswer(serve_->inference(), MixedRequest(kind, MaxTokens(kind)), nullptr),
              wanted[static_cast<size_t>(kind)]);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  void Count(const Answer& found, const Answer& wanted) {
    std::lock_guard<std::mutex> lock(mu_);
    ++result_.requests;
    result_.tokens += static_cast<int64_t>(found.ids.size());
    result_.recovered_streams += found.recoveries > 0 ? 1 : 0;
    if (found.status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED && found.events == 0) {
      ++result_.refused;
      return;
    }
    const std::string difference = Difference(found, wanted);
    if (difference.empty()) return;
    if (result_.first_failure.empty()) result_.first_failure = difference;
    if (!found.breach.empty()) {
      ++result_.duplicated;
    } else if (!found.status.ok() || found.finished != 1) {
      ++result_.lost;
    } else {
      ++result_.different;
    }
  }

  void Kill(const std::atomic<bool>* over) {
    std::mt19937_64 random(options_.seed + 1);
    absl::Time next = begin_ + options_.kill_every;
    while (!*over) {
      absl::SleepFor(absl::Milliseconds(20));
      if (absl::Now() < next) continue;
      const int number = static_cast<int>(random() % static_cast<uint64_t>(options_.tp));
      if (serve_->WorkerPid(number) == 0) continue;  // being started
      serve_->KillWorker(number);
      ++result_.kills;
      next += options_.kill_every;
    }
  }

  void TakeSamples(const std::atomic<bool>* over) {
    absl::Time next = begin_;
    while (!*over) {
      absl::SleepFor(absl::Milliseconds(20));
      if (absl::Now() < next) continue;
      next += absl::Milliseconds(500);
      Sample sample = {absl::ToDoubleSeconds(absl::Now() - begin_),
                       ResidentMib(serve_->process().pid()), 0};
      for (int number = 0; number < options_.tp; ++number) {
        const pid_t pid = serve_->WorkerPid(number);
        if (pid != 0) sample.worker_mib = std::max(sample.worker_mib, ResidentMib(pid));
      }
      samples_.push_back(sample);
    }
  }

  void Finish() {
    result_.seconds = absl::ToDoubleSeconds(absl::Now() - begin_);
    // What a stream held returns just after its end.
    const absl::Time deadline = absl::Now() + absl::Seconds(10);
    do {
      const inference::v1::ServerStatus status = serve_->Status();
      if (status.state() != "READY") {
        result_.kv_blocks_held = -1;
        continue;
      }
      result_.kv_blocks_held =
          status.kv_blocks_total() - status.kv_blocks_free() - status.kv_blocks_cached();
      result_.slots_held = status.slots_total() - status.slots_free();
      result_.recoveries = status.counters().at("recoveries");
      result_.digest_mismatches = status.counters().at("digest_mismatches");
    } while ((result_.kv_blocks_held != 0 || result_.slots_held != 0) && absl::Now() < deadline);
    using Phases = admin::v1::FaultPhases;
    const auto faults = serve_->Faults();
    result_.detect_ms = Median(faults, [](const Phases& p) { return p.detect(); });
    result_.abort_ms = Median(faults, [](const Phases& p) { return p.abort(); });
    result_.replace_ms = Median(faults, [](const Phases& p) { return p.replace(); });
    result_.join_ms = Median(faults, [](const Phases& p) { return p.join(); });
    result_.replay_ms = Median(faults, [](const Phases& p) { return p.replay(); });
    result_.recovery_ms = Median(faults, [](const Phases& p) {
      return p.detect() + p.abort() + p.replace() + p.join() + p.replay();
    });
    result_.server_mib = samples_.back().server_mib;
    result_.worker_mib = samples_.back().worker_mib;
    result_.server_mib_per_minute = Slope(samples_, &Sample::server_mib);
    result_.worker_mib_per_minute = Slope(samples_, &Sample::worker_mib);
  }

  const SoakOptions& options_;
  ServeProcess* const serve_;
  std::mt19937_64 random_;
  absl::Time begin_;
  std::vector<Sample> samples_;  // of the sampler, then of Drive
  std::mutex mu_;
  SoakResult result_;  // the counts of requests guarded by mu_ while the threads run
};

}  // namespace

std::string SoakResult::Json() const {
  const nlohmann::ordered_json line = {{"seconds", seconds},
                                       {"requests", requests},
                                       {"tokens", tokens},
                                       {"kills", kills},
                                       {"recoveries", recoveries},
                                       {"recovered_streams", recovered_streams},
                                       {"refused", refused},
                                       {"lost", lost},
                                       {"duplicated", duplicated},
                                       {"different", different},
                                       {"digest_mismatches", digest_mismatches},
                                       {"kv_blocks_held", kv_blocks_held},
                                       {"slots_held", slots_held},
                                       {"server_mib", server_mib},
                                       {"server_mib_per_minute", server_mib_per_minute},
                                       {"worker_mib", worker_mib},
                                       {"worker_mib_per_minute", worker_mib_per_minute},
                                       {"detect_ms", detect_ms},
                                       {"abort_ms", abort_ms},
                                       {"replace_ms", replace_ms},
                                       {"join_ms", join_ms},
                                       {"replay_ms", replay_ms},
                                       {"recovery_ms", recovery_ms},
                                       {"first_failure", first_failure}};
  return line.dump();
}

absl::StatusOr<SoakResult> Soak(const SoakOptions& options) {
  ServeProcess::Options serve_options;
  serve_options.model = options.model;
  serve_options.tp = options.tp;
  serve_options.flags = {"--recovery-policy", "restart", "--recovery-budget", "1000000"};
  ASSIGN_OR_RETURN(const std::unique_ptr<ServeProcess> serve, ServeProcess::Start(serve_options));
  return Run(options, serve.get()).Drive();
}

}  // namespace testing
}  // namespace lockstep
