// A coordinator's engine and group in a simulated world, and the invariants that hold after every
// run, whatever happened in it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "coordinator/engine.h"
#include "coordinator/engine_test_util.h"
#include "coordinator/generation.h"
#include "coordinator/group/fault.h"
#include "coordinator/group/group_core.h"
#include "coordinator/simulation/world.h"

namespace lockstep {
namespace simulation {

struct ReplicaOptions {
  int ranks = 2;
  int spares = 0;
  bool launcher = true;  // else processes that end are not started again: spares alone help
  bool prefer_spares = true;
  int recovery_budget = 100;
  EngineOptions engine;  // the clock is filled in
  WorldOptions world;    // the device is filled in
};

class Replica {
 public:
  Replica(uint64_t seed, const ReplicaOptions& options);
  ~Replica();

  World* world() { return &world_; }
  Engine* engine() { return engine_.get(); }
  GroupCore* group() { return group_.get(); }
  const std::vector<FaultRecord>& faults() const { return faults_; }

  // Loads and joins; false when that fails (then group()->status() says why).
  bool Start();
  // Submits a request `after` a while.
  void Submit(absl::Duration after, const GenerationSpec& spec);
  void Cancel(absl::Duration after, const std::string& id);
  // The coordinator ends as by SIGKILL and another one takes its place, with the tokens that a
  // journal would have: those that were logged. The workers live on. False as Start.
  bool RestartCoordinator();
  // The same `after` a while of RunToEnd.
  void KillCoordinator(absl::Duration after);
  int64_t coordinators() const { return coordinators_; }
  // Runs until every request has ended and nothing is in flight; false when that takes longer than
  // `limit` of virtual time.
  bool RunToEnd(absl::Duration limit);

  class Logged;
  struct Outcome {
    GenerationSpec spec;
    std::shared_ptr<testing::RecordingSink> sink;
    std::shared_ptr<Logged> logged;  // around it: what a journal would have
    absl::Status refused;            // by Submit
    bool cancelled = false;
  };
  const std::vector<Outcome>& outcomes() const { return outcomes_; }
  // What is broken, or "": one end per request, events in order without gaps, every token and
  // digest of every finished and unfinished request as in an undisturbed run, blocks and slots
  // back, counters balanced, no breach of the protocol seen by a worker, one result per step and
  // epoch.
  std::string Breach() const;

 private:
  class Transport;
  void MakeCoordinator();
  void Arrive(size_t index);

  const ReplicaOptions options_;
  World world_;
  std::vector<FaultRecord> faults_;
  std::unique_ptr<WorkerLauncher> launcher_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<GroupCore> group_;
  std::unique_ptr<Engine> engine_;
  WorkerGroupOptions group_options_;
  std::vector<Outcome> outcomes_;
  bool serving_ = false;
  bool kill_coordinator_ = false;
  int64_t coordinators_ = 1;
  int64_t to_come_ = 0;  // submissions that are scheduled
};

}  // namespace simulation
}  // namespace lockstep
