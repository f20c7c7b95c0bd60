#include "coordinator/simulation/world.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

namespace lockstep {
namespace simulation {

namespace pb = worker::v1;

namespace {

constexpr absl::Duration kStepTime = absl::Milliseconds(3);
constexpr absl::Duration kStopTime = absl::Seconds(20);
constexpr absl::Duration kLongDelay = absl::Milliseconds(700);

}  // namespace

// ---- links ----

class SimLink : public RankLink {
 public:
  SimLink(World* world, std::string address, int32_t link)
      : world_(world), address_(std::move(address)), link_(++world->last_link_) {
    world_->links_[link_] = {link, address_, open_};
  }
  ~SimLink() override {
    CloseStream(stream_, /*orderly=*/false);
    world_->links_.erase(link_);
  }

  void Call(uint64_t id, const RankRequest& request, absl::Duration timeout) override {
    open_->insert(id);
    if (timeout != absl::InfiniteDuration()) {
      world_->At(timeout, [open = open_, world = world_, link = link_, id] {
        Fail(world, link, open.get(), id, absl::DeadlineExceededError("no answer in time"));
      });
    }
    SimWorker* worker = world_->Find(address_);
    if (worker == nullptr || !worker->alive()) {
      world_->At(world_->options_.latency, [open = open_, world = world_, link = link_, id] {
        Fail(world, link, open.get(), id, absl::UnavailableError("connection refused"));
      });
      return;
    }
    world_->At(world_->options_.latency,
               [this_world = world_, address = address_, link = link_, id, request] {
                 SimWorker* to = this_world->Find(address);
                 if (to != nullptr) to->Answer(link, id, request);
               });
  }
  void CancelCalls() override {
    for (const uint64_t id : *open_) {
      world_->At(absl::ZeroDuration(), [open = open_, world = world_, link = link_, id] {
        Fail(world, link, open.get(), id, absl::CancelledError("cancelled"));
      });
    }
  }
  void OpenStream(uint64_t id) override {
    stream_ = id;
    world_->At(world_->options_.latency, [world = world_, address = address_, link = link_, id] {
      SimWorker* to = world->Find(address);
      if (to != nullptr && to->alive()) return to->OpenStream(link, id);
      RankEvent event;
      event.id = id;
      event.kind = RankEvent::Kind::kStreamEnded;
      event.status = absl::UnavailableError("connection refused");
      const auto to_link = world->links_.find(link);
      if (to_link == world->links_.end()) return;
      event.link = to_link->second.link;
      world->sink_(std::move(event));
    });
  }
  void Write(uint64_t id, const pb::StepRequest& request) override {
    world_->At(world_->options_.latency, [world = world_, address = address_, id, request] {
      SimWorker* to = world->Find(address);
      if (to != nullptr) to->OnStep(id, request);
    });
  }
  void CloseStream(uint64_t id, bool orderly) override {
    if (id == 0 || id != stream_) return;
    world_->At(world_->options_.latency, [world = world_, address = address_, id, orderly] {
      SimWorker* to = world->Find(address);
      if (to == nullptr || !to->alive_ || to->stream_ != id) return;
      to->LeaveGroup(orderly ? absl::OkStatus() : absl::CancelledError("the stream broke"));
    });
  }

 private:
  static void Fail(World* world, int32_t link, std::set<uint64_t>* open, uint64_t id,
                   const absl::Status& status) {
    const auto to_link = world->links_.find(link);
    if (open->erase(id) == 0 || to_link == world->links_.end()) return;
    RankEvent event;
    event.link = to_link->second.link;
    event.id = id;
    event.kind = RankEvent::Kind::kAnswer;
    event.status = status;
    world->sink_(std::move(event));
  }

  World* const world_;
  const std::string address_;
  const int32_t link_;
  const std::shared_ptr<std::set<uint64_t>> open_ = std::make_shared<std::set<uint64_t>>();
  uint64_t stream_ = 0;
};

class SimLauncher : public WorkerLauncher {
 public:
  explicit SimLauncher(World* world) : world_(world) {}
  bool Watch(const std::string& address, int32_t link) override {
    world_->watched_[address] = link;
    const SimWorker* worker = world_->Find(address);
    if (worker == nullptr || !worker->alive()) {
      world_->ReportExit(address, absl::Milliseconds(1), /*own_doing=*/false);
    }
    return true;
  }
  bool Kill(const std::string& address) override {
    world_->watched_.erase(address);
    SimWorker* worker = world_->Find(address);
    if (worker != nullptr && worker->alive()) worker->Strike(FaultKind::kKill);
    return true;
  }
  bool Restart(const std::string& address, int32_t link) override {
    Kill(address);
    world_->At(world_->options_.restart_time,
               [world = world_, link, coordinator = world_->coordinator_] {
                 if (coordinator != world->coordinator_) return;  // the launcher ended with it
                 SimWorker* worker = world->Add();
                 world->watched_[worker->address()] = link;
                 RankEvent event;
                 event.link = link;
                 event.kind = RankEvent::Kind::kProcessStarted;
                 event.payload = ProcessStart{worker->address()};
                 world->sink_(std::move(event));
               });
    return true;
  }

 private:
  World* const world_;
};

// ---- the world ----

World::World(uint64_t seed, const WorldOptions& options) : random_(seed), options_(options) {}
World::~World() = default;

void World::At(absl::Duration after, std::function<void()> event) {
  events_.emplace(std::make_pair(now_ + after, ++last_event_), std::move(event));
}

void World::Run(absl::Duration at_most, const std::function<bool()>& done) {
  const absl::Time end = now_ + at_most;
  while (!done()) {
    if (events_.empty() || events_.begin()->first.first > end) {
      now_ = end;
      return;
    }
    now_ = std::max(now_, events_.begin()->first.first);
    const std::function<void()> event = std::move(events_.begin()->second);
    events_.erase(events_.begin());
    event();
  }
}

SimWorker* World::Add() {
  workers_.push_back(
      std::make_unique<SimWorker>(this, absl::StrCat("worker:", workers_.size() + 1)));
  return workers_.back().get();
}

SimWorker* World::Find(const std::string& address) {
  for (const auto& worker : workers_) {
    if (worker->address() == address) return worker.get();
  }
  return nullptr;
}

SimWorker* World::OfRank(int rank) {
  SimWorker* found = nullptr;
  for (const auto& worker : workers_) {
    if (worker->alive_ && worker->rank_ == rank) found = worker.get();
  }
  return found;
}

RankLinkFactory World::Links(std::function<void(RankEvent)> sink) {
  sink_ = std::move(sink);
  watched_.clear();
  ++coordinator_;
  return [this](const std::string& address, int32_t link) {
    return std::make_unique<SimLink>(this, address, link);
  };
}

std::unique_ptr<WorkerLauncher> World::MakeLauncher() {
  return std::make_unique<SimLauncher>(this);
}

void World::Consult(SimWorker* worker, Point point) {
  for (size_t i = 0; i < rules_.size();) {
    if (rules_[i](worker, point, worker->rank_)) {
      ++i;
    } else {
      rules_.erase(rules_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (!worker->alive_) return;
  }
}

// ---- a worker ----

SimWorker::SimWorker(World* world, std::string address)
    : world_(world), address_(std::move(address)), incarnation_(world->random_() | 1) {}

pb::Identity SimWorker::Identity() const {
  pb::Identity id;
  id.set_worker_id(address_);
  id.set_incarnation(incarnation_);
  id.set_rank(rank_);
  id.set_world(world_size_);
  id.set_model_digest(state_ == pb::NEW ? 0 : 7);
  id.set_term(term_);
  id.set_epoch(epoch_);
  return id;
}

void SimWorker::Post(int32_t link, RankEvent event) {
  event.link = link;
  absl::Duration delay = world_->options_.latency + delay_;
  delay_ = absl::ZeroDuration();
  if (event.kind != RankEvent::Kind::kAnswer) {  // a stream keeps its order
    delay = std::max(delay, last_of_stream_ - world_->now());
    last_of_stream_ = world_->now() + delay;
  }
  world_->At(delay, [world = world_, event = std::move(event)]() mutable {
    const auto to_link = world->links_.find(event.link);
    if (to_link == world->links_.end()) return;
    // Answers of calls that are not open any more go nowhere.
    if (event.kind == RankEvent::Kind::kAnswer && to_link->second.calls->erase(event.id) == 0) {
      return;
    }
    event.link = to_link->second.link;
    world->sink_(std::move(event));
  });
}

absl::Status SimWorker::Fence(const pb::Identity& asked) {
  if (asked.term() < term_) {
    return absl::FailedPreconditionError(
        absl::StrCat("STALE_TERM: term ", asked.term(), " was sent, term ", term_, " was seen"));
  }
  if (asked.epoch() < epoch_) {
    return absl::FailedPreconditionError(absl::StrCat("STALE_EPOCH: epoch ", asked.epoch(),
                                                      " was sent, epoch ", epoch_, " was seen"));
  }
  term_ = asked.term();
  return absl::OkStatus();
}

bool SimWorker::StrikeAt(Point point) {
  world_->Consult(this, point);
  const bool fails = no_memory_;
  no_memory_ = false;
  return fails;
}

void SimWorker::Answer(int32_t link, uint64_t id, const RankRequest& request) {
  if (!alive_) return;  // the connection broke: the caller's bound ends the call
  if (stopped_) {
    held_.push_back([this, link, id, request] { Answer(link, id, request); });
    return;
  }
  RankEvent event;
  event.id = id;
  event.kind = RankEvent::Kind::kAnswer;
  pb::Identity asked;
  asked.set_term(term_);
  asked.set_epoch(epoch_);
  const absl::Status no_memory = absl::ResourceExhaustedError("out of memory");
  if (absl::holds_alternative<pb::GetInfoRequest>(request)) {
    pb::GetInfoResponse response;
    *response.mutable_identity() = Identity();
    response.set_state(state_);
    event.payload = std::move(response);
  } else if (const auto* beat = absl::get_if<pb::HealthRequest>(&request)) {
    asked.set_term(beat->term());
    event.status = Fence(asked);
    pb::HealthResponse response;
    *response.mutable_identity() = Identity();
    response.set_state(state_);
    response.set_error(error_);
    response.set_device_lost(device_lost_);
    event.payload = std::move(response);
  } else if (const auto* load = absl::get_if<pb::LoadModelRequest>(&request)) {
    asked.set_term(load->term());
    event.status = Fence(asked);
    if (event.status.ok() && device_lost_) {
      event.status = absl::FailedPreconditionError("DEVICE_LOST: restart the process");
    } else if (event.status.ok() && state_ == pb::NEW) {
      rank_ = load->rank();
      world_size_ = load->world();
      state_ = pb::LOADING;
      const bool fails = StrikeAt(Point::kLoad);
      if (!alive_) return;
      if (fails) {
        state_ = pb::NEW;
        event.status = no_memory;
      } else {
        world_->At(world_->options_.load_time, [this, link, id, request] {
          if (!alive_) return;
          if (state_ == pb::LOADING) state_ = pb::LOADED;
          Answer(link, id, request);
        });
        return;
      }
    } else if (event.status.ok() && state_ == pb::LOADING) {
      world_->At(world_->options_.load_time, [this, link, id, request] {
        if (state_ == pb::LOADING) state_ = pb::LOADED;
        Answer(link, id, request);
      });
      return;
    }
    pb::LoadModelResult result;
    result.set_architecture("fake");
    result.set_vocab_size(world_->options_.device.vocab_size);
    *result.mutable_identity() = Identity();
    event.payload = std::move(result);
  } else if (const auto* prepare = absl::get_if<pb::PrepareCommRequest>(&request)) {
    asked.set_term(prepare->term());
    asked.set_epoch(prepare->epoch());
    event.status = Fence(asked);
    if (event.status.ok() && prepare->epoch() == epoch_) {
      event.status = absl::FailedPreconditionError("STALE_EPOCH: already prepared");
    }
    if (event.status.ok()) {
      const bool fails = StrikeAt(Point::kPrepare);
      if (!alive_) return;
      LeaveGroup(absl::AbortedError("a new epoch begins"));
      epoch_ = prepare->epoch();
      state_ = pb::COMM_INIT;
      error_.clear();
      if (fails) event.status = no_memory;
    }
    pb::PrepareCommResponse response;
    *response.mutable_identity() = Identity();
    response.set_address(absl::StrCat(address_, "#", epoch_, "#", incarnation_));
    event.payload = std::move(response);
  } else if (const auto* init = absl::get_if<pb::InitCommRequest>(&request)) {
    asked.set_term(init->term());
    asked.set_epoch(init->epoch());
    event.status = Fence(asked);
    if (event.status.ok() && (init->epoch() != epoch_ || state_ != pb::COMM_INIT)) {
      event.status = absl::FailedPreconditionError("InitComm in the wrong state");
    }
    if (event.status.ok()) {
      const bool fails = StrikeAt(Point::kInit);
      if (!alive_) return;
      if (stopped_)
        return held_.push_back([this, link, id, request] { Answer(link, id, request); });
      if (fails) {
        event.status = no_memory;
      } else {
        // Ends when every rank of this epoch is here.
        init_ = {link, id};
        std::vector<SimWorker*> here;
        for (const std::string& peer : init->addresses()) {
          for (const auto& worker : world_->workers_) {
            const bool is =
                peer == absl::StrCat(worker->address_, "#", epoch_, "#", worker->incarnation_);
            if (is && worker->alive_ && worker->epoch_ == epoch_ && worker->init_.second != 0) {
              here.push_back(worker.get());
            }
          }
        }
        if (static_cast<int>(here.size()) < world_size_) {
          world_->At(absl::Milliseconds(init->timeout_ms()), [this, link, id] {
            if (!alive_ || init_ != std::make_pair(link, id)) return;
            init_ = {0, 0};
            RankEvent late;
            late.id = id;
            late.status = absl::DeadlineExceededError("a peer did not come");
            Post(link, std::move(late));
          });
          return;
        }
        for (SimWorker* worker : here) {
          RankEvent joined;
          joined.id = worker->init_.second;
          pb::InitCommResponse response;
          *response.mutable_identity() = worker->Identity();
          response.set_self_test(42);
          joined.payload = std::move(response);
          const int32_t to = worker->init_.first;
          worker->init_ = {0, 0};
          worker->state_ = pb::JOINED;
          worker->Post(to, std::move(joined));
        }
        return;
      }
    }
  } else if (const auto* configure = absl::get_if<pb::ConfigureRequest>(&request)) {
    asked.set_term(configure->term());
    asked.set_epoch(configure->epoch());
    event.status = Fence(asked);
    if (event.status.ok() && (configure->epoch() != epoch_ || state_ != pb::JOINED)) {
      event.status = absl::FailedPreconditionError("Configure in the wrong state");
    }
    if (event.status.ok()) {
      FakeStepOptions options = world_->options_.device;
      options.term = term_;
      options.epoch = epoch_;
      device_ = std::make_unique<FakeStepTransport>(options);
      state_ = pb::READY;
    }
    pb::ConfigureResponse response;
    *response.mutable_identity() = Identity();
    event.payload = std::move(response);
  } else if (const auto* abort = absl::get_if<pb::AbortCommRequest>(&request)) {
    asked.set_term(abort->term());
    asked.set_epoch(abort->epoch());
    event.status = Fence(asked);
    if (event.status.ok() && abort->epoch() == epoch_) {
      LeaveGroup(absl::AbortedError(abort->reason()));
      if (state_ != pb::NEW && state_ != pb::LOADING) state_ = pb::FAILED;
    }
    pb::AbortCommResponse response;
    *response.mutable_identity() = Identity();
    event.payload = std::move(response);
  }
  Post(link, std::move(event));
}

void SimWorker::OpenStream(int32_t link, uint64_t id) {
  if (stopped_) return held_.push_back([this, link, id] { OpenStream(link, id); });
  if (!alive_) return;
  if (state_ != pb::READY || stream_ != 0) {
    RankEvent event;
    event.id = id;
    event.kind = RankEvent::Kind::kStreamEnded;
    event.status = absl::FailedPreconditionError("StepStream in the wrong state");
    return Post(link, std::move(event));
  }
  stream_link_ = link;
  stream_ = id;
}

void SimWorker::OnStep(uint64_t stream, const pb::StepRequest& request) {
  if (!alive_) return;
  if (stopped_) return held_.push_back([this, stream, request] { OnStep(stream, request); });
  if (stream == 0 || stream != stream_) return;
  if (request.term() != term_ || request.epoch() != epoch_) {
    breach_ =
        absl::StrCat("a step of epoch ", request.epoch(), " reached a stream of epoch ", epoch_);
    return;
  }
  pb::StepPlan plan;
  CHECK(plan.ParseFromString(request.plan()));
  bool decodes = false, prefills = false, poison = false;
  for (const pb::SequenceEntry& entry : plan.sequences()) {
    (entry.sampled_in_step() != 0 ? decodes : prefills) = true;
    for (const int32_t id : entry.token_ids()) poison = poison || id == world_->options_.poison_id;
  }
  if (poison && rank_ == world_size_ - 1) return Strike(FaultKind::kCrash);
  bool fails = false;
  if (prefills) fails = StrikeAt(Point::kPrefill);
  if (alive_ && decodes) fails = StrikeAt(Point::kDecode) || fails;
  if (!alive_ || stream_ == 0) return;
  if (stopped_) return held_.push_back([this, stream, request] { OnStep(stream, request); });
  if (fails) {
    EndStream(absl::ResourceExhaustedError("out of memory in a step"));
    return BreakGroup(absl::AbortedError("a peer left the group"));
  }
  // The plan is applied now, and the result waits for the others.
  const absl::Status sent = device_->Send(request);
  if (!sent.ok()) {
    if (breach_.empty()) breach_ = std::string(sent.message());
    return EndStream(sent);
  }
  auto result = device_->Receive(absl::InfinitePast());
  CHECK(result.ok()) << result.status();
  Step& step = steps_[request.step_id()];
  step.request = request;
  step.result = *std::move(result);
  // Every rank has it: it ends on all of them.
  std::vector<SimWorker*> group;
  for (const auto& worker : world_->workers_) {
    if (worker->epoch_ == epoch_ && worker->alive_ &&
        worker->steps_.count(request.step_id()) != 0) {
      group.push_back(worker.get());
    }
  }
  if (static_cast<int>(group.size()) < world_size_) return;
  for (SimWorker* worker : group) {
    const uint64_t id = request.step_id();
    const uint64_t on = worker->stream_;
    world_->At(kStepTime + absl::Microseconds(world_->Random(500)),
               [worker, on, id] { worker->FinishStep(on, id); });
  }
}

void SimWorker::FinishStep(uint64_t stream, uint64_t step) {
  if (!alive_ || stream != stream_) return;
  if (stopped_) return held_.push_back([this, stream, step] { FinishStep(stream, step); });
  const auto found = steps_.find(step);
  if (found == steps_.end()) return;
  // Results leave in the order of steps.
  if (found != steps_.begin()) {
    world_->At(absl::Microseconds(100), [this, stream, step] { FinishStep(stream, step); });
    return;
  }
  StrikeAt(Point::kResult);
  if (!alive_ || stream != stream_) return;
  if (stopped_) return held_.push_back([this, stream, step] { FinishStep(stream, step); });
  pb::StepResult result = std::move(found->second.result);
  steps_.erase(found);
  if (corrupt_) {
    // In what it reports, or in what its digest says.
    if (world_->Random(2) == 0 && result.sequences_size() > 0 && rank_ == 0) {
      result.mutable_sequences(0)->set_sampled_id(result.sequences(0).sampled_id() + 1);
    } else {
      result.set_result_digest(result.result_digest() + 1);
    }
    corrupt_ = false;
  }
  if (reorder_) {
    kept_.insert(kept_.begin(), result);
    if (kept_.size() < 2) return;
    reorder_ = false;
    for (pb::StepResult& kept : kept_) SendResult(std::move(kept));
    kept_.clear();
    return;
  }
  if (duplicate_) {
    duplicate_ = false;
    SendResult(result);
  }
  SendResult(std::move(result));
}

void SimWorker::SendResult(pb::StepResult result) {
  RankEvent event;
  event.id = stream_;
  event.kind = RankEvent::Kind::kStepResult;
  event.payload = std::move(result);
  Post(stream_link_, std::move(event));
}

// The worker ends the stream.
void SimWorker::EndStream(const absl::Status& status) {
  if (stream_ == 0) return;
  RankEvent event;
  event.id = stream_;
  event.kind = RankEvent::Kind::kStreamEnded;
  event.status = status;
  Post(stream_link_, std::move(event));
  LeaveGroup(status);
}

// Ends its part in the group, weights kept.
void SimWorker::LeaveGroup(const absl::Status& why) {
  if (init_.second != 0) {
    RankEvent event;
    event.id = init_.second;
    event.status = absl::AbortedError(std::string(why.message()));
    const int32_t link = init_.first;
    init_ = {0, 0};
    Post(link, std::move(event));
  }
  if (stream_ != 0) {
    RankEvent event;
    event.id = stream_;
    event.kind = RankEvent::Kind::kStreamEnded;
    event.status = why;
    Post(stream_link_, std::move(event));
  }
  stream_ = 0;
  steps_.clear();
  kept_.clear();
  duplicate_ = corrupt_ = reorder_ = false;
  if (device_ != nullptr && breach_.empty() && !device_->error().ok()) {
    breach_ = std::string(device_->error().message());
  }
  device_.reset();
  if (state_ != pb::NEW && state_ != pb::LOADING) {
    state_ = why.ok() ? pb::LOADED : pb::FAILED;
    error_ = std::string(why.message());
  }
}

// The others in its group meet its absence in their collectives.
void SimWorker::BreakGroup(const absl::Status& why) {
  for (const auto& worker : world_->workers_) {
    if (worker.get() == this || worker->epoch_ != epoch_ || worker->stream_ == 0) continue;
    world_->At(world_->options_.latency, [peer = worker.get(), epoch = epoch_, why] {
      if (peer->alive_ && peer->epoch_ == epoch && !peer->steps_.empty()) peer->EndStream(why);
    });
  }
}

void SimWorker::Die(bool own_doing) {
  if (!alive_) return;
  alive_ = false;
  held_.clear();
  const absl::Status broken = absl::UnavailableError("connection reset");
  if (stream_ != 0) {
    RankEvent event;
    event.id = stream_;
    event.kind = RankEvent::Kind::kStreamEnded;
    event.status = broken;
    Post(stream_link_, std::move(event));
  }
  BreakGroup(absl::AbortedError("a peer left the group"));
  stream_ = 0;
  steps_.clear();
  // Calls that wait for it end.
  for (const auto& item : world_->links_) {
    if (item.second.address != address_) continue;
    for (const uint64_t id : *item.second.calls) {
      RankEvent event;
      event.id = id;
      event.status = broken;
      Post(item.first, std::move(event));
    }
  }
  // The launcher notices a moment later than the connection breaks.
  world_->ReportExit(address_, absl::Milliseconds(1 + static_cast<int64_t>(world_->Random(8))),
                     own_doing);
}

void World::ReportExit(const std::string& address, absl::Duration after, bool own_doing) {
  At(after, [this, address, own_doing, coordinator = coordinator_] {
    const auto watched = watched_.find(address);
    if (coordinator != coordinator_ || watched == watched_.end()) return;
    RankEvent event;
    event.link = watched->second;
    event.kind = RankEvent::Kind::kProcessExited;
    event.payload = ProcessExit{own_doing ? "signal 6 (Aborted)" : "signal 9 (Killed)", own_doing};
    watched_.erase(watched);
    sink_(std::move(event));
  });
}

void SimWorker::Strike(FaultKind kind) {
  if (!alive_) return;
  switch (kind) {
    case FaultKind::kKill:
      return Die(/*own_doing=*/false);
    case FaultKind::kCrash:
      return Die(/*own_doing=*/true);
    case FaultKind::kStop:
    case FaultKind::kFreeze:
      stopped_ = true;
      if (kind == FaultKind::kFreeze) return;
      return world_->At(kStopTime, [this] {
        if (!alive_) return;
        stopped_ = false;
        std::vector<std::function<void()>> held;
        held.swap(held_);
        for (const auto& event : held) event();
      });
    case FaultKind::kCut:
      BreakGroup(absl::AbortedError("a peer left the group"));
      return EndStream(absl::UnavailableError("connection reset"));
    case FaultKind::kDelay:
      delay_ = kLongDelay;
      return;
    case FaultKind::kDuplicate:
      duplicate_ = true;
      return;
    case FaultKind::kCorrupt:
      corrupt_ = true;
      return;
    case FaultKind::kReorder:
      reorder_ = true;
      return;
    case FaultKind::kNoMemory:
      no_memory_ = true;
      return;
    case FaultKind::kDeviceLost:
      device_lost_ = true;
      BreakGroup(absl::AbortedError("a peer left the group"));
      return EndStream(absl::UnavailableError("DEVICE_LOST: restart the process"));
  }
}

}  // namespace simulation
}  // namespace lockstep
