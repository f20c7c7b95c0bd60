#include "coordinator/simulation/replica.h"

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/hash.h"

namespace lockstep {
namespace simulation {

namespace pb = worker::v1;

namespace {

// How long the engine waits in the transport for a result, at most.
constexpr absl::Duration kTurn = absl::Milliseconds(5);

WorldOptions WithDevice(const ReplicaOptions& options) {
  WorldOptions world = options.world;
  const int32_t vocab_size = world.device.vocab_size;
  world.device = FakeStepOptions();
  world.device.vocab_size = vocab_size;
  world.device.kv_blocks = options.engine.kv_blocks;
  world.device.slots = options.engine.slots;
  world.device.snapshots = options.engine.snapshots;
  world.device.max_batch_tokens = options.engine.max_batch_tokens;
  world.device.max_logit_rows = std::max(options.engine.max_logit_rows, options.engine.slots);
  world.device.snapshot_interval = options.engine.snapshot_interval;
  return world;
}

EngineOptions WithClock(const ReplicaOptions& options, World* world) {
  EngineOptions engine = options.engine;
  engine.clock = [world] { return world->now(); };
  return engine;
}

WorkerGroupOptions GroupOptions(const ReplicaOptions& options, World* world) {
  WorkerGroupOptions group;
  for (int i = 0; i < options.ranks; ++i) group.addresses.push_back(world->Add()->address());
  for (int i = 0; i < options.spares; ++i) group.spares.push_back(world->Add()->address());
  group.model_path = "/model";
  group.recover = true;
  group.prefer_spares = options.prefer_spares;
  group.recovery_budget = options.recovery_budget;
  return group;
}

}  // namespace

// What WorkerGroup is in production: feeds the core, here as the world's time passes.
class Replica::Transport : public StepTransport {
 public:
  explicit Transport(Replica* replica) : replica_(replica) {}

  absl::Status Send(const pb::StepRequest& request) override {
    if (!InEpoch()) return core().status();
    core().Send(request, replica_->world_.now());
    return absl::OkStatus();
  }
  absl::StatusOr<pb::StepResult> Receive(absl::Time) override {
    absl::optional<pb::StepResult> result;
    const auto broken = [this] {
      return !InEpoch() && core().phase() != GroupCore::Phase::kAborting;
    };
    Pump([&] {
      if (!result && InEpoch()) result = core().TakeResult(replica_->world_.now());
      return result.has_value() || broken() || woken_;
    });
    if (result) {
      if (!taken_.insert({result->epoch(), result->step_id()}).second) {
        breach_ = absl::StrCat("step ", result->step_id(), " of epoch ", result->epoch(),
                               " was taken twice");
      }
      if (result->epoch() != core().epoch()) breach_ = "a result of another epoch was taken";
      return *std::move(result);
    }
    if (broken()) return core().status();
    woken_ = false;
    return absl::DeadlineExceededError("nothing yet");
  }
  void Wake() override { woken_ = true; }
  absl::StatusOr<StepEpoch> AwaitEpoch(absl::Time) override {
    Pump([this] {
      return core().phase() == GroupCore::Phase::kRunning ||
             core().phase() == GroupCore::Phase::kBroken || woken_;
    });
    woken_ = false;
    if (core().phase() == GroupCore::Phase::kRunning) {
      epoch_ = core().epoch();
      return StepEpoch{core().term(), epoch_};
    }
    if (core().phase() == GroupCore::Phase::kBroken) return core().status();
    return absl::DeadlineExceededError("not yet");
  }
  void Distrust(const absl::Status& status) override {
    core().Distrust(status, replica_->world_.now());
  }
  Fault last_fault() const override { return replica_->group_.last_fault(); }
  void OnReplayed(int64_t requests, int64_t tokens) override {
    if (replica_->faults_.empty()) return;
    replica_->faults_.back().requests_replayed = requests;
    replica_->faults_.back().tokens_recomputed = tokens;
  }

  void Pump(const std::function<bool()>& done) { Pump(kTurn, done); }
  void Pump(absl::Duration at_most, const std::function<bool()>& done) {
    World& world = replica_->world_;
    const absl::Time end = world.now() + at_most;
    while (!done() && world.now() < end) {
      const absl::Time next = std::min(end, core().next_time());
      world.Run(std::max(absl::ZeroDuration(), next - world.now()), done);
      if (!done() && world.now() >= core().next_time()) core().OnTime(world.now());
    }
  }
  void KnowEpoch() { epoch_ = core().epoch(); }
  const std::string& breach() const { return breach_; }

 private:
  GroupCore& core() { return replica_->group_; }
  bool InEpoch() {
    return core().phase() == GroupCore::Phase::kRunning && core().epoch() == epoch_;
  }

  Replica* const replica_;
  uint64_t epoch_ = 0;
  bool woken_ = false;
  std::set<std::pair<uint64_t, uint64_t>> taken_;
  std::string breach_;
};

Replica::Replica(uint64_t seed, const ReplicaOptions& options)
    : options_(options),
      world_(seed, WithDevice(options)),
      launcher_(options.launcher ? world_.MakeLauncher(nullptr) : nullptr),
      transport_(std::make_unique<Transport>(this)),
      group_(GroupOptions(options, &world_), world_.Links([this](RankEvent event) {
        group_.OnEvent(std::move(event), world_.now());
      }),
             launcher_.get(),
             {nullptr, nullptr,
              [this](const FaultRecord& record) {
                const bool known =
                    !faults_.empty() && faults_.back().epoch_before == record.epoch_before;
                if (known) {
                  faults_.back() = record;
                } else {
                  faults_.push_back(record);
                }
              }}),
      engine_(WithClock(options, &world_), transport_.get(), nullptr) {}

Replica::~Replica() { engine_.Stop(absl::OkStatus()); }

bool Replica::Start() {
  group_.StartLoad(1, world_.now());
  transport_->Pump(absl::Hours(1), [this] { return group_.phase() != GroupCore::Phase::kLoading; });
  if (group_.phase() != GroupCore::Phase::kLoaded) return false;
  group_.StartJoin(1, pb::ConfigureRequest(), world_.now());
  transport_->Pump(absl::Hours(1), [this] {
    return group_.phase() == GroupCore::Phase::kRunning ||
           group_.phase() == GroupCore::Phase::kBroken;
  });
  if (group_.phase() != GroupCore::Phase::kRunning) return false;
  transport_->KnowEpoch();
  engine_.StartWithoutThread(group_.term(), group_.epoch());
  return true;
}

void Replica::Submit(absl::Duration after, const GenerationSpec& spec) {
  const size_t index = outcomes_.size();
  outcomes_.emplace_back();
  outcomes_.back().spec = spec;
  ++to_come_;
  world_.At(after, [this, index] {
    --to_come_;
    Outcome& outcome = outcomes_[index];
    outcome.sink = std::make_shared<testing::RecordingSink>(outcome.spec.n);
    outcome.refused = engine_.Submit(outcome.spec, outcome.sink);
  });
}

void Replica::Cancel(absl::Duration after, const std::string& id) {
  world_.At(after, [this, id] {
    for (Outcome& outcome : outcomes_) {
      if (outcome.spec.request_id == id) outcome.cancelled = true;
    }
    engine_.Cancel(id, absl::CancelledError("by the simulation"));
  });
}

bool Replica::RunToEnd(absl::Duration limit) {
  const absl::Time end = world_.now() + limit;
  while (to_come_ > 0 || !engine_.idle()) {
    if (world_.now() >= end) return false;
    engine_.RunOnce();
    if (group_.phase() == GroupCore::Phase::kBroken && to_come_ > 0) {
      world_.Run(kTurn, [] { return false; });
    }
  }
  // What is under way goes on for a while: nothing may come of it.
  for (int i = 0; i < 20; ++i) engine_.RunOnce();
  return true;
}

std::string Replica::Breach() const {
  if (!transport_->breach().empty()) return transport_->breach();
  for (const auto& worker : world_.workers()) {
    if (!worker->breach().empty()) return absl::StrCat(worker->address(), ": ", worker->breach());
  }
  for (const Outcome& outcome : outcomes_) {
    if (!outcome.refused.ok()) continue;
    const std::string& id = outcome.spec.request_id;
    if (outcome.sink == nullptr || !outcome.sink->done()) return absl::StrCat(id, " has not ended");
    if (!outcome.sink->breach().empty()) return absl::StrCat(id, ": ", outcome.sink->breach());
    for (int32_t i = 0; i < outcome.spec.n; ++i) {
      if (outcome.sink->status().ok()) {
        const std::string difference = testing::Difference(*outcome.sink, outcome.spec, i);
        if (!difference.empty()) return absl::StrCat(id, " output ", i, ": ", difference);
        continue;
      }
      // What was shown before the end is a prefix of the undisturbed run.
      const auto shown = outcome.sink->output(i).ids;
      const auto wanted = testing::EngineFixture::Expect(outcome.spec, i).ids;
      if (shown.size() > wanted.size() || !std::equal(shown.begin(), shown.end(), wanted.begin())) {
        return absl::StrCat(id, " output ", i, ": what was shown is not what would have been");
      }
    }
  }
  return testing::Leaks(engine_);
}

}  // namespace simulation
}  // namespace lockstep
