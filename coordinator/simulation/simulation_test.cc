// Seeds: each makes a random replica, random requests and random faults, and runs the production
// engine, scheduler and group in virtual time. A failing seed is printed, and runs again with
// --seed N. --seeds N runs more of them.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "coordinator/errors.h"
#include "coordinator/simulation/replica.h"
#include "gtest/gtest.h"
#include "kernels/base/log.h"

namespace lockstep {
namespace simulation {
namespace {

int64_t num_seeds = 4000;
int64_t only_seed = -1;

struct Totals {
  int64_t coordinators = 0;  // that were killed
  int64_t faults = 0;
  int64_t replayed = 0;  // requests
  int64_t checked = 0;   // digests
} totals;

GenerationSpec RandomSpec(World* world, int index) {
  GenerationSpec spec = testing::MakeSpec(
      absl::StrCat("request-", index),
      testing::MakePrompt(1 + static_cast<int64_t>(world->Random(world->Random(3) == 0 ? 300 : 40)),
                          world->Random(4)),
      1 + static_cast<int32_t>(world->Random(40)));
  if (world->Random(4) == 0) spec.n = 1 + static_cast<int32_t>(world->Random(3));
  if (world->Random(2) == 0) {
    spec.sampling.set_seed(world->Random(1000));
    spec.sampling.set_presence_penalty(0.5f);
  }
  spec.priority = static_cast<int32_t>(world->Random(3)) - 1;
  return spec;
}

FaultKind RandomFault(World* world) {
  constexpr FaultKind kKinds[] = {
      FaultKind::kKill,    FaultKind::kKill,    FaultKind::kCrash,    FaultKind::kStop,
      FaultKind::kFreeze,  FaultKind::kCut,     FaultKind::kDelay,    FaultKind::kDuplicate,
      FaultKind::kCorrupt, FaultKind::kReorder, FaultKind::kNoMemory, FaultKind::kDeviceLost};
  return kKinds[world->Random(sizeof(kKinds) / sizeof(kKinds[0]))];
}

// What went wrong with this seed, or "".
std::string RunSeed(uint64_t seed) {
  std::mt19937_64 shape(seed * 7919 + 13);
  ReplicaOptions options;
  options.ranks = 1 << (shape() % 3);
  options.spares = static_cast<int>(shape() % 3);
  options.prefer_spares = shape() % 2 == 0;
  options.engine = testing::SmallEngine();
  options.world.load_time = absl::Milliseconds(50 + static_cast<int64_t>(shape() % 4000));
  Replica replica(seed, options);
  World* world = replica.world();
  if (!replica.Start()) return absl::StrCat("no start: ", replica.group()->status().message());
  const int requests = 1 + static_cast<int>(world->Random(8));
  for (int i = 0; i < requests; ++i) {
    replica.Submit(absl::Milliseconds(static_cast<int64_t>(world->Random(400))),
                   RandomSpec(world, i));
  }
  if (world->Random(3) == 0) {
    replica.Cancel(absl::Milliseconds(static_cast<int64_t>(world->Random(500))), "request-0");
  }
  if (world->Random(3) == 0) {
    replica.KillCoordinator(absl::Milliseconds(static_cast<int64_t>(world->Random(1500))));
  }
  const int faults = static_cast<int>(world->Random(5));
  for (int i = 0; i < faults; ++i) {
    if (world->Random(2) == 0) {
      world->At(absl::Milliseconds(static_cast<int64_t>(world->Random(6000))), [world] {
        SimWorker* worker = world->OfRank(static_cast<int>(world->Random(4)));
        if (worker != nullptr) worker->Strike(RandomFault(world));
      });
      continue;
    }
    const auto point = static_cast<Point>(world->Random(6));
    const FaultKind kind = RandomFault(world);
    const int rank = static_cast<int>(world->Random(static_cast<uint64_t>(options.ranks)));
    auto left = std::make_shared<uint64_t>(world->Random(6));
    world->AddRule([=](SimWorker* worker, Point at, int of) {
      if (at != point || of != rank || (*left)-- > 0) return true;
      worker->Strike(kind);
      return false;
    });
  }
  if (!replica.RunToEnd(absl::Minutes(30))) {
    return absl::StrCat("not ended after 30 minutes; the group is in phase ",
                        static_cast<int>(replica.group()->phase()), ": ",
                        replica.group()->status().message());
  }
  const std::string breach = replica.Breach();
  if (!breach.empty()) return breach;
  totals.coordinators += replica.coordinators() - 1;
  totals.faults += static_cast<int64_t>(replica.faults().size());
  totals.replayed += replica.engine()->stats().counters.at("requests_replayed");
  totals.checked += replica.engine()->stats().counters.at("digests_checked");
  // With a launcher and budget left nothing is lost, but for a request that was alone with crashes.
  for (const Replica::Outcome& outcome : replica.outcomes()) {
    if (!outcome.refused.ok()) return absl::StrCat("refused: ", outcome.refused.message());
    const absl::Status status = outcome.sink->status();
    if (status.ok() || outcome.cancelled) continue;
    if (ReasonOf(status) != "POISON_REQUEST") {
      return absl::StrCat(outcome.spec.request_id, " was lost: ", status.ToString());
    }
  }
  return "";
}

TEST(Simulation, SeedsKeepEveryInvariant) {
  SetLogLevel(only_seed >= 0 ? Severity::kInfo : Severity::kError);

  const int64_t first = only_seed >= 0 ? only_seed : 1;
  const int64_t last = only_seed >= 0 ? only_seed : num_seeds;
  int failures = 0;
  for (int64_t seed = first; seed <= last && failures < 5; ++seed) {
    const std::string problem = RunSeed(static_cast<uint64_t>(seed));
    if (problem.empty()) continue;
    ++failures;
    ADD_FAILURE() << "seed " << seed << ": " << problem << "\n  again: simulation_test --seed "
                  << seed;
  }

  const auto number = [](int64_t value) { return static_cast<long long>(value); };
  std::printf(
      "%lld seeds: %lld faults, %lld coordinators killed, %lld requests replayed, %lld "
      "digests checked\n",
      number(last - first + 1), number(totals.faults), number(totals.coordinators),
      number(totals.replayed), number(totals.checked));
  if (only_seed >= 0) return;
  // The seeds are worth running.
  EXPECT_GT(totals.faults, num_seeds / 4);
  EXPECT_GT(totals.coordinators, num_seeds / 10);
  EXPECT_GT(totals.replayed, num_seeds / 4);
  EXPECT_GT(totals.checked, num_seeds);
}

// One replacement cannot load while the process of the other is still being started.
TEST(Simulation, ReplacementsOfTwoRanksMayFailAtDifferentTimes) {
  SetLogLevel(Severity::kError);
  ReplicaOptions options;
  options.ranks = 2;
  options.engine = testing::SmallEngine();
  Replica replica(1, options);
  World* world = replica.world();
  ASSERT_TRUE(replica.Start());
  replica.Submit(absl::ZeroDuration(), testing::MakeSpec("r", testing::MakePrompt(30, 1), 200));
  world->At(absl::Milliseconds(50), [world] { world->OfRank(0)->Strike(FaultKind::kKill); });
  world->At(absl::Milliseconds(450), [world] { world->OfRank(1)->Strike(FaultKind::kKill); });
  world->AddRule([](SimWorker* worker, Point at, int rank) {
    if (at != Point::kLoad || rank != 0) return true;
    worker->Strike(FaultKind::kNoMemory);
    return false;
  });
  ASSERT_TRUE(replica.RunToEnd(absl::Minutes(30)));
  EXPECT_EQ(replica.Breach(), "");
  EXPECT_TRUE(replica.outcomes()[0].sink->status().ok()) << replica.outcomes()[0].sink->status();
}

TEST(Simulation, ARequestThatCrashesWorkersFailsAloneAndNobodyElseDoes) {
  SetLogLevel(Severity::kError);
  constexpr int32_t kPoison = 999999;
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    ReplicaOptions options;
    options.ranks = 2;
    options.recovery_budget = 8;
    options.engine = testing::SmallEngine();
    options.world.poison_id = kPoison;
    Replica replica(seed, options);
    ASSERT_TRUE(replica.Start());
    for (int i = 0; i < 6; ++i) {
      GenerationSpec spec = RandomSpec(replica.world(), i);
      if (i == 3) spec.prompt_ids.push_back(kPoison);
      spec.n = 1;
      replica.Submit(absl::Milliseconds(static_cast<int64_t>(replica.world()->Random(100))), spec);
    }
    ASSERT_TRUE(replica.RunToEnd(absl::Minutes(30))) << seed;
    for (int i = 0; i < 6; ++i) {
      const absl::Status status = replica.outcomes()[static_cast<size_t>(i)].sink->status();
      EXPECT_EQ(ReasonOf(status), i == 3 ? "POISON_REQUEST" : "") << seed << ": " << status;
      EXPECT_EQ(status.ok(), i != 3) << seed << ": " << status;
    }
    EXPECT_EQ(replica.Breach(), "") << seed;
    EXPECT_EQ(replica.engine()->stats().counters.at("recoveries"), 2) << seed;
  }
}

}  // namespace
}  // namespace simulation
}  // namespace lockstep

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::string(argv[i]) == "--seed") lockstep::simulation::only_seed = std::atoll(argv[i + 1]);
    if (std::string(argv[i]) == "--seeds")
      lockstep::simulation::num_seeds = std::atoll(argv[i + 1]);
  }
  return RUN_ALL_TESTS();
}
