#include "worker/worker.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/version.h"
#include "kernels/comm/comm_self_test.h"
#include "kernels/comm/push_comm_group.h"
#include "kernels/comm/solo_comm_group.h"
#include "kernels/runtime/cpu_isa.h"
#include "kernels/runtime/device_stream.h"
#include "worker/probe_linear.h"

namespace lockstep {
namespace {

namespace pb = worker::v1;

constexpr char kSoloAddress[] = "solo";
constexpr absl::Duration kDefaultInitTimeout = absl::Seconds(30);

uint64_t RandomIncarnation() {
  uint64_t value = 0;
  CHECK_EQ(getrandom(&value, sizeof(value), 0), static_cast<ssize_t>(sizeof(value)));
  return value;
}

int64_t ResidentSetBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t size = 0, resident = 0;
  statm >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

LoadSpec ToSpec(const pb::LoadModelRequest& request, DeviceType device) {
  LoadSpec spec;
  spec.path = request.path();
  spec.expected_digest = request.expected_digest();
  spec.rank = request.rank();
  spec.world = request.world();
  spec.device = device;
  spec.options.activation_dtype =
      request.activation_dtype() == pb::ACTIVATION_F32 ? DType::kF32 : DType::kBF16;
  spec.options.activation_quant = request.activation_quant() == pb::ACTIVATION_QUANT_CHECKPOINT
                                      ? ActivationQuant::kCheckpoint
                                      : ActivationQuant::kNone;
  return spec;
}

std::string Describe(const LoadSpec& spec) {
  return absl::StrCat(spec.path, " as rank ", spec.rank, " of ", spec.world);
}

}  // namespace

// One load: the one that runs, or the one whose model is resident.
struct Worker::Load {
  LoadSpec spec;
  pb::LoadModelProgress progress;
  bool done = false;
  absl::Status status;
  pb::LoadModelResult result;
  uint64_t digest = 0;

  bool Same(const LoadSpec& other) const {
    const bool same_model = other.expected_digest != 0 && digest != 0
                                ? other.expected_digest == digest
                                : other.path == spec.path;
    return same_model && other.rank == spec.rank && other.world == spec.world &&
           other.options.activation_dtype == spec.options.activation_dtype &&
           other.options.activation_quant == spec.options.activation_quant;
  }
};

Worker::Worker(WorkerOptions options)
    : options_(std::move(options)),
      incarnation_(RandomIncarnation()),
      executor_(options_.device, &counters_, options_.check_device),
      lease_timer_([this] { LeaseExpired(); }),
      orphan_timer_([this] {
        if (options_.on_orphan) options_.on_orphan();
      }) {
  if (options_.orphan_timeout > absl::ZeroDuration()) orphan_timer_.Arm(options_.orphan_timeout);
}

Worker::~Worker() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (comm_ != nullptr) comm_->Abort("the worker stops");
    if (listener_ != nullptr) listener_->Cancel();
  }
  if (load_thread_.joinable()) load_thread_.join();
}

// ---- identity and state ----

pb::Identity Worker::IdentityLocked() const {
  pb::Identity id;
  id.set_worker_id(options_.worker_id);
  id.set_incarnation(incarnation_);
  id.set_rank(rank_);
  id.set_world(world_);
  id.set_model_digest(model_digest_);
  id.set_term(term_);
  id.set_epoch(epoch_);
  return id;
}

pb::WorkerState Worker::StateLocked() const {
  if (draining_) return pb::DRAINING;
  if (state_ == pb::READY && executor_.stats().running) return pb::BUSY;
  return state_;
}

absl::Status Worker::FenceLocked(uint64_t term, uint64_t epoch) {
  if (term < term_) {
    return absl::FailedPreconditionError(
        absl::StrCat("STALE_TERM: term ", term, " was sent, term ", term_, " was seen"));
  }
  if (epoch < epoch_) {
    return absl::FailedPreconditionError(
        absl::StrCat("STALE_EPOCH: epoch ", epoch, " was sent, epoch ", epoch_, " was seen"));
  }
  term_ = term;
  if (options_.orphan_timeout > absl::ZeroDuration()) orphan_timer_.Arm(options_.orphan_timeout);
  return absl::OkStatus();
}

absl::Status Worker::CheckDeviceUsable(absl::string_view call) const {
  if (!executor_.device_lost()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("DEVICE_LOST: ", call,
                                                    ": the device of worker ", options_.worker_id,
                                                    " has failed for good; restart the process"));
}

absl::Status Worker::WrongStateLocked(absl::string_view call, absl::string_view expected) const {
  return absl::FailedPreconditionError(
      absl::StrCat(call, " in state ", pb::WorkerState_Name(StateLocked()), "; expected ", expected,
                   error_.empty() ? "" : "; last error: ", error_));
}

pb::GetInfoResponse Worker::GetInfo() {
  pb::GetInfoResponse response;
  const bool cuda = options_.device == DeviceType::kCuda;
  response.set_device_uuid(absl::StrCat("cpu-", absl::Hex(incarnation_, absl::kZeroPad16)));
  response.set_device(cuda ? absl::StrCat("cuda:", options_.device_ordinal) : "cpu");
  // A device that fails has no numbers to give; its state tells.
  if (const absl::StatusOr<DeviceInfo> info = GetDeviceInfo(options_.device); info.ok()) {
    response.set_device_name(info->name);
    response.set_isa(cuda ? absl::StrCat("sm_", info->capability) : Name(GetCpuIsa()));
    response.set_total_bytes(info->total_bytes);
    response.set_free_bytes(info->free_bytes);
    if (cuda) response.set_device_uuid(info->uuid);
  }
  std::lock_guard<std::mutex> lock(mu_);
  *response.mutable_identity() = IdentityLocked();
  response.set_state(StateLocked());
  response.set_threads(threads_);
  response.set_version(kVersion);
  return response;
}

absl::StatusOr<pb::HealthResponse> Worker::Health(const pb::HealthRequest& request) {
  if (request.lease_ms() < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "lease_ms is ", request.lease_ms(), "; give 0 (no lease) or a time in milliseconds"));
  }
  const StepExecutor::Stats stats = executor_.stats();
  pb::HealthResponse response;
  std::lock_guard<std::mutex> lock(mu_);
  if (request.term() > 0) {
    RETURN_IF_ERROR(FenceLocked(request.term(), epoch_));
    lease_ = absl::Milliseconds(request.lease_ms());
    beat_epoch_ = request.epoch();
    if (request.lease_ms() > 0) {
      lease_timer_.Arm(lease_);
    } else {
      lease_timer_.Disarm();
    }
  }
  *response.mutable_identity() = IdentityLocked();
  response.set_state(StateLocked());
  response.set_last_step(stats.last_step);
  response.set_step_running_ms(stats.running_millis);
  response.set_error(error_);
  response.set_device_lost(executor_.device_lost());
  return response;
}

void Worker::LeaseExpired() {
  std::function<void(const absl::Status&)> ended;
  absl::Status reason;
  uint64_t epoch = 0;
  {
    std::lock_guard<std::mutex> lock(mu_);
    // A beat that came when the timer had just run out has armed it again.
    if (lease_timer_.armed() || lease_ == absl::ZeroDuration()) return;
    reason =
        absl::AbortedError(absl::StrCat("the lease expired: no beat of term ", term_, ", epoch ",
                                        beat_epoch_, " for ", absl::FormatDuration(lease_)));
    lease_ = absl::ZeroDuration();
    epoch = epoch_;
    const bool grouped = state_ != pb::NEW && state_ != pb::LOADING && state_ != pb::LOADED;
    LogWarning(reason.message(),
               grouped ? "; leaving the group, the weights stay" : "; there is no group to leave");
    EndGroupLocked(reason, &ended);
    if (grouped) {
      state_ = pb::LOADED;
      error_ = std::string(reason.message());
    }
  }
  if (ended) ended(reason);
  executor_.EndEpoch(reason);
  // InitComm and Configure end by themselves, their group being gone.
  std::lock_guard<std::mutex> setup(setup_mu_);
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (epoch_ != epoch) return;  // the next epoch frees what the last one left
    comm_.reset();
    listener_.reset();
  }
  executor_.Release();
}

pb::GetStatsResponse Worker::GetStats() {
  const StepExecutor::Stats stats = executor_.stats();
  pb::GetStatsResponse response;
  for (int kind = 0; kind < static_cast<int>(Traffic::kNumKinds); ++kind) {
    const Traffic traffic = static_cast<Traffic>(kind);
    (*response.mutable_traffic_bytes())[Name(traffic)] = counters_.Get(traffic);
  }
  response.set_op_launches(counters_.op_launches.load());
  response.set_graph_launches(counters_.graph_launches.load());
  response.set_collectives(counters_.collectives.load());
  response.set_steps(stats.steps);
  response.set_step_micros_total(stats.step_micros);
  response.set_idle_micros_total(stats.idle_micros);
  response.set_idle_waits(stats.idle_waits);
  response.set_rss_bytes(ResidentSetBytes());
  std::lock_guard<std::mutex> lock(mu_);
  response.set_refused_steps(static_cast<int64_t>(stats.refused_steps) + fenced_steps_);
  *response.mutable_identity() = IdentityLocked();
  if (load_ != nullptr && load_->done) *response.mutable_weight_bytes() = load_->result.bytes();
  return response;
}

// ---- loading ----

void Worker::RunLoad(std::shared_ptr<Load> load) {
  const absl::Time start = absl::Now();
  absl::StatusOr<LoadedModel> loaded =
      options_.loader(load->spec, &counters_, [&](const pb::LoadModelProgress& progress) {
        std::lock_guard<std::mutex> lock(mu_);
        load->progress = progress;
      });
  int threads = options_.threads;
  if (threads <= 0) {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    threads = std::max(1, cores / load->spec.world);
  }
  if (loaded.ok()) {
    resources_ = std::move(loaded->resources);
    executor_.SetModel(std::move(loaded->model), threads);
  }
  if (!loaded.ok()) executor_.CheckDevice();
  std::lock_guard<std::mutex> lock(mu_);
  load->done = true;
  load->status = loaded.status();
  if (loaded.ok()) {
    state_ = pb::LOADED;
    rank_ = load->spec.rank;
    SetLogRank(rank_);
    world_ = load->spec.world;
    threads_ = threads;
    model_digest_ = load->digest = loaded->model_digest;
    load->result = std::move(loaded->result);
    load->result.set_seconds(absl::ToDoubleSeconds(absl::Now() - start));
    LogInfo("loaded ", Describe(load->spec), ": ", load->result.resident_bytes(),
            " bytes resident");
  } else {
    state_ = pb::NEW;
    load_ = nullptr;
    LogError("loading ", Describe(load->spec), " failed: ", load->status.ToString());
  }
  load_changed_.notify_all();
}

absl::StatusOr<pb::LoadModelResult> Worker::LoadModel(
    const pb::LoadModelRequest& request,
    const std::function<bool(const pb::LoadModelProgress&)>& progress) {
  const LoadSpec spec = ToSpec(request, options_.device);
  if (spec.world < 1 || spec.rank < 0 || spec.rank >= spec.world) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", spec.rank, " of world ", spec.world, " does not exist"));
  }
  std::unique_lock<std::mutex> lock(mu_);
  RETURN_IF_ERROR(FenceLocked(request.term(), epoch_));
  RETURN_IF_ERROR(CheckDeviceUsable("LoadModel"));
  // Another load runs. It may be about to fail, as it has on another rank; only its end decides.
  while (load_ != nullptr && !load_->done && !load_->Same(spec)) {
    const pb::LoadModelProgress now = load_->progress;
    lock.unlock();
    if (!progress(now)) return absl::CancelledError("the caller went away");
    lock.lock();
    if (load_ == nullptr || load_->done) break;
    load_changed_.wait_for(lock, std::chrono::milliseconds(100));
  }
  if (load_ == nullptr) {
    if (draining_) return WrongStateLocked("LoadModel", "NEW");
    load_ = std::make_shared<Load>();
    load_->spec = spec;
    load_->progress.set_phase("open");
    state_ = pb::LOADING;
    if (load_thread_.joinable()) load_thread_.join();  // of a load that failed: it has ended
    load_thread_ = std::thread([this, load = load_] { RunLoad(load); });
  } else if (!load_->Same(spec)) {
    return absl::FailedPreconditionError(
        absl::StrCat("asked to load ", Describe(spec), " (digest ", absl::Hex(spec.expected_digest),
                     "), but this worker has loaded ", Describe(load_->spec), " (digest ",
                     absl::Hex(load_->digest), "); start another worker for it"));
  }
  const std::shared_ptr<Load> load = load_;
  while (!load->done) {
    const pb::LoadModelProgress now = load->progress;
    lock.unlock();
    if (!progress(now)) return absl::CancelledError("the caller went away; the load goes on");
    lock.lock();
    load_changed_.wait_for(lock, std::chrono::milliseconds(500), [&] { return load->done; });
  }
  RETURN_IF_ERROR(load->status);
  pb::LoadModelResult result = load->result;
  *result.mutable_identity() = IdentityLocked();
  return result;
}

// ---- the group ----

// Ends the group of the present epoch, if there is one. The caller calls *ended without holding
// mu_.
void Worker::EndGroupLocked(const absl::Status& reason,
                            std::function<void(const absl::Status&)>* ended) {
  if (comm_ != nullptr) comm_->Abort(reason.message());
  if (listener_ != nullptr) listener_->Cancel();
  *ended = std::move(stream_ended_);
  stream_ended_ = nullptr;
  stream_ = 0;
}

absl::StatusOr<pb::PrepareCommResponse> Worker::PrepareComm(const pb::PrepareCommRequest& request) {
  std::function<void(const absl::Status&)> ended;
  const absl::Status reason = absl::AbortedError(
      absl::StrCat("epoch ", request.epoch(), " of term ", request.term(), " begins"));
  {
    // At once, so that whatever runs for the old epoch ends.
    std::lock_guard<std::mutex> lock(mu_);
    RETURN_IF_ERROR(FenceLocked(request.term(), request.epoch()));
    RETURN_IF_ERROR(CheckDeviceUsable("PrepareComm"));
    if (request.epoch() == epoch_) {
      return absl::FailedPreconditionError(
          absl::StrCat("STALE_EPOCH: epoch ", epoch_, " was already prepared; send a higher one"));
    }
    if (draining_ || state_ == pb::NEW || state_ == pb::LOADING) {
      return WrongStateLocked("PrepareComm", "LOADED or later");
    }
    epoch_ = request.epoch();
    SetLogEpoch(epoch_);
    EndGroupLocked(reason, &ended);
    state_ = pb::LOADED;
    error_.clear();
  }
  if (ended) ended(reason);
  executor_.EndEpoch(reason);

  std::lock_guard<std::mutex> setup(setup_mu_);
  executor_.SetComm(nullptr);
  std::shared_ptr<ProcessCommListener> listener;
  int world = 0;
  {
    std::lock_guard<std::mutex> lock(mu_);
    comm_.reset();
    listener_.reset();
    world = world_;
  }
  if (world > 1) {
    ASSIGN_OR_RETURN(listener, ProcessCommListener::Listen(options_.comm));
  }
  std::lock_guard<std::mutex> lock(mu_);
  RETURN_IF_ERROR(FenceLocked(request.term(), request.epoch()));
  listener_ = listener;
  state_ = pb::COMM_INIT;
  pb::PrepareCommResponse response;
  *response.mutable_identity() = IdentityLocked();
  response.set_address(listener != nullptr ? listener->address() : kSoloAddress);
  return response;
}

absl::StatusOr<std::shared_ptr<CommGroup>> Worker::Connect(const pb::InitCommRequest& request) {
  std::shared_ptr<ProcessCommListener> listener;
  {
    std::lock_guard<std::mutex> lock(mu_);
    RETURN_IF_ERROR(FenceLocked(request.term(), request.epoch()));
    if (draining_ || state_ != pb::COMM_INIT) return WrongStateLocked("InitComm", "COMM_INIT");
    if (request.epoch() != epoch_) {
      return absl::FailedPreconditionError(
          absl::StrCat("InitComm of epoch ", request.epoch(), ", epoch ", epoch_, " was prepared"));
    }
    if (request.rank() != rank_ || request.addresses_size() != world_) {
      return absl::InvalidArgumentError(
          absl::StrCat("InitComm as rank ", request.rank(), " with ", request.addresses_size(),
                       " addresses; this worker is rank ", rank_, " of ", world_));
    }
    listener = listener_;
  }
  if (listener == nullptr) {
    return std::shared_ptr<CommGroup>(std::make_shared<SoloCommGroup>(request.epoch()));
  }
  const absl::Duration timeout =
      request.timeout_ms() > 0 ? absl::Milliseconds(request.timeout_ms()) : kDefaultInitTimeout;
  const std::vector<std::string> addresses(request.addresses().begin(), request.addresses().end());
  ASSIGN_OR_RETURN(std::unique_ptr<CommGroup> group,
                   listener->Connect(request.epoch(), request.rank(), addresses, timeout));
  if (options_.device == DeviceType::kCuda) {
    // The sockets carry memory handles; activations go through the devices.
    PushOptions push;
    push.timeout = options_.comm.collective_timeout;
    ASSIGN_OR_RETURN(group, MakePushCommGroup(std::move(group), push));
  }
  return std::shared_ptr<CommGroup>(std::move(group));
}

absl::Status Worker::AdoptComm(const pb::InitCommRequest& request,
                               std::shared_ptr<CommGroup> comm) {
  std::lock_guard<std::mutex> lock(mu_);
  RETURN_IF_ERROR(FenceLocked(request.term(), request.epoch()));
  if (draining_ || state_ != pb::COMM_INIT) return WrongStateLocked("InitComm", "COMM_INIT");
  comm_ = std::move(comm);  // from here on AbortComm reaches it
  return absl::OkStatus();
}

absl::StatusOr<pb::InitCommResponse> Worker::InitComm(const pb::InitCommRequest& request) {
  const absl::Time start = absl::Now();
  std::lock_guard<std::mutex> setup(setup_mu_);
  uint64_t self_test = 0;
  const auto join = [&]() -> absl::Status {
    ASSIGN_OR_RETURN(std::shared_ptr<CommGroup> comm, Connect(request));
    RETURN_IF_ERROR(AdoptComm(request, comm));
    executor_.SetComm(std::move(comm));
    return executor_.Run([&](ExecContext* ctx, const Model*, CommGroup* group) -> absl::Status {
      Workspace scratch;
      RETURN_IF_ERROR(scratch.Allocate(options_.device, 1 << 20));
      ctx->workspace = &scratch;
      ASSIGN_OR_RETURN(self_test, RunCommSelfTest(ctx, group));
      return absl::OkStatus();
    });
  };
  const absl::Status joined = join();
  std::lock_guard<std::mutex> lock(mu_);
  if (!joined.ok()) {
    // A call that should not have come leaves the state as it is.
    if (state_ == pb::COMM_INIT && request.epoch() == epoch_ && !absl::IsInvalidArgument(joined) &&
        request.term() == term_) {
      state_ = pb::FAILED;
      error_ = std::string(joined.message());
    }
    return joined;
  }
  RETURN_IF_ERROR(FenceLocked(request.term(), request.epoch()));
  if (state_ != pb::COMM_INIT) return WrongStateLocked("InitComm", "COMM_INIT");
  state_ = pb::JOINED;
  pb::InitCommResponse response;
  *response.mutable_identity() = IdentityLocked();
  response.set_transport(world_ == 1                            ? kSoloAddress
                         : options_.device == DeviceType::kCuda ? "push"
                                                                : "process");
  response.set_self_test(self_test);
  response.set_elapsed_us(absl::ToInt64Microseconds(absl::Now() - start));
  return response;
}

absl::StatusOr<pb::ConfigureResponse> Worker::Configure(const pb::ConfigureRequest& request) {
  std::lock_guard<std::mutex> setup(setup_mu_);
  {
    std::lock_guard<std::mutex> lock(mu_);
    RETURN_IF_ERROR(FenceLocked(request.term(), request.epoch()));
    const bool joined = state_ == pb::JOINED || (state_ == pb::READY && stream_ == 0);
    if (draining_ || !joined || request.epoch() != epoch_) {
      return WrongStateLocked(absl::StrCat("Configure of epoch ", request.epoch()),
                              absl::StrCat("JOINED in epoch ", epoch_));
    }
  }
  BatchLimits limits;
  limits.kv_blocks = request.kv_blocks();
  limits.slots = request.slots();
  limits.snapshots = request.snapshots();
  limits.max_tokens = request.max_batch_tokens();
  limits.max_sequences = request.max_batch_sequences();
  limits.max_logit_rows = request.max_logit_rows();
  limits.max_sequence_blocks = request.max_sequence_blocks();
  const absl::StatusOr<StepExecutor::Sizes> sizes = executor_.Configure(limits);
  std::lock_guard<std::mutex> lock(mu_);
  RETURN_IF_ERROR(FenceLocked(request.term(), request.epoch()));
  if (state_ != pb::JOINED && state_ != pb::READY) return WrongStateLocked("Configure", "JOINED");
  state_ = sizes.ok() ? pb::READY : pb::JOINED;
  RETURN_IF_ERROR(sizes.status());
  pb::ConfigureResponse response;
  *response.mutable_identity() = IdentityLocked();
  response.set_cache_bytes(sizes->cache_bytes);
  response.set_workspace_bytes(sizes->workspace_bytes);
  return response;
}

absl::StatusOr<pb::AbortCommResponse> Worker::AbortComm(const pb::AbortCommRequest& request) {
  std::function<void(const absl::Status&)> ended;
  const absl::Status reason = absl::AbortedError(
      request.reason().empty() ? "aborted by the coordinator" : request.reason());
  pb::AbortCommResponse response;
  {
    std::lock_guard<std::mutex> lock(mu_);
    RETURN_IF_ERROR(FenceLocked(request.term(), request.epoch()));
    const bool there = request.epoch() == epoch_ && (comm_ != nullptr || listener_ != nullptr);
    if (there) {
      EndGroupLocked(reason, &ended);
      state_ = pb::FAILED;
      if (error_.empty()) error_ = std::string(reason.message());
    }
    response.set_aborted(there);
    *response.mutable_identity() = IdentityLocked();
  }
  if (ended) ended(reason);
  return response;
}

absl::StatusOr<pb::DrainResponse> Worker::Drain(const pb::DrainRequest& request) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    RETURN_IF_ERROR(FenceLocked(request.term(), epoch_));
    draining_ = true;
  }
  const absl::Duration timeout =
      request.timeout_ms() > 0 ? absl::Milliseconds(request.timeout_ms()) : absl::Seconds(30);
  if (!executor_.WaitUntilIdle(absl::Now() + timeout)) {
    return absl::DeadlineExceededError(
        absl::StrCat("a step still runs after ", absl::FormatDuration(timeout)));
  }
  pb::DrainResponse response;
  std::lock_guard<std::mutex> lock(mu_);
  *response.mutable_identity() = IdentityLocked();
  return response;
}

absl::StatusOr<pb::ProbeLinearResponse> Worker::ProbeLinear(const pb::ProbeLinearRequest& request) {
  std::lock_guard<std::mutex> setup(setup_mu_);
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (state_ != pb::JOINED && state_ != pb::READY) {
      return WrongStateLocked("ProbeLinear", "JOINED or READY");
    }
  }
  pb::ProbeLinearResponse response;
  RETURN_IF_ERROR(
      executor_.Run([&](ExecContext* ctx, const Model* model, CommGroup* comm) -> absl::Status {
        ASSIGN_OR_RETURN(response, RunProbeLinear(ctx, *model, comm, request));
        return absl::OkStatus();
      }));
  return response;
}

// ---- the step stream ----

absl::StatusOr<uint64_t> Worker::OpenStream(std::function<void(const absl::Status&)> ended) {
  std::lock_guard<std::mutex> lock(mu_);
  if (draining_ || state_ != pb::READY) return WrongStateLocked("StepStream", "READY");
  if (stream_ != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("epoch ", epoch_, " has a step stream already"));
  }
  stream_ = ++last_stream_;
  stream_ended_ = std::move(ended);
  executor_.OpenStream();
  return stream_;
}

void Worker::Submit(uint64_t token, pb::StepRequest request, StepExecutor::Done done) {
  absl::Status status;
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (token != stream_) {
      status = absl::AbortedError("the epoch of this step stream has ended");
    } else if (draining_) {
      status = absl::UnavailableError("the worker drains");
    } else {
      status = FenceLocked(request.term(), epoch_);
    }
    if (status.ok()) {
      executor_.Submit(std::move(request), std::move(done));
      return;
    }
    ++fenced_steps_;
  }
  done(status);
}

void Worker::CloseStream(uint64_t token, const absl::Status& status) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (token != stream_) return;
    stream_ = 0;
    stream_ended_ = nullptr;
    // Steps that run for nobody must not leave peers waiting; an orderly end aborts nothing.
    if (!status.ok() && comm_ != nullptr) comm_->Abort(status.message());
    state_ = status.ok() ? pb::LOADED : pb::FAILED;
    error_ = std::string(status.message());
  }
  executor_.EndEpoch(absl::AbortedError("the step stream ended"));
}

}  // namespace lockstep
