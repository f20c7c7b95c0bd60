// The endpoint as a scraper sees it, and what the numbers say about an engine under random traces.
#include "coordinator/metrics/metrics.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "coordinator/engine_test_util.h"
#include "coordinator/errors.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace {

// One GET over a socket of its own; the whole answer.
std::string HttpGet(int port, const std::string& path) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string answer;
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
    const std::string request =
        absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    EXPECT_EQ(write(fd, request.data(), request.size()), static_cast<ssize_t>(request.size()));
    char buffer[4096];
    ssize_t got;
    while ((got = read(fd, buffer, sizeof(buffer))) > 0) {
      answer.append(buffer, static_cast<size_t>(got));
    }
  }
  close(fd);
  return answer;
}

// The text format: "name{labels} value" to value; comments are checked for their form.
struct Scrape {
  std::map<std::string, double> values;
  std::map<std::string, std::string> types;  // by family
  std::string malformed;                     // the first line that is not of the format

  double operator[](const std::string& series) const {
    const auto found = values.find(series);
    return found == values.end() ? -1 : found->second;
  }
  double SumOf(const std::string& family) const {
    double sum = 0;
    for (const auto& [series, value] : values) {
      if (absl::StartsWith(series, absl::StrCat(family, "{"))) sum += value;
    }
    return sum;
  }
};

Scrape Parse(const std::string& text) {
  Scrape scrape;
  for (const std::string& line : std::vector<std::string>(absl::StrSplit(text, '\n'))) {
    if (line.empty() || absl::StartsWith(line, "# HELP ")) continue;
    if (absl::StartsWith(line, "# TYPE ")) {
      const std::vector<std::string> words = absl::StrSplit(line, ' ');
      scrape.types[words[2]] = words[3];
      continue;
    }
    const size_t space = line.rfind(' ');
    double value = 0;
    if (space == std::string::npos || !absl::SimpleAtod(line.substr(space + 1), &value)) {
      if (scrape.malformed.empty()) scrape.malformed = line;
      continue;
    }
    if (!scrape.values.emplace(line.substr(0, space), value).second) {
      scrape.malformed = absl::StrCat("twice: ", line);
    }
  }
  return scrape;
}

// "" when a scrape balances: started = ended + running + queued, and no gauge is negative.
std::string Imbalance(const Scrape& scrape) {
  const double open = scrape.SumOf("lockstep_requests");
  const double started = scrape["lockstep_requests_started_total"];
  const double ended = scrape.SumOf("lockstep_requests_total");
  if (started != ended + open) {
    return absl::StrCat(started, " started, ", ended, " ended, ", open, " open");
  }
  for (const auto& [series, value] : scrape.values) {
    if (value < 0) return absl::StrCat(series, " is ", value);
  }
  return scrape.malformed;
}

TEST(MetricsTest, ServesTheTextFormatOverHttp) {
  EngineStats stats;
  stats.kv_blocks_total = 10;
  stats.kv_blocks_free = 4;
  stats.kv_blocks_cached = 1;
  stats.kv_blocks_active = 5;
  stats.kv_blocks_pinned_without_owner = 2;
  stats.counters = {{"tokens_prefilled", 7}, {"tokens_cached", 64}, {"tokens_generated", 9},
                    {"tokens_replayed", 3},  {"nan_logits", 1},     {"digest_mismatches", 2}};
  Metrics metrics([&stats]() {
    MetricsSample sample;
    sample.engine = stats;
    sample.epoch = 3;
    sample.ranks = {{true, absl::Milliseconds(250), 1.0}, {false, absl::InfiniteDuration(), 0.5}};
    return sample;
  });
  ASSERT_OK(metrics.Listen("127.0.0.1", 0));
  ASSERT_GT(metrics.port(), 0);
  metrics.OnRejected("QUEUE_FULL");
  metrics.OnRecovery("lease_expired",
                     {{"detect", absl::Seconds(3)}, {"replay", absl::Milliseconds(40)}});
  metrics.OnWorkerRestart(1, "killed");
  metrics.OnStarted(3);
  metrics.OnEnd(RequestEnd::kFailed, "POISON_REQUEST", 3, false, absl::Seconds(1));
  metrics.OnStepDigestMismatch();
  metrics.OnStaleMessageRefused();
  metrics.OnLoad(absl::Seconds(12));
  metrics.OnStarted(5);
  metrics.OnEnd(RequestEnd::kFailed, "SLOW_CONSUMER", 5, false, absl::Seconds(1));

  const std::string answer = HttpGet(metrics.port(), "/metrics");
  EXPECT_TRUE(absl::StartsWith(answer, "HTTP/1.1 200")) << answer;
  EXPECT_TRUE(absl::StrContains(answer, "text/plain"));
  const Scrape scrape = Parse(answer.substr(answer.find("\r\n\r\n") + 4));
  EXPECT_EQ(Imbalance(scrape), "");
  EXPECT_EQ(scrape["lockstep_tokens_total{kind=\"prompt\"}"], 7);
  EXPECT_EQ(scrape["lockstep_tokens_total{kind=\"cached\"}"], 64);
  EXPECT_EQ(scrape["lockstep_tokens_total{kind=\"generated\"}"], 9);
  EXPECT_EQ(scrape["lockstep_tokens_total{kind=\"replayed\"}"], 3);
  EXPECT_EQ(scrape["lockstep_kv_blocks{state=\"active\"}"], 3);
  EXPECT_EQ(scrape["lockstep_kv_blocks{state=\"pinned_without_owner\"}"], 2);
  EXPECT_EQ(scrape.SumOf("lockstep_kv_blocks"), 10);
  EXPECT_EQ(scrape["lockstep_nan_logits_total"], 1);
  EXPECT_EQ(scrape["lockstep_step_digest_mismatch_total"], 3);
  EXPECT_EQ(scrape["lockstep_epoch"], 3);
  EXPECT_EQ(scrape["lockstep_worker_up{rank=\"0\"}"], 1);
  EXPECT_EQ(scrape["lockstep_worker_up{rank=\"1\"}"], 0);
  EXPECT_EQ(scrape["lockstep_worker_lease_age_seconds{rank=\"0\"}"], 0.25);
  EXPECT_EQ(scrape["lockstep_model_load_progress_ratio{rank=\"1\"}"], 0.5);
  EXPECT_EQ(scrape["lockstep_admission_rejected_total{reason=\"QUEUE_FULL\"}"], 1);
  EXPECT_EQ(scrape["lockstep_recoveries_total{cause=\"lease_expired\"}"], 1);
  EXPECT_EQ(scrape["lockstep_recovery_seconds_sum{phase=\"detect\"}"], 3);
  EXPECT_EQ(scrape["lockstep_recovery_seconds_count{phase=\"replay\"}"], 1);
  EXPECT_EQ(scrape["lockstep_worker_restarts_total{cause=\"killed\",rank=\"1\"}"], 1);
  EXPECT_EQ(scrape["lockstep_poison_total"], 1);
  EXPECT_EQ(scrape["lockstep_stale_message_refused_total"], 1);
  EXPECT_EQ(scrape["lockstep_slow_consumer_total"], 1);
  EXPECT_EQ(scrape["lockstep_load_seconds_sum"], 12);
  EXPECT_EQ(scrape.types.at("lockstep_load_seconds"), "histogram");
  EXPECT_EQ(scrape.types.at("lockstep_requests_total"), "counter");
  EXPECT_EQ(scrape.types.at("lockstep_requests"), "gauge");

  EXPECT_TRUE(absl::StartsWith(HttpGet(metrics.port(), "/other"), "HTTP/1.1 404"));
  const int port = metrics.port();
  metrics.Shutdown();
  EXPECT_EQ(HttpGet(port, "/metrics"), "");
}

TEST(MetricsTest, APortInUseIsAnErrorThatSaysWhatToDo) {
  Metrics first([]() { return MetricsSample(); });
  ASSERT_OK(first.Listen("127.0.0.1", 0));
  Metrics second([]() { return MetricsSample(); });
  const absl::Status status = second.Listen("127.0.0.1", first.port());
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "--metrics-port")) << status;
}

// T153: after any trace the numbers balance, and at every scrape in between.
TEST(MetricsTest, CountersBalanceOverRandomTraces) {
  for (const uint64_t seed : {1u, 2u, 3u}) {
    std::atomic<Engine*> engine{nullptr};
    Metrics metrics([&engine]() {
      MetricsSample sample;
      if (engine != nullptr) sample.engine = engine.load()->stats();
      return sample;
    });
    EngineOptions options = testing::SmallEngine();
    options.observer = &metrics;
    options.kv_blocks = 16;
    options.max_queued_requests = 12;
    options.preempt_every = 5;
    testing::EngineFixture fixture(options);
    engine = &fixture.engine;
    std::atomic<bool> over{false};
    std::string breach;
    std::thread scraper([&]() {
      while (!over && breach.empty()) {
        const Scrape scrape = Parse(metrics.Text());
        breach = Imbalance(scrape);
        const double pinned = scrape["lockstep_kv_blocks{state=\"pinned_without_owner\"}"];
        if (pinned != 0) breach = absl::StrCat(pinned, " blocks are pinned without owner");
      }
    });
    std::mt19937_64 random(seed);
    std::vector<std::shared_ptr<testing::RecordingSink>> sinks;
    int64_t rejected = 0;
    for (int i = 0; i < 150; ++i) {
      GenerationSpec spec =
          testing::MakeSpec(absl::StrCat("r", i),
                            testing::MakePrompt(1 + static_cast<int64_t>(random() % 150), i % 3),
                            1 + static_cast<int32_t>(random() % 30));
      auto sink = std::make_shared<testing::RecordingSink>();
      const absl::Status status = fixture.engine.Submit(spec, sink);
      if (status.ok()) {
        sinks.push_back(sink);
      } else {
        ASSERT_EQ(ReasonOf(status), "QUEUE_FULL");
        ++rejected;
        sinks[random() % sinks.size()]->WaitDone();
      }
      if (random() % 4 == 0) {
        fixture.engine.Cancel(absl::StrCat("r", random() % 150), absl::CancelledError("by test"));
      }
    }
    for (const auto& sink : sinks) ASSERT_TRUE(sink->WaitDone());
    ASSERT_TRUE(fixture.WaitIdle());
    over = true;
    scraper.join();
    EXPECT_EQ(breach, "");

    const Scrape scrape = Parse(metrics.Text());
    EXPECT_EQ(Imbalance(scrape), "");
    EXPECT_EQ(scrape.SumOf("lockstep_requests"), 0);
    EXPECT_EQ(scrape["lockstep_queue_tokens"], 0);
    EXPECT_EQ(scrape["lockstep_kv_blocks{state=\"active\"}"], 0);
    EXPECT_EQ(scrape["lockstep_kv_blocks{state=\"pinned_without_owner\"}"], 0);
    EXPECT_EQ(scrape["lockstep_requests_started_total"], static_cast<double>(sinks.size()));
    EXPECT_GT(rejected, 0);
    EXPECT_EQ(scrape["lockstep_admission_rejected_total{reason=\"QUEUE_FULL\"}"],
              static_cast<double>(rejected));
    const auto counters = fixture.engine.stats().counters;
    EXPECT_EQ(scrape["lockstep_requests_total{outcome=\"finished\",reason=\"OK\"}"],
              static_cast<double>(counters.at("requests_finished")));
    EXPECT_EQ(scrape["lockstep_e2e_seconds_count"], static_cast<double>(sinks.size()));
    EXPECT_EQ(scrape["lockstep_step_seconds_count"], static_cast<double>(counters.at("steps")));
    const double first_tokens = scrape["lockstep_time_to_first_token_seconds_count"];
    EXPECT_EQ(first_tokens + scrape["lockstep_inter_token_seconds_count"],
              static_cast<double>(counters.at("tokens_generated")));
    engine = nullptr;
  }
}

}  // namespace
}  // namespace lockstep
