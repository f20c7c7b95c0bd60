// A world of workers in one thread with a virtual clock: for simulations of a coordinator's
// GroupCore and Engine. Time passes only in Run. Everything that happens is an event in a queue, in
// the order of time and then of scheduling; so a seed determines a run to the last event.
//
// A SimWorker follows the worker's protocol: it fences by term and epoch, keeps its weights when a
// group breaks, and begins each epoch with an empty device. The device is a FakeStepTransport,
// which checks each plan more strictly than a worker would and computes a model in which a wrong
// token, position, state or penalty anywhere changes the output. A step ends when every rank of the
// group has it, as its collectives would; a rank that is gone breaks the steps of the others.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "coordinator/fake_step_transport.h"
#include "coordinator/group/rank_link.h"
#include "proto/worker.pb.h"

namespace lockstep {
namespace simulation {

class World;

// Where a fault can strike.
enum class Point { kLoad, kPrepare, kInit, kPrefill, kDecode, kResult };

enum class FaultKind {
  kKill,       // the process ends by a signal from outside
  kCrash,      // the process ends by its own doing
  kStop,       // the process stops and is continued after a while
  kFreeze,     // the process stops for good
  kCut,        // the connection breaks; the process lives
  kDelay,      // what the worker says next comes much later
  kDuplicate,  // its next result comes twice
  kCorrupt,    // its next result has another digest
  kReorder,    // its next two results change places
  kNoMemory,   // the call or step fails with RESOURCE_EXHAUSTED
  kDeviceLost,
};

class SimWorker {
 public:
  SimWorker(World* world, std::string address);

  const std::string& address() const { return address_; }
  bool alive() const { return alive_; }
  // The first breach of the protocol or of a plan that the worker saw.
  const std::string& breach() const { return breach_; }
  void Strike(FaultKind kind);

 private:
  friend class World;
  friend class SimLink;
  struct Step {
    worker::v1::StepRequest request;
    worker::v1::StepResult result;
  };

  absl::Status Fence(const worker::v1::Identity& asked);
  worker::v1::Identity Identity() const;
  void Answer(int32_t link, uint64_t id, const RankRequest& request);
  void OpenStream(int32_t link, uint64_t id);
  void OnStep(uint64_t stream, const worker::v1::StepRequest& request);
  void FinishStep(uint64_t stream, uint64_t step);
  void SendResult(worker::v1::StepResult result);
  void EndStream(const absl::Status& status);
  void LeaveGroup(const absl::Status& why);
  void BreakGroup(const absl::Status& why);
  void Die(bool own_doing);
  void Post(int32_t link, RankEvent event);
  bool StrikeAt(Point point);  // true: the call is to fail

  World* const world_;
  const std::string address_;
  uint64_t incarnation_;
  bool alive_ = true;
  bool stopped_ = false;
  std::vector<std::function<void()>> held_;  // while stopped
  worker::v1::WorkerState state_ = worker::v1::NEW;
  uint64_t term_ = 0, epoch_ = 0;
  int rank_ = -1, world_size_ = 0;
  bool device_lost_ = false;
  bool no_memory_ = false;
  std::string error_;
  std::unique_ptr<FakeStepTransport> device_;
  int32_t stream_link_ = 0;
  uint64_t stream_ = 0;
  std::map<uint64_t, Step> steps_;           // of the stream, until they end
  std::pair<int32_t, uint64_t> init_{0, 0};  // link and call of the InitComm that waits
  absl::Duration delay_;
  absl::Time last_of_stream_ = absl::InfinitePast();
  bool duplicate_ = false, corrupt_ = false, reorder_ = false;
  std::vector<worker::v1::StepResult> kept_;  // to change places
  std::string breach_;
};

struct WorldOptions {
  FakeStepOptions device;  // term and epoch are filled in
  absl::Duration latency = absl::Microseconds(200);
  absl::Duration load_time = absl::Seconds(2);
  absl::Duration restart_time = absl::Milliseconds(500);
  absl::Duration collective_timeout = absl::Seconds(30);
  int32_t poison_id = -1;  // a step with this id crashes the last rank
};

class World {
 public:
  World(uint64_t seed, const WorldOptions& options);
  ~World();

  absl::Time now() const { return now_; }
  void At(absl::Duration after, std::function<void()> event);
  // Lets time pass until `done` or for `at_most`.
  void Run(absl::Duration at_most, const std::function<bool()>& done);
  uint64_t Random(uint64_t below) { return random_() % below; }

  // Starts a process at a new address.
  SimWorker* Add();
  SimWorker* Find(const std::string& address);
  const std::vector<std::unique_ptr<SimWorker>>& workers() const { return workers_; }
  // The live process that holds a rank, or null.
  SimWorker* OfRank(int rank);

  // For a GroupCore; its events go to `sink` as time passes. What is under way to the GroupCore
  // before it goes nowhere.
  RankLinkFactory Links(std::function<void(RankEvent)> sink);
  std::unique_ptr<WorkerLauncher> MakeLauncher();

  // Calls `strike` when a worker reaches a point: true keeps the rule.
  using Rule = std::function<bool(SimWorker* worker, Point point, int rank)>;
  void AddRule(Rule rule) { rules_.push_back(std::move(rule)); }

 private:
  friend class SimWorker;
  friend class SimLink;
  friend class SimLauncher;

  void Consult(SimWorker* worker, Point point);
  void ReportExit(const std::string& address, absl::Duration after, bool own_doing);

  std::mt19937_64 random_;
  const WorldOptions options_;
  absl::Time now_ = absl::FromUnixSeconds(1000000);
  uint64_t last_event_ = 0;
  std::map<std::pair<absl::Time, uint64_t>, std::function<void()>> events_;
  std::vector<std::unique_ptr<SimWorker>> workers_;
  std::vector<Rule> rules_;
  std::function<void(RankEvent)> sink_;
  struct OpenLink {
    int32_t link;  // as its group calls it
    std::string address;
    std::shared_ptr<std::set<uint64_t>> calls;  // that wait
  };
  // By a number that no other link has, of whatever coordinator.
  std::map<int32_t, OpenLink> links_;
  int32_t last_link_ = 0;
  int64_t coordinator_ = 0;                 // how many there have been
  std::map<std::string, int32_t> watched_;  // address to link
};

}  // namespace simulation
}  // namespace lockstep
