// The fault matrix on real processes: a `lockstep serve` with workers of their own, struck row
// after row. Whatever strikes, accepted streams end as if nothing had happened.
#include <signal.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "tests/cluster.h"
#include "tests/fault_matrix.h"
#include "tests/fault_rule.h"
#include "tests/request_mix.h"
#include "tests/serve_process.h"

namespace lockstep {
namespace testing {
namespace {

using ::testing::HasSubstr;

constexpr int kStreams = 4, kTokens = 32;
// Rows whose lease must run out; the others outlast what a busy machine does to them.
constexpr int kShortLeaseMs = 1500, kLeaseMs = 15000;

// What the streams say undisturbed, of a group of one rank.
const std::vector<Answer>& Reference() {
  static const std::vector<Answer>* answers = [] {
    ServeProcess::Options options;
    options.model = TestModel("qwen3_5-trained-ct-nvfp4-fp8");
    options.tp = 1;
    auto serve = ServeProcess::Start(options);
    EXPECT_OK(serve.status());
    if (!serve.ok()) return new std::vector<Answer>();
    return new std::vector<Answer>(
        ReadAnswers((*serve)->inference(), kStreams, kTokens, 0, nullptr));
  }();
  return *answers;
}

// A server and the means to strike its workers.
struct Target {
  std::unique_ptr<ServeProcess> serve;
  std::string strikes;               // prefix of the files
  std::vector<std::string> ledgers;  // by number of the worker
};

std::string StrikeFile(const Target& target, int rank) {
  return absl::StrCat(target.strikes, ".", rank);
}

void Arm(const Target& target, const FaultRow& row) {
  const std::string path = StrikeFile(target, row.rank);
  std::ofstream(path + ".made") << absl::StrReplaceAll(row.rules, {{"+", "\n"}}) << "\n";
  ASSERT_EQ(rename((path + ".made").c_str(), path.c_str()), 0);
}

bool Struck(const Target& target, const FaultRow& row) {
  return !std::ifstream(StrikeFile(target, row.rank)).good();
}

// Starts a server as the row needs it, struck at once where the row is of the start.
absl::Status StartFor(const FaultRow& row, Target* target) {
  target->strikes = TempPath("strikes");
  ServeProcess::Options options;
  options.model = TestModel("qwen3_5-trained-ct-nvfp4-fp8");
  options.tp = row.tp;
  options.flags = {"--recovery-budget", "1000", "--lease-ms",
                   absl::StrCat(KindOf(row) == FaultKind::kStop ? kShortLeaseMs : kLeaseMs)};
  int workers = row.tp;
  if (row.policy == Policy::kSpare) {
    options.flags.insert(options.flags.end(), {"--spare-workers", "1"});
    ++workers;
  } else {
    options.flags.insert(options.flags.end(), {"--recovery-policy", "restart"});
  }
  for (int i = 0; i < workers; ++i) {
    target->ledgers.push_back(TempPath("ledger"));
    options.faults.push_back({"--strikes", target->strikes, "--ledger", target->ledgers.back()});
  }
  if (row.phase == MatrixPhase::kLoad || row.phase == MatrixPhase::kInit) Arm(*target, row);
  auto serve = ServeProcess::Start(options);
  if (!serve.ok()) return serve.status();
  target->serve = *std::move(serve);
  return absl::OkStatus();
}

uint64_t LastFault(ServeProcess* serve) {
  const auto faults = serve->Faults();
  return faults.empty() ? 0 : faults[0].id();
}

// Waits until the server serves again and the faults since `before` are dealt with.
std::vector<admin::v1::FaultRecord> Settle(ServeProcess* serve, uint64_t before, bool fault,
                                           absl::Time deadline) {
  while (true) {
    std::vector<admin::v1::FaultRecord> found;
    for (const auto& record : serve->Faults()) {
      if (record.id() > before) found.push_back(record);
    }
    const bool dealt = found.empty() ? !fault : found.front().outcome() == admin::v1::RECOVERED;
    if ((dealt && serve->Status().state() == "READY") || absl::Now() >= deadline) {
      EXPECT_TRUE(dealt) << "no recovered fault in the records\n" << serve->log();
      return found;
    }
    absl::SleepFor(absl::Milliseconds(5));
  }
}

void ExpectBalanced(ServeProcess* serve) {
  inference::v1::ServerStatus status;
  const auto balanced = [&] {
    const auto& c = status.counters();
    return status.requests_running() == 0 && status.requests_queued() == 0 &&
           status.kv_blocks_free() + status.kv_blocks_cached() == status.kv_blocks_total() &&
           status.slots_free() == status.slots_total() &&
           c.at("requests_started") ==
               c.at("requests_finished") + c.at("requests_failed") + c.at("requests_cancelled") &&
           c.at("digest_mismatches") == 0;
  };
  // What a stream held returns just after its end.
  const absl::Time deadline = absl::Now() + absl::Seconds(5);
  do {
    status = serve->Status();
  } while (!balanced() && absl::Now() < deadline);
  EXPECT_TRUE(balanced()) << status.DebugString();
}

double Seconds(const admin::v1::FaultPhases& p) {
  return p.detect() + p.abort() + p.replace() + p.load() + p.join() + p.replay();
}

void Report(const FaultRow& row, const std::vector<admin::v1::FaultRecord>& found,
            absl::Duration total) {
  std::string causes;
  double seconds = 0;
  for (const auto& record : found) {
    absl::StrAppend(&causes, causes.empty() ? "" : "+", record.cause());
    seconds += Seconds(record.phases());
  }
  std::printf("row | %-8s | %-32s | %d of %d | %-7s | %-28s | %6.3f s | %6.3f s\n", Name(row.phase),
              row.rules, row.rank, row.tp, Name(row.policy), causes.empty() ? "-" : causes.c_str(),
              seconds, absl::ToDoubleSeconds(total));
  std::fflush(stdout);
}

void ExpectFound(const FaultRow& row, const std::vector<admin::v1::FaultRecord>& found,
                 absl::Duration total) {
  std::set<std::string> causes;
  for (const auto& record : found) causes.insert(record.cause());
  if (row.outcome == Outcome::kUnnoticed) {
    EXPECT_THAT(causes, ::testing::IsEmpty());
  } else if (*row.found != '\0') {
    EXPECT_THAT(causes, ::testing::Contains(row.found));
  }
  EXPECT_LE(absl::ToDoubleSeconds(total), row.bound_s);
  Report(row, found, total);
}

// A row of a server that has run before.
void Strike(const Target& target, const FaultRow& row) {
  ServeProcess* serve = target.serve.get();
  const uint64_t before = LastFault(serve);
  absl::Time begin = absl::Now();
  std::vector<Answer> answers;
  if (row.phase == MatrixPhase::kIdle) {
    Arm(target, row);
    const absl::Time deadline = begin + absl::Seconds(row.bound_s);
    while (!Struck(target, row) && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(2));
  } else {
    // Streams that share their beginnings with what the cache holds would have no prefill.
    const auto after = row.phase == MatrixPhase::kPrefill ? 0 : kStreams;
    if (after == 0) Arm(target, row);
    answers = ReadAnswers(serve->inference(), kStreams, kTokens, after, [&] {
      begin = absl::Now();
      if (after != 0) Arm(target, row);
    });
  }
  EXPECT_TRUE(Struck(target, row)) << "the fault was never made\n" << serve->log();
  const auto found =
      Settle(serve, before, row.outcome == Outcome::kRecovered, begin + absl::Seconds(60));
  ExpectFound(row, found, absl::Now() - begin);
  if (answers.empty()) {
    answers = ReadAnswers(serve->inference(), kStreams, kTokens, 0, nullptr);
  }
  ExpectSameAnswers(answers, Reference());
  ExpectBalanced(serve);
}

// Each sampled position of a worker's epoch is there once.
void ExpectLedgers(const Target& target) {
  int64_t lines = 0;
  for (const std::string& path : target.ledgers) {
    std::ifstream file(path);
    std::set<std::tuple<int64_t, int64_t, int64_t>> of_step;
    std::set<std::tuple<int64_t, int64_t, int64_t, int64_t>> of_owner;
    int64_t epoch, step, slot, generation, position;
    while (file >> epoch >> step >> slot >> generation >> position) {
      ++lines;
      EXPECT_TRUE(of_step.insert({epoch, step, slot}).second)
          << path << ": " << epoch << " " << step << " " << slot;
      EXPECT_TRUE(of_owner.insert({epoch, slot, generation, position}).second)
          << path << ": " << epoch << " " << slot << " " << generation << " " << position;
    }
  }
  EXPECT_GE(lines, target.serve->Counter("tokens_generated"));
}

std::vector<FaultRow> RowsOf(const std::set<MatrixPhase>& phases) {
  std::vector<FaultRow> rows;
  for (const FaultRow& row : FaultMatrix()) {
    if (phases.count(row.phase) != 0) rows.push_back(row);
  }
  return rows;
}

TEST(FaultMatrix, EveryPairIsThere) {
  using Pair = std::pair<std::string, std::string>;
  std::set<Pair> found;
  std::set<std::string> phases, kinds;
  for (const FaultRow& row : FaultMatrix()) {
    const std::string phase = Name(row.phase);
    const std::string kind = absl::StrCat(static_cast<int>(KindOf(row)));
    const std::string rank = absl::StrCat("rank ", row.rank);
    const std::string policy = Name(row.policy);
    phases.insert(phase);
    // An exit is one kind, whatever its code.
    if (KindOf(row) != FaultKind::kExit0) kinds.insert(kind);
    for (const Pair& pair : {Pair(phase, rank), Pair(phase, policy), Pair(kind, rank),
                             Pair(kind, policy), Pair(rank, policy)}) {
      found.insert(pair);
    }
  }
  EXPECT_EQ(phases.size(), 8u);
  for (const std::string rank : {"rank 0", "rank 1"}) {
    for (const std::string policy : {"restart", "spare"}) {
      EXPECT_EQ(found.count({rank, policy}), 1u);
    }
  }
  for (const std::set<std::string>& names : {phases, kinds}) {
    for (const std::string& name : names) {
      for (const std::string other : {"rank 0", "rank 1", "restart", "spare"}) {
        EXPECT_EQ(found.count({name, other}), 1u) << name << " and " << other;
      }
    }
  }
  EXPECT_LE(FaultMatrix().size(), 60u);
}

using Group = std::tuple<int, Policy, bool>;  // tp, policy, stops

class RunningServer : public ::testing::TestWithParam<Group> {};

TEST_P(RunningServer, StreamsOutliveEveryRow) {
  Target target;
  for (const FaultRow& row :
       RowsOf({MatrixPhase::kPrefill, MatrixPhase::kDecode, MatrixPhase::kSampling,
               MatrixPhase::kIdle, MatrixPhase::kRecovery})) {
    if (Group(row.tp, row.policy, KindOf(row) == FaultKind::kStop) != GetParam()) continue;
    SCOPED_TRACE(absl::StrCat(Name(row.phase), " ", row.rules, " rank ", row.rank));
    if (target.serve == nullptr) {
      ASSERT_OK(StartFor(row, &target));
    }
    Strike(target, row);
    if (HasFailure()) return;
  }
  ASSERT_NE(target.serve, nullptr) << "no row";
  ExpectLedgers(target);
}

INSTANTIATE_TEST_SUITE_P(
    FaultMatrix, RunningServer,
    ::testing::Values(Group(2, Policy::kRestart, false), Group(2, Policy::kSpare, false),
                      Group(2, Policy::kRestart, true), Group(2, Policy::kSpare, true),
                      Group(1, Policy::kRestart, false), Group(4, Policy::kRestart, false)));

// A loss at any token leaves the rest what it would have been: sampled, with penalties and a least
// number of tokens.
TEST(RunningServerTokens, ALossAtEachTokenLeavesTheRestAsItWas) {
  const inference::v1::GenerateRequest request = MixedRequest(3, kTokens);
  Target target;
  for (int token = 1; token < kTokens; ++token) {
    const std::string rule =
        absl::StrCat("decode:", token, token % 4 == 0 ? "=kill" : "=drop-stream");
    SCOPED_TRACE(rule);
    const FaultRow row = {MatrixPhase::kDecode, rule.c_str(),        token % 2, 2,
                          Policy::kRestart,     Outcome::kRecovered, "",        20};
    if (target.serve == nullptr) {
      ASSERT_OK(StartFor(row, &target));
    }
    const uint64_t before = LastFault(target.serve.get());
    Arm(target, row);
    const Answer found = ReadAnswer(target.serve->inference(), request, nullptr);
    EXPECT_TRUE(Struck(target, row));
    EXPECT_EQ(Difference(found, Reference()[3]), "");
    EXPECT_GE(found.recoveries, 1);
    Settle(target.serve.get(), before, true, absl::Now() + absl::Seconds(60));
    if (HasFailure()) return;
  }
  ExpectBalanced(target.serve.get());
  ExpectLedgers(target);
}

class StartingServer : public ::testing::TestWithParam<FaultRow> {};

TEST_P(StartingServer, ComesUpOrSaysWhyNot) {
  const FaultRow row = GetParam();
  SCOPED_TRACE(absl::StrCat(row.rules, " rank ", row.rank));
  const absl::Time begin = absl::Now();
  Target target;
  const absl::Status started = StartFor(row, &target);
  EXPECT_TRUE(Struck(target, row));
  if (row.outcome == Outcome::kRefused) {
    ASSERT_FALSE(started.ok());
    EXPECT_THAT(std::string(started.message()), HasSubstr(row.found));
    EXPECT_THAT(std::string(started.message()), HasSubstr(absl::StrCat("rank ", row.rank)));
    EXPECT_LE(absl::ToDoubleSeconds(absl::Now() - begin), row.bound_s);
    Report(row, {}, absl::Now() - begin);
    return;
  }
  ASSERT_OK(started);
  ExpectFound(row, target.serve->Faults(), absl::Now() - begin);
  ExpectSameAnswers(ReadAnswers(target.serve->inference(), kStreams, kTokens, 0, nullptr),
                    Reference());
  ExpectBalanced(target.serve.get());
}

INSTANTIATE_TEST_SUITE_P(FaultMatrix, StartingServer,
                         ::testing::ValuesIn(RowsOf({MatrixPhase::kLoad, MatrixPhase::kInit})));

class DrainingServer : public ::testing::TestWithParam<FaultRow> {};

TEST_P(DrainingServer, FinishesItsStreamsAndExitsZero) {
  const FaultRow row = GetParam();
  SCOPED_TRACE(absl::StrCat(row.rules, " rank ", row.rank));
  Target target;
  ASSERT_OK(StartFor(row, &target));
  absl::Time begin;
  const std::vector<Answer> answers =
      ReadAnswers(target.serve->inference(), kStreams, kTokens, kStreams, [&] {
        target.serve->process().Signal(SIGTERM);
        begin = absl::Now();
        Arm(target, row);
      });
  EXPECT_TRUE(Struck(target, row));
  ExpectSameAnswers(answers, Reference());
  EXPECT_TRUE(target.serve->process().Wait(absl::Seconds(row.bound_s)));
  EXPECT_EQ(target.serve->process().exit_code(), 0) << target.serve->log();
  EXPECT_LE(absl::ToDoubleSeconds(absl::Now() - begin), row.bound_s);
  EXPECT_THAT(target.serve->log(), HasSubstr(" after the fault "));
  Report(row, {}, absl::Now() - begin);
}

INSTANTIATE_TEST_SUITE_P(FaultMatrix, DrainingServer,
                         ::testing::ValuesIn(RowsOf({MatrixPhase::kDrain})));

}  // namespace
}  // namespace testing
}  // namespace lockstep
