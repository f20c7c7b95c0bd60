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
  Fault last_fault() const override { return replica_->group_->last_fault(); }
  void OnReplayed(int64_t requests, int64_t tokens) override {
    core().OnReplayed(requests, tokens, replica_->world_.now());
  }

  void Pump(const std::function<bool()>& done) { Pump(kTurn, done); }
  void Pump(absl::Duration at_most, const std::function<bool()>& done) {
    World& world = replica_->world_;
    const absl::Time end = world.now() + at_most;
    while (!done() && world.now() < end) {
      const absl::Time next = std::min(end, core().next_time());
      world.Run(std::max(absl::ZeroDuration(), next - world.now()),
                [&] { return done() || core().next_time() < next; });
      if (!done() && world.now() >= core().next_time()) core().OnTime(world.now());
    }
  }
  void KnowEpoch() { epoch_ = core().epoch(); }
  const std::string& breach() const { return breach_; }

 private:
  GroupCore& core() { return *replica_->group_; }
  bool InEpoch() {
    return core().phase() == GroupCore::Phase::kRunning && core().epoch() == epoch_;
  }

  Replica* const replica_;
  uint64_t epoch_ = 0;
  bool woken_ = false;
  std::set<std::pair<uint64_t, uint64_t>> taken_;
  std::string breach_;
};

// Keeps what a journal would, and passes everything on until it is cut off.
class Replica::Logged : public GenerationSink {
 public:
  Logged(RestoredRequest kept, std::shared_ptr<testing::RecordingSink> sink)
      : sink_(std::move(sink)), kept_(std::move(kept)), accepted_(kept_.spec.n) {}
  Logged(const GenerationSpec& spec, absl::Time submitted,
         std::shared_ptr<testing::RecordingSink> sink)
      : sink_(std::move(sink)) {
    kept_.spec = spec;
    kept_.submitted = submitted;
    kept_.outputs.resize(static_cast<size_t>(spec.n));
  }
  void OnToken(int32_t output, uint64_t digest, const pb::SequenceResult& result) override {
    if (cut_) return;
    RestoredRequest::Output& log = kept_.outputs[static_cast<size_t>(output)];
    log.ids.push_back(result.sampled_id());
    log.digests.push_back(digest);
    log.logprobs.emplace_back();
  }
  void OnEvent(inference::v1::GenerateEvent event) override {
    if (cut_) return;
    if (event.has_accepted()) {
      kept_.accepted = event.accepted();
      ++accepted_;
    }
    if (event.has_finished()) {
      kept_.outputs[static_cast<size_t>(event.output_index())].finished = event.finished();
    }
    sink_->OnEvent(std::move(event));
  }
  void OnDone(const absl::Status& status) override {
    if (cut_) return;
    ended_ = true;
    sink_->OnDone(status);
  }
  void Cut() { cut_ = true; }
  bool ended() const { return ended_; }
  // Every output was acknowledged: the client counts on it.
  bool accepted() const { return accepted_ == kept_.spec.n; }
  const RestoredRequest& kept() const { return kept_; }

 private:
  const std::shared_ptr<testing::RecordingSink> sink_;
  RestoredRequest kept_;
  int32_t accepted_ = 0;
  bool cut_ = false;
  bool ended_ = false;
};

namespace {

// Takes the events that were shown before.
class Nowhere : public GenerationSink {
 public:
  void OnEvent(inference::v1::GenerateEvent) override {}
  void OnDone(const absl::Status&) override {}
};

}  // namespace

Replica::Replica(uint64_t seed, const ReplicaOptions& options)
    : options_(options),
      world_(seed, WithDevice(options)),
      launcher_(options.launcher ? world_.MakeLauncher() : nullptr),
      transport_(std::make_unique<Transport>(this)),
      group_options_(GroupOptions(options, &world_)) {
  MakeCoordinator();
}

Replica::~Replica() {
  if (engine_ != nullptr) engine_->Stop(absl::OkStatus());
}

void Replica::MakeCoordinator() {
  transport_ = std::make_unique<Transport>(this);
  RankLinkFactory links = world_.Links([this](RankEvent event) {
    if (group_ != nullptr) group_->OnEvent(std::move(event), world_.now());
  });
  GroupCore::Hooks hooks;
  hooks.on_fault = [this](const FaultRecord& record) {
    const bool known = !faults_.empty() && faults_.back().epoch_before == record.epoch_before;
    if (known) {
      faults_.back() = record;
    } else {
      faults_.push_back(record);
    }
  };
  group_ = std::make_unique<GroupCore>(group_options_, std::move(links), launcher_.get(),
                                       std::move(hooks));
  engine_ = std::make_unique<Engine>(WithClock(options_, &world_), transport_.get(), nullptr);
}

bool Replica::Start() {
  group_->StartLoad(1, world_.now());
  transport_->Pump(absl::Hours(1),
                   [this] { return group_->phase() != GroupCore::Phase::kLoading; });
  if (group_->phase() != GroupCore::Phase::kLoaded) return false;
  group_->StartJoin(1, pb::ConfigureRequest(), world_.now());
  transport_->Pump(absl::Hours(1), [this] {
    return group_->phase() == GroupCore::Phase::kRunning ||
           group_->phase() == GroupCore::Phase::kBroken;
  });
  if (group_->phase() != GroupCore::Phase::kRunning) return false;
  transport_->KnowEpoch();
  for (Outcome& outcome : outcomes_) {
    if (outcome.logged == nullptr || outcome.logged->ended()) continue;
    // The log goes on where it was cut.
    const RestoredRequest kept = outcome.logged->kept();
    if (!outcome.logged->accepted()) {  // the client asks again
      outcome.sink = std::make_shared<testing::RecordingSink>(outcome.spec.n);
      outcome.logged = std::make_shared<Logged>(outcome.spec, world_.now(), outcome.sink);
      outcome.refused = engine_->Submit(outcome.spec, outcome.logged);
      continue;
    }
    outcome.logged = std::make_shared<Logged>(kept, outcome.sink);
    Nowhere nowhere;
    engine_->Restore(kept, &nowhere, outcome.logged);
  }
  engine_->StartWithoutThread(group_->term(), group_->epoch());
  serving_ = true;
  return true;
}

bool Replica::RestartCoordinator() {
  serving_ = false;
  for (Outcome& outcome : outcomes_) {
    if (outcome.logged != nullptr && !outcome.logged->ended()) outcome.logged->Cut();
  }
  // Where the ranks are now: the next coordinator is told, as by a state folder.
  for (int rank = 0; rank < group_->world(); ++rank) {
    group_options_.addresses[static_cast<size_t>(rank)] =
        group_->members()[static_cast<size_t>(rank)].address;
  }
  group_options_.spares.clear();
  for (const GroupCore::MemberView& spare : group_->spares()) {
    group_options_.spares.push_back(spare.address);
  }
  engine_->Stop(absl::OkStatus());
  engine_.reset();
  group_.reset();
  MakeCoordinator();
  return Start();
}

void Replica::Submit(absl::Duration after, const GenerationSpec& spec) {
  const size_t index = outcomes_.size();
  outcomes_.emplace_back();
  outcomes_.back().spec = spec;
  ++to_come_;
  world_.At(after, [this, index] { Arrive(index); });
}

void Replica::Arrive(size_t index) {
  if (!serving_) {  // the client asks again
    world_.At(absl::Milliseconds(50), [this, index] { Arrive(index); });
    return;
  }
  --to_come_;
  Outcome& outcome = outcomes_[index];
  outcome.sink = std::make_shared<testing::RecordingSink>(outcome.spec.n);
  outcome.logged = std::make_shared<Logged>(outcome.spec, world_.now(), outcome.sink);
  outcome.refused = engine_->Submit(outcome.spec, outcome.logged);
}

void Replica::Cancel(absl::Duration after, const std::string& id) {
  world_.At(after, [this, id] {
    for (Outcome& outcome : outcomes_) {
      if (outcome.spec.request_id == id) outcome.cancelled = true;
    }
    engine_->Cancel(id, absl::CancelledError("by the simulation"));
  });
}

void Replica::KillCoordinator(absl::Duration after) {
  world_.At(after, [this] { kill_coordinator_ = true; });
}

bool Replica::RunToEnd(absl::Duration limit) {
  const absl::Time end = world_.now() + limit;
  while (to_come_ > 0 || !engine_->idle()) {
    if (world_.now() >= end) return false;
    if (kill_coordinator_) {
      kill_coordinator_ = false;
      // One that cannot load ends, and its supervisor starts the next.
      bool started = false;
      for (int attempt = 0; attempt < 5 && !started; ++attempt) {
        ++coordinators_;
        started = RestartCoordinator();
      }
      if (!started) return false;
    }
    engine_->RunOnce();
    if (group_->phase() == GroupCore::Phase::kBroken && to_come_ > 0) {
      world_.Run(kTurn, [] { return false; });
    }
  }
  // What is under way goes on for a while: nothing may come of it.
  for (int i = 0; i < 20 && group_->phase() != GroupCore::Phase::kBroken; ++i) engine_->RunOnce();
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
  return testing::Leaks(*engine_);
}

}  // namespace simulation
}  // namespace lockstep
