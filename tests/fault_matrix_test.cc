// The fault matrix in virtual time: phase x fault x rank x policy, every row, with the production
// engine, scheduler, group and recovery (coordinator/simulation). What each row expects is data:
// Expect() below. A subset of the rows runs with real processes in fault_matrix_process_test.
#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "coordinator/simulation/replica.h"
#include "gtest/gtest.h"
#include "kernels/base/log.h"

namespace lockstep {
namespace simulation {
namespace {

enum class Phase { kIdle, kLoad, kCommInit, kPrefill, kDecode, kSampling, kDrain, kRecovery };
constexpr Phase kPhases[] = {Phase::kIdle,   Phase::kLoad,     Phase::kCommInit, Phase::kPrefill,
                             Phase::kDecode, Phase::kSampling, Phase::kDrain,    Phase::kRecovery};
constexpr FaultKind kFaults[] = {FaultKind::kKill,      FaultKind::kCrash,     FaultKind::kStop,
                                 FaultKind::kFreeze,    FaultKind::kCut,       FaultKind::kDelay,
                                 FaultKind::kDuplicate, FaultKind::kCorrupt,   FaultKind::kReorder,
                                 FaultKind::kNoMemory,  FaultKind::kDeviceLost};
constexpr int kCoordinator = -1;
constexpr int kRanks[] = {0, 1, kCoordinator};

const char* Name(Phase phase) {
  static const char* const kNames[] = {"idle",   "load",     "comm init", "prefill",
                                       "decode", "sampling", "drain",     "recovery"};
  return kNames[static_cast<int>(phase)];
}
const char* Name(FaultKind fault) {
  static const char* const kNames[] = {"kill",    "crash",     "stop",       "freeze",
                                       "cut",     "delay",     "duplicate",  "corrupt",
                                       "reorder", "no memory", "device lost"};
  return kNames[static_cast<int>(fault)];
}

struct Row {
  Phase phase;
  FaultKind fault;
  int rank;
  bool spare;  // policy: a spare takes the place, else the process is started again
};

enum class Outcome {
  kUndisturbed,   // nobody notices
  kRecovered,     // a new epoch; every stream as if nothing had been
  kStarts,        // the start takes longer, and succeeds
  kRefusesStart,  // the server says why it cannot start
};

struct Expected {
  Outcome outcome;
  absl::Duration bound;  // from the fault until the last stream has ended, in virtual time
};

Expected Expect(const Row& row) {
  // Detection takes up to a lease of 3 s (20 s where nothing is asked of a rank that comes back by
  // itself), an abort up to 2 s, a start half a second, a load 2 s.
  const absl::Duration quick = absl::Seconds(12), slow = absl::Seconds(40);
  if (row.rank == kCoordinator) return {Outcome::kRecovered, slow};
  const bool at_start = row.phase == Phase::kLoad || row.phase == Phase::kCommInit;
  switch (row.fault) {
    case FaultKind::kDelay:
      return {at_start                        ? Outcome::kStarts
              : row.phase == Phase::kRecovery ? Outcome::kRecovered
                                              : Outcome::kUndisturbed,
              slow};
    case FaultKind::kNoMemory:
      // Of the next step.
      if (row.phase == Phase::kIdle) return {Outcome::kRecovered, quick};
      // What a rank refuses before it has ever run it would refuse again.
      if (at_start) return {Outcome::kRefusesStart, quick};
      return {row.phase == Phase::kSampling ? Outcome::kUndisturbed : Outcome::kRecovered, slow};
    case FaultKind::kDuplicate:
    case FaultKind::kCorrupt:
    case FaultKind::kReorder:
      if (at_start) return {Outcome::kStarts, slow};
      // It waits for the next result.
      return {Outcome::kRecovered, slow};
    case FaultKind::kCut:
      if (at_start) return {Outcome::kStarts, slow};
      return {Outcome::kRecovered, slow};
    default:
      return {at_start ? Outcome::kStarts : Outcome::kRecovered, slow};
  }
}

std::string Describe(const Row& row) {
  return absl::StrCat(Name(row.phase), " / ", Name(row.fault), " / ",
                      row.rank == kCoordinator ? "coordinator" : absl::StrCat("rank ", row.rank),
                      " / ", row.spare ? "spare" : "restart");
}

// Strikes when the rank reaches the point, after `skip` times.
void StrikeAt(World* world, Point point, int rank, int skip, FaultKind fault, absl::Time* struck) {
  auto left = std::make_shared<int>(skip);
  world->AddRule([=](SimWorker* worker, Point at, int of) {
    if (at != point || of != rank || (*left)-- > 0) return true;
    *struck = world->now();
    worker->Strike(fault);
    return false;
  });
}

// "" when the row is as expected.
std::string RunRow(const Row& row) {
  const Expected expected = Expect(row);
  ReplicaOptions options;
  options.ranks = 2;
  options.spares = row.spare ? 1 : 0;
  options.prefer_spares = row.spare;
  options.engine = testing::SmallEngine();
  Replica replica(1, options);
  World* world = replica.world();
  absl::Time struck = absl::InfinitePast();
  const bool coordinator = row.rank == kCoordinator;
  if (!coordinator && row.phase == Phase::kLoad) {
    StrikeAt(world, Point::kLoad, row.rank, 0, row.fault, &struck);
  }
  if (!coordinator && row.phase == Phase::kCommInit) {
    StrikeAt(world, Point::kInit, row.rank, 0, row.fault, &struck);
  }
  const absl::Time began = world->now();
  const bool started = replica.Start();
  if (expected.outcome == Outcome::kRefusesStart) {
    if (started) return "it started";
    const std::string message(replica.group()->status().message());
    if (message.find(absl::StrCat("rank ", row.rank)) == std::string::npos) {
      return absl::StrCat("the refusal does not name the rank: ", message);
    }
    return "";
  }
  if (!started) return absl::StrCat("no start: ", replica.group()->status().message());
  if (expected.outcome == Outcome::kStarts && world->now() - began > expected.bound) {
    return absl::StrCat("the start took ", absl::FormatDuration(world->now() - began));
  }
  const int requests = 6;
  const absl::Duration later = row.phase == Phase::kIdle ? absl::Seconds(30) : absl::ZeroDuration();
  for (int i = 0; i < requests; ++i) {
    GenerationSpec spec =
        testing::MakeSpec(absl::StrCat("request-", i), testing::MakePrompt(20 + 30 * i, i % 3), 30);
    if (i % 2 == 1) {
      spec.sampling.set_seed(static_cast<uint64_t>(i));
      spec.sampling.set_presence_penalty(0.5f);
    }
    replica.Submit(later, spec);
  }
  const auto strike_after = [&](absl::Duration after) {
    world->At(after, [&, world] {
      struck = world->now();
      if (SimWorker* worker = world->OfRank(row.rank)) worker->Strike(row.fault);
    });
  };
  switch (row.phase) {
    case Phase::kLoad:
    case Phase::kCommInit:
      if (coordinator) replica.KillCoordinator(absl::Milliseconds(1));
      break;
    case Phase::kIdle:
      if (coordinator) {
        replica.KillCoordinator(absl::Seconds(5));
      } else {
        strike_after(absl::Seconds(5));
      }
      break;
    case Phase::kPrefill:
      if (coordinator) {
        replica.KillCoordinator(absl::Milliseconds(4));
      } else {
        StrikeAt(world, Point::kPrefill, row.rank, 1, row.fault, &struck);
      }
      break;
    case Phase::kDecode:
      if (coordinator) {
        replica.KillCoordinator(absl::Milliseconds(60));
      } else {
        StrikeAt(world, Point::kDecode, row.rank, 3, row.fault, &struck);
      }
      break;
    case Phase::kSampling:
      if (coordinator) {
        replica.KillCoordinator(absl::Milliseconds(63));
      } else {
        StrikeAt(world, Point::kResult, row.rank, 5, row.fault, &struck);
      }
      break;
    case Phase::kDrain:
      world->At(absl::Milliseconds(20), [&replica] { replica.engine()->Drain(); });
      if (coordinator) {
        replica.KillCoordinator(absl::Milliseconds(40));
      } else {
        StrikeAt(world, Point::kDecode, row.rank, 6, row.fault, &struck);
      }
      break;
    case Phase::kRecovery:
      // Another rank is killed first; the fault strikes while the next epoch is formed.
      StrikeAt(world, Point::kDecode, 1, 3, FaultKind::kKill, &struck);
      if (coordinator) {
        replica.KillCoordinator(absl::Milliseconds(400));
      } else {
        StrikeAt(world, Point::kPrepare, row.rank, 0, row.fault, &struck);
      }
      break;
  }
  if (!replica.RunToEnd(absl::Hours(2))) return "it did not end";
  const std::string breach = replica.Breach();
  if (!breach.empty()) return breach;
  for (const Replica::Outcome& outcome : replica.outcomes()) {
    if (!outcome.refused.ok()) return absl::StrCat("refused: ", outcome.refused.ToString());
    if (!outcome.sink->status().ok()) {
      return absl::StrCat(outcome.spec.request_id,
                          " was lost: ", outcome.sink->status().ToString());
    }
  }
  if (replica.group()->phase() != GroupCore::Phase::kRunning) return "the group does not run";
  const size_t faults = replica.faults().size();
  if (expected.outcome == Outcome::kUndisturbed && faults != 0) {
    return absl::StrCat("it was noticed: ", replica.faults()[0].fault.message);
  }
  if (expected.outcome == Outcome::kRecovered && !coordinator && faults == 0) {
    return "it was not noticed";
  }
  if (coordinator && replica.coordinators() < 2) return "the coordinator was not killed";
  const absl::Duration took = world->now() - struck;
  if (struck != absl::InfinitePast() && row.phase != Phase::kIdle && took > expected.bound) {
    return absl::StrCat("it took ", absl::FormatDuration(took));
  }
  return "";
}

TEST(FaultMatrix, EveryRowEndsAsExpected) {
  SetLogLevel(Severity::kError);
  int rows = 0;
  for (const Phase phase : kPhases) {
    for (const FaultKind fault : kFaults) {
      for (const int rank : kRanks) {
        // A coordinator only knows one fault: it is gone.
        if (rank == kCoordinator && fault != FaultKind::kKill) continue;
        for (const bool spare : {false, true}) {
          const Row row{phase, fault, rank, spare};
          const std::string problem = RunRow(row);
          EXPECT_EQ(problem, "") << Describe(row);
          ++rows;
        }
      }
    }
  }
  std::printf("%d rows\n", rows);
  EXPECT_EQ(rows, 8 * (11 * 2 + 1) * 2);
}

}  // namespace
}  // namespace simulation
}  // namespace lockstep
