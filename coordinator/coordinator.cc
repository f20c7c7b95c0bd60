// Coordinator: see coordinator.h.
#include "coordinator/coordinator.h"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "coordinator/admin_backend.h"
#include "coordinator/admin_faults.h"
#include "coordinator/admin_server.h"
#include "coordinator/errors.h"
#include "coordinator/group/fault_log.h"
#include "coordinator/group/state_dir.h"
#include "coordinator/listener.h"
#include "coordinator/load_progress.h"
#include "coordinator/metrics/metrics.h"
#include "coordinator/model_service.h"
#include "coordinator/prefix_cache.h"
#include "coordinator/public_server.h"
#include "coordinator/restore_requests.h"
#include "coordinator/served_model.h"
#include "coordinator/serving_backend.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/version.h"
#include "security/tls.h"

namespace lockstep {
namespace {

using inference::v1::ServerStatus;
using worker::v1::LoadModelResult;

constexpr absl::Duration kReadinessPeriod = absl::Milliseconds(50);
// How long Stop lets calls send the rest of their answers.
constexpr absl::Duration kLastWrites = absl::Seconds(2);

absl::Status WithReason(absl::StatusCode code, absl::string_view message,
                        absl::string_view reason) {
  ErrorDetail detail;
  detail.reason = std::string(reason);
  return MakeError(code, message, detail);
}

std::string LastPart(absl::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  const size_t slash = path.rfind('/');
  return std::string(slash == absl::string_view::npos ? path : path.substr(slash + 1));
}

std::string DTypeName(worker::v1::ActivationDType dtype) {
  return dtype == worker::v1::ACTIVATION_F32 ? "f32" : "bf16";
}

std::string QuantName(worker::v1::ActivationQuant quant) {
  return quant == worker::v1::ACTIVATION_QUANT_CHECKPOINT ? "checkpoint" : "none";
}

}  // namespace

class Coordinator::Impl : public ServingBackend, public AdminBackend {
 public:
  explicit Impl(const CoordinatorOptions& options)
      : options_(options),
        started_(absl::Now()),
        progress_(static_cast<int>(options.workers.size())) {}
  ~Impl() override { Stop(); }

  absl::Status Listen() {
    const EdgeOptions& edges = options_.edges;
    ASSIGN_OR_RETURN(worker_credentials_, MakeChannelCredentials(edges.worker_tls, "--worker-tls"));
    if (!options_.journal.directory.empty()) {
      ASSIGN_OR_RETURN(journal_, Journal::Open(options_.journal));
    }
    ListenOptions listen;
    listen.max_message_bytes = kPublicMessageBytes;
    listen.tls = edges.tls;
    listen.address = absl::StrCat(options_.host, ":", options_.port);
    listen.token_file = edges.token_file;
    if (!edges.unix_socket.empty()) {
      listen.address = absl::StrCat("unix:", edges.unix_socket);
      listen.address_flag = "--unix-socket";
    }
    ASSIGN_OR_RETURN(server_, PublicServer::Start(listen, this, options_.generations));
    if (edges.admin_port >= 0) {
      listen.address = absl::StrCat(edges.admin_host, ":", edges.admin_port);
      listen.address_flag = "--admin-host and --admin-port";
      listen.token_file = edges.admin_token_file;
      listen.token_flag = "--admin-token-file";
      ASSIGN_OR_RETURN(admin_, AdminServer::Start(listen, this));
    }
    if (edges.metrics_port >= 0) {
      RETURN_IF_ERROR(metrics_.Listen(edges.metrics_host, edges.metrics_port));
    }
    for (size_t rank = 0; rank < options_.workers.size(); ++rank) {
      server_->SetHealth(absl::StrCat("worker/", rank), false);
    }
    return absl::OkStatus();
  }

  absl::Status Load() {
    const absl::Time start = absl::Now();
    absl::Status status = LoadSteps();
    if (status.ok()) metrics_.OnLoad(absl::Now() - start);
    if (!status.ok()) {
      absl::MutexLock lock(&mutex_);
      failure_ = status;
    }
    return status;
  }

  absl::Status Healthy() const {
    absl::MutexLock lock(&mutex_);
    if (!failure_.ok()) return failure_;
    return engine_ == nullptr ? absl::OkStatus() : engine_->Failure();
  }
  std::vector<FaultRecord> FaultRecords() const { return faults_.records(); }

  void Drain() {
    ending_ = true;
    SetDraining(true);
  }

  bool Idle() const {
    Engine* engine = EngineOrNull();
    return engine == nullptr || engine->idle();
  }

  void Stop() {
    if (stopped_.exchange(true)) return;
    draining_ = true;
    // Before the monitor, which may be waiting for a worker that does not answer.
    if (Engine* engine = EngineOrNull()) {
      engine->Stop(
          WithReason(absl::StatusCode::kUnavailable, "the server is stopping", "DRAINING"));
    }
    // What the engine has ended is still to be written, and shown.
    if (journal_ != nullptr) journal_->Stop();
    EndCalls();
    if (monitor_.joinable()) monitor_.join();
    if (group_ != nullptr && EngineOrNull() != nullptr) group_->Shutdown();
  }

  void EndCalls() {
    if (server_ != nullptr) server_->Shutdown(absl::Now() + kLastWrites);
    if (admin_ != nullptr) admin_->Shutdown(absl::Now() + kLastWrites);
    metrics_.Shutdown();
  }

  std::string Describe() const {
    const auto model = Model();
    if (!model.ok()) return std::string(model.status().message());
    const ServedModel& m = **model;
    const int64_t concurrent = m.kv_capacity_tokens / std::max<int64_t>(m.max_context, 1);
    return absl::StrCat(
        "lockstep ", kVersion, " is ready\n",  //
        "  model         ", m.name, "  (", options_.model_path, ")\n", "  architecture  ",
        m.architecture, "\n",                      //
        "  weights       ", m.quantization, "\n",  //
        "  digest        ", absl::StrFormat("%016x", m.checkpoint_digest), "\n", "  activations   ",
        m.activation_dtype, ", quantization ", m.activation_quant, "\n", "  ranks         ",
        m.tensor_parallel, "  (", absl::StrJoin(options_.workers, ", "), ")\n", "  context       ",
        m.max_context, " tokens, prompt plus output\n", "  KV cache      ", m.kv_capacity_tokens,
        " tokens, ", concurrent, " requests of full length, ", capacity_.kv_bytes >> 20,
        " MiB per rank\n", "  batch         ", capacity_.slots, " sequences, ",
        capacity_.max_batch_tokens, " tokens a step, ", capacity_.snapshots, " snapshots\n",
        "  text          ",
        m.tokenizer == nullptr ? "no tokenizer: token ids only"
        : m.has_chat_template  ? "text and chat"
                               : "text",
        "\n",  //
        "  listening on  ", address(), Guards(options_.edges.token_file), "\n", DescribeEdges());
  }

  // ServingBackend.
  absl::StatusOr<std::shared_ptr<const ServedModel>> Model() const override {
    absl::MutexLock lock(&mutex_);
    if (model_ != nullptr) return model_;
    if (!failure_.ok()) {
      return WithReason(absl::StatusCode::kUnavailable,
                        absl::StrCat("the model could not be loaded: ", failure_.message()),
                        "ENGINE_FAILED");
    }
    ErrorDetail detail;
    detail.reason = "MODEL_LOADING";
    detail.retry_after = absl::Seconds(1);
    detail.metadata = {{"progress", absl::StrFormat("%.3f", progress_.Fraction())}};
    return MakeError(absl::StatusCode::kUnavailable,
                     absl::StrCat("the model is loading: ", progress_.Line()), detail);
  }
  absl::Status Ready() const override {
    RETURN_IF_ERROR(Model().status());
    if (draining_) {
      return WithReason(absl::StatusCode::kUnavailable, "the server is draining", "DRAINING");
    }
    RETURN_IF_ERROR(EngineOrNull()->Ready());
    if (journal_ != nullptr) RETURN_IF_ERROR(journal_->Writable());
    return WorkersReady();
  }
  absl::Status Submit(GenerationSpec spec, std::shared_ptr<GenerationSink> sink) override {
    if (journal_ != nullptr) {
      RETURN_IF_ERROR(journal_->Writable());
      sink = journal_->Wrap(spec, std::move(sink));
    }
    return EngineOrNull()->Submit(std::move(spec), std::move(sink));
  }
  CancelResult Cancel(const std::string& request_id, const absl::Status& status) override {
    Engine* engine = EngineOrNull();
    if (engine == nullptr) return CancelResult::kNotFound;
    switch (engine->Cancel(request_id, status)) {
      case Engine::CancelOutcome::kCancelled:
        return CancelResult::kCancelled;
      case Engine::CancelOutcome::kAlreadyFinished:
        return CancelResult::kAlreadyFinished;
      case Engine::CancelOutcome::kNotFound:
        break;
    }
    return CancelResult::kNotFound;
  }
  ServerStatus Status() const override;

  // AdminBackend, as far as it is not the same.
  admin::v1::GetServerInfoResponse ServerInfo() const override;
  absl::Status DrainRequests() override {
    SetDraining(true);
    return absl::OkStatus();
  }
  absl::Status UndrainRequests() override {
    if (ending_) {
      return WithReason(absl::StatusCode::kFailedPrecondition,
                        "the server is about to end: start a new one", "WRONG_STATE");
    }
    SetDraining(false);
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<RequestInfo>> ListRequests() override {
    RETURN_IF_ERROR(Model().status());
    return EngineOrNull()->ListRequests();
  }
  absl::StatusOr<int64_t> ResetPrefixCache() override {
    RETURN_IF_ERROR(Model().status());
    return EngineOrNull()->ResetPrefixCache();
  }
  std::vector<admin::v1::FaultRecord> Faults() const override { return ToProto(faults_.records()); }
  absl::Status ReplaceWorker(int rank, const std::string& reason) override {
    RETURN_IF_ERROR(Model().status());
    return group_->Replace(rank, reason);
  }

  Engine* EngineOrNull() const {
    absl::MutexLock lock(&mutex_);
    return engine_.get();
  }
  WorkerGroup* GroupOrNull() const {
    absl::MutexLock lock(&mutex_);
    return group_.get();
  }
  // The process answers, and its step loop came round recently.
  bool Alive() const {
    Engine* engine = EngineOrNull();
    return engine == nullptr || absl::Now() - engine->LastTick() <= options_.liveness_bound;
  }
  std::string StatusLine() const {
    const absl::Status ready = Ready();
    Engine* engine = EngineOrNull();
    if (engine == nullptr) return std::string(ready.message());
    const EngineStats stats = engine->stats();
    return absl::StrCat(ready.ok() ? "ready" : std::string(ready.message()),
                        "; requests: ", stats.requests_running, " running, ", stats.requests_queued,
                        " queued");
  }
  int port() const { return server_->port(); }
  int admin_port() const { return admin_ == nullptr ? 0 : admin_->port(); }
  int metrics_port() const { return metrics_.port(); }
  std::string address() const {
    const std::string& socket = options_.edges.unix_socket;
    return socket.empty() ? absl::StrCat(options_.host, ":", server_->port())
                          : absl::StrCat("unix:", socket);
  }

 private:
  void SetDraining(bool draining) {
    draining_ = draining;
    if (Engine* engine = EngineOrNull()) draining ? engine->Drain() : engine->Undrain();
    server_->SetReady(Ready().ok());
  }
  // How a port with this token file is guarded, for people.
  std::string Guards(const std::string& token_file) const {
    const TlsFiles& tls = options_.edges.tls;
    return absl::StrCat("  (",
                        !tls.any()       ? "plaintext"
                        : tls.ca.empty() ? "TLS"
                                         : "mutual TLS",
                        token_file.empty() ? "" : ", tokens", ")");
  }
  std::string DescribeEdges() const {
    const EdgeOptions& edges = options_.edges;
    std::string text;
    if (admin_ != nullptr) {
      absl::StrAppend(&text, "  admin         ", edges.admin_host, ":", admin_->port(),
                      Guards(edges.admin_token_file), "\n");
    }
    if (metrics_.port() > 0) {
      absl::StrAppend(&text, "  metrics       http://", edges.metrics_host, ":", metrics_.port(),
                      "/metrics\n");
    }
    return text;
  }
  MetricsSample Sample() const;
  std::string ServedName() const {
    return options_.served_model_name.empty() ? LastPart(options_.model_path)
                                              : options_.served_model_name;
  }
  absl::Status LoadSteps();
  // The tokenizer of the model, or nothing when the checkpoint has none.
  absl::StatusOr<std::shared_ptr<const Tokenizer>> LoadTokenizer() const;
  absl::StatusOr<StepEpoch> Join(const std::vector<LoadModelResult>& results);
  std::shared_ptr<const ServedModel> MakeModel(const std::vector<LoadModelResult>& results,
                                               std::shared_ptr<const Tokenizer> tokenizer) const;
  // OK while the rank's lease holds, else why not.
  absl::Status LeaseOf(size_t rank, const WorkerGroup::View& view, absl::Time now) const;
  absl::Status WorkersReady() const;
  void TellWorkersHealth();
  void Monitor();
  void OnFault(const FaultRecord& record);

  const CoordinatorOptions options_;
  const absl::Time started_;
  LoadProgress progress_;
  FaultLog faults_;
  std::unique_ptr<StateDir> state_;  // null: none is kept
  std::shared_ptr<grpc::ChannelCredentials> worker_credentials_;
  Metrics metrics_{[this]() { return Sample(); }};
  std::unique_ptr<PublicServer> server_;
  std::unique_ptr<Journal> journal_;
  std::unique_ptr<AdminServer> admin_;
  std::unique_ptr<WorkerGroup> group_;
  std::unique_ptr<StepTransport> wrapped_;  // around group_, when the options ask for it
  Capacity capacity_;
  std::thread monitor_;
  std::atomic<bool> draining_{false};
  std::atomic<bool> ending_{false};  // drains for good
  std::atomic<bool> stopped_{false};

  mutable absl::Mutex mutex_;
  std::unique_ptr<Engine> engine_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const ServedModel> model_ ABSL_GUARDED_BY(mutex_);  // set when ready
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);                      // of Load
};

absl::StatusOr<std::shared_ptr<const Tokenizer>> Coordinator::Impl::LoadTokenizer() const {
  absl::StatusOr<std::unique_ptr<Tokenizer>> loaded = Tokenizer::Load(options_.model_path);
  if (loaded.ok()) return std::shared_ptr<const Tokenizer>(*std::move(loaded));
  if (absl::IsNotFound(loaded.status())) {
    LogWarning("no tokenizer: ", loaded.status().message(), "; serving token ids only");
    return std::shared_ptr<const Tokenizer>();
  }
  return loaded.status();
}

absl::StatusOr<StepEpoch> Coordinator::Impl::Join(const std::vector<LoadModelResult>& results) {
  ASSIGN_OR_RETURN(capacity_, PlanCapacity(options_.capacity, results));
  worker::v1::ConfigureRequest limits;
  limits.set_kv_blocks(capacity_.kv_blocks);
  limits.set_slots(capacity_.slots);
  limits.set_snapshots(capacity_.snapshots);
  limits.set_max_batch_tokens(capacity_.max_batch_tokens);
  limits.set_max_batch_sequences(capacity_.slots);
  limits.set_max_logit_rows(capacity_.max_logit_rows);
  limits.set_max_sequence_blocks(capacity_.max_sequence_blocks);
  return group_->Join(state_ == nullptr ? 1 : state_->epoch() + 1, limits);
}

std::shared_ptr<const ServedModel> Coordinator::Impl::MakeModel(
    const std::vector<LoadModelResult>& results, std::shared_ptr<const Tokenizer> tokenizer) const {
  const LoadModelResult& first = results[0];
  auto model = std::make_shared<ServedModel>();
  model->name = ServedName();
  model->aliases = options_.model_aliases;
  model->architecture = first.architecture();
  model->quantization = first.quantization();
  model->vocab_size = first.vocab_size();
  model->max_context = capacity_.max_context;
  model->tensor_parallel = static_cast<int32_t>(results.size());
  model->activation_dtype = DTypeName(options_.activation_dtype);
  model->activation_quant = QuantName(options_.activation_quant);
  model->kv_capacity_tokens = capacity_.kv_blocks * kBlockPositions;
  model->checkpoint_digest = first.identity().model_digest();
  model->eos_token_ids.assign(first.eos_token_ids().begin(), first.eos_token_ids().end());
  if (model->eos_token_ids.empty() && tokenizer != nullptr && tokenizer->eos_id() >= 0) {
    model->eos_token_ids = {tokenizer->eos_id()};
  }
  model->has_chat_template = tokenizer != nullptr && tokenizer->FindToken("<|im_start|>") >= 0 &&
                             tokenizer->FindToken("<|im_end|>") >= 0;
  model->tokenizer = std::move(tokenizer);
  return model;
}

absl::Status Coordinator::Impl::LoadSteps() {
  if (options_.workers.empty()) {
    return absl::InvalidArgumentError("no workers: name at least one with --workers host:port");
  }
  struct stat info;
  if (stat(options_.model_path.c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) {
    return absl::NotFoundError(absl::StrCat("--model ", options_.model_path,
                                            " is no folder; give the folder of a checkpoint"));
  }
  ASSIGN_OR_RETURN(std::shared_ptr<const Tokenizer> tokenizer, LoadTokenizer());
  uint64_t term = static_cast<uint64_t>(absl::ToUnixMillis(absl::Now()));
  if (!options_.state_dir.empty()) {
    ASSIGN_OR_RETURN(state_, StateDir::Open(options_.state_dir));
    term = state_->term() + 1;
  }
  WorkerGroupOptions group_options = options_.group;
  group_options.addresses = options_.workers;
  group_options.model_path = options_.model_path;
  group_options.activation_dtype = options_.activation_dtype;
  group_options.activation_quant = options_.activation_quant;
  if (state_ != nullptr) {
    group_options.persist_epoch = [this](uint64_t now, uint64_t epoch) {
      return state_->Save(now, epoch);
    };
  }
  WorkerGroupHooks hooks;
  hooks.launcher = options_.launcher;
  hooks.credentials = worker_credentials_;
  hooks.on_replaced = [this](int rank, const Fault& fault) {
    metrics_.OnWorkerRestart(rank, std::string(Name(fault.cause)));
  };
  hooks.on_fault = [this](const FaultRecord& record) { OnFault(record); };
  {
    auto group = std::make_unique<WorkerGroup>(group_options, std::move(hooks));
    absl::MutexLock lock(&mutex_);
    group_ = std::move(group);
  }
  ASSIGN_OR_RETURN(const std::vector<LoadModelResult> results,
                   group_->Load(term, [this](int rank, const auto& progress) {
                     if (progress_.Update(rank, progress, absl::Now())) {
                       LogInfo("loading: ", progress_.Line());
                     }
                   }));
  LogInfo("loaded: ", progress_.Line());
  if (tokenizer != nullptr && tokenizer->size() > results[0].vocab_size()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "vocabulary mismatch: tokenizer.json of ", options_.model_path, " has ids up to ",
        tokenizer->size() - 1, ", the model's vocabulary has ", results[0].vocab_size(), " ids"));
  }
  ASSIGN_OR_RETURN(const StepEpoch epoch, Join(results));
  SetLogEpoch(epoch.epoch);

  EngineOptions engine_options = options_.engine;
  engine_options.model_name = ServedName();
  engine_options.server_version = kVersion;
  engine_options.observer = &metrics_;
  engine_options.max_context = capacity_.max_context;
  engine_options.kv_blocks = capacity_.kv_blocks;
  engine_options.slots = capacity_.slots;
  engine_options.snapshots = capacity_.snapshots;
  engine_options.max_batch_tokens = capacity_.max_batch_tokens;
  engine_options.max_logit_rows = capacity_.max_logit_rows;
  std::shared_ptr<const ServedModel> model = MakeModel(results, tokenizer);
  StepTransport* transport = group_.get();
  if (options_.wrap_transport) {
    wrapped_ = options_.wrap_transport(transport);
    transport = wrapped_.get();
  }
  auto engine = std::make_unique<Engine>(engine_options, transport, tokenizer.get());
  if (journal_ != nullptr) {
    RETURN_IF_ERROR(RestoreRequests(results[0].identity().model_digest(), tokenizer.get(),
                                    journal_.get(), engine.get(), &server_->generations()));
  }
  engine->Start(epoch.term, epoch.epoch);
  if (draining_) engine->Drain();
  {
    absl::MutexLock lock(&mutex_);
    engine_ = std::move(engine);
    model_ = std::move(model);
  }
  TellWorkersHealth();
  server_->SetReady(Ready().ok());
  monitor_ = std::thread([this]() { Monitor(); });
  return absl::OkStatus();
}

void Coordinator::Impl::TellWorkersHealth() {
  const WorkerGroup::View view = group_->view();
  for (size_t rank = 0; rank < view.members.size(); ++rank) {
    server_->SetHealth(absl::StrCat("worker/", rank), LeaseOf(rank, view, absl::Now()).ok());
  }
}

void Coordinator::Impl::Monitor() {
  bool ready = true;
  bool alive = true;
  int64_t stale_messages = 0;
  while (!stopped_) {
    TellWorkersHealth();
    for (const int64_t now = group_->view().stale_messages; stale_messages < now;
         ++stale_messages) {
      metrics_.OnStaleMessageRefused();
    }
    const absl::Status now_ready = Ready();
    if (now_ready.ok() != ready) {
      server_->SetReady(now_ready.ok());
      LogInfo(now_ready.ok() ? "ready" : "not ready: ", now_ready.message());
    }
    ready = now_ready.ok();
    absl::SleepFor(kReadinessPeriod);
    if (Alive() != alive) {
      alive = !alive;
      server_->SetHealth("liveness", alive);
      LogWarning("the step loop ", alive ? "goes on" : "has stopped");
    }
  }
}

absl::Status Coordinator::Impl::LeaseOf(size_t rank, const WorkerGroup::View& view,
                                        absl::Time now) const {
  const GroupCore::MemberView& member = view.members[rank];
  if (!options_.group.recover || now - member.last_answer <= options_.group.lease) {
    return absl::OkStatus();
  }
  return absl::UnavailableError(absl::StrCat(
      "rank ", rank, " (", member.address, ") has not answered for ",
      absl::FormatDuration(absl::Trunc(now - member.last_answer, absl::Milliseconds(100)))));
}

absl::Status Coordinator::Impl::WorkersReady() const {
  const WorkerGroup::View view = group_->view();
  if (view.phase != GroupCore::Phase::kRunning) {
    return absl::UnavailableError(
        absl::StrCat("the workers cannot run steps now: ", view.status.message()));
  }
  for (size_t rank = 0; rank < view.members.size(); ++rank) {
    RETURN_IF_ERROR(LeaseOf(rank, view, absl::Now()));
  }
  return absl::OkStatus();
}

void Coordinator::Impl::OnFault(const FaultRecord& record) {
  faults_.Update(record);
  if (record.fault.cause == FaultCause::kDigestMismatch && record.outcome == "recovering") {
    metrics_.OnStepDigestMismatch();
  }
  if (record.outcome != "recovered") return;
  SetLogEpoch(record.epoch_after);
  metrics_.OnRecovery(Name(record.fault.cause), {{"detect", record.silence},
                                                 {"abort", record.abort},
                                                 {"replace", record.replace},
                                                 {"join", record.join},
                                                 {"replay", record.replay}});
}

ServerStatus Coordinator::Impl::Status() const {
  ServerStatus status;
  status.set_version(kVersion);
  WorkerGroup* const group = GroupOrNull();
  const WorkerGroup::View view = group == nullptr ? WorkerGroup::View() : group->view();
  status.set_term(view.term);
  status.set_epoch(view.epoch);
  status.set_uptime_seconds(absl::ToInt64Seconds(absl::Now() - started_));
  const absl::Status ready = Ready();
  const absl::Status healthy = Healthy();
  Engine* engine = EngineOrNull();
  const bool broken = engine != nullptr && view.phase == GroupCore::Phase::kBroken;
  status.set_state(!healthy.ok() || broken                    ? "FAILED"
                   : draining_                                ? "DRAINING"
                   : engine == nullptr                        ? "LOADING"
                   : ready.ok()                               ? "READY"
                   : view.phase != GroupCore::Phase::kRunning ? "RECOVERING"
                                                              : "NOT_READY");
  if (!ready.ok()) status.set_state_detail(std::string(ready.message()));
  {
    absl::MutexLock lock(&mutex_);
    for (size_t rank = 0; rank < options_.workers.size(); ++rank) {
      auto* worker = status.add_workers();
      worker->set_rank(static_cast<int32_t>(rank));
      worker->set_address(options_.workers[rank]);
      worker->set_load_progress(progress_.FractionOf(static_cast<int>(rank)));
      worker->set_state("UNKNOWN");
      worker->set_lease_age_ms(-1);
      if (rank < view.members.size()) {
        const GroupCore::MemberView& member = view.members[rank];
        const absl::Time now = absl::Now();
        const absl::Status lease = LeaseOf(rank, view, now);
        worker->set_address(member.address);
        worker->set_worker_id(member.worker_id);
        worker->set_device(member.device);
        worker->set_resident_bytes(member.resident_bytes);
        worker->set_last_step(member.last_step);
        if (lease.ok()) worker->set_state(member.state);
        worker->set_up(lease.ok() && member.state != "UNKNOWN");
        worker->set_state_detail(std::string(lease.message()));
        if (member.last_answer > absl::InfinitePast()) {
          worker->set_lease_age_ms(absl::ToInt64Milliseconds(now - member.last_answer));
        }
      }
    }
  }
  if (engine == nullptr) return status;
  const EngineStats stats = engine->stats();
  status.set_requests_running(stats.requests_running);
  status.set_requests_queued(stats.requests_queued);
  status.set_kv_blocks_total(stats.kv_blocks_total);
  status.set_kv_blocks_free(stats.kv_blocks_free);
  status.set_kv_blocks_cached(stats.kv_blocks_cached);
  status.set_slots_total(stats.slots_total);
  status.set_slots_free(stats.slots_free);
  status.set_snapshots_total(stats.snapshots_total);
  status.set_snapshots_used(stats.snapshots_used);
  status.mutable_counters()->insert(stats.counters.begin(), stats.counters.end());
  return status;
}

admin::v1::GetServerInfoResponse Coordinator::Impl::ServerInfo() const {
  admin::v1::GetServerInfoResponse info;
  const ServerStatus status = Status();
  info.set_version(status.version());
  info.set_term(status.term());
  info.set_epoch(status.epoch());
  info.set_uptime_seconds(status.uptime_seconds());
  info.set_state(status.state());
  info.set_state_detail(status.state_detail());
  info.set_address(address());
  info.set_metrics_port(metrics_.port());
  info.mutable_flags()->insert(options_.edges.flags.begin(), options_.edges.flags.end());
  admin::v1::Limits* limits = info.mutable_limits();
  limits->set_max_public_message_bytes(kPublicMessageBytes);
  limits->set_max_worker_message_bytes(WorkerGroupOptions().max_message_bytes);
  limits->set_max_queued_requests(options_.engine.max_queued_requests);
  limits->set_max_queued_tokens(options_.engine.max_queued_tokens);
  if (const auto model = Model(); model.ok()) {
    limits->set_max_context((*model)->max_context);
    limits->set_max_batch_sequences(capacity_.slots);
    limits->set_max_batch_tokens(capacity_.max_batch_tokens);
    limits->set_kv_capacity_tokens((*model)->kv_capacity_tokens);
  }
  return info;
}

MetricsSample Coordinator::Impl::Sample() const {
  MetricsSample sample;
  WorkerGroup* const group = GroupOrNull();
  const WorkerGroup::View view = group == nullptr ? WorkerGroup::View() : group->view();
  sample.epoch = view.epoch;
  if (Engine* engine = EngineOrNull()) sample.engine = engine->stats();
  const absl::Time now = absl::Now();
  for (size_t rank = 0; rank < options_.workers.size(); ++rank) {
    MetricsSample::Rank one;
    one.load_progress = progress_.FractionOf(static_cast<int>(rank));
    if (rank < view.members.size()) {
      const GroupCore::MemberView& member = view.members[rank];
      one.up = LeaseOf(rank, view, now).ok() && member.state != "UNKNOWN";
      one.lease_age = now - member.last_answer;
    }
    sample.ranks.push_back(one);
  }
  return sample;
}

absl::StatusOr<std::unique_ptr<Coordinator>> Coordinator::Start(const CoordinatorOptions& options) {
  auto impl = std::make_unique<Impl>(options);
  RETURN_IF_ERROR(impl->Listen());
  return std::unique_ptr<Coordinator>(new Coordinator(std::move(impl)));
}

Coordinator::Coordinator(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Coordinator::~Coordinator() = default;
int Coordinator::port() const { return impl_->port(); }
std::string Coordinator::address() const { return impl_->address(); }
int Coordinator::admin_port() const { return impl_->admin_port(); }
int Coordinator::metrics_port() const { return impl_->metrics_port(); }
absl::Status Coordinator::Load() { return impl_->Load(); }
absl::Status Coordinator::Healthy() const { return impl_->Healthy(); }
bool Coordinator::Alive() const { return impl_->Alive(); }
std::string Coordinator::StatusLine() const { return impl_->StatusLine(); }
void Coordinator::Drain() { impl_->Drain(); }
bool Coordinator::Idle() const { return impl_->Idle(); }
void Coordinator::Stop() { impl_->Stop(); }
void Coordinator::EndCalls() { impl_->EndCalls(); }
std::string Coordinator::Describe() const { return impl_->Describe(); }
std::vector<FaultRecord> Coordinator::Faults() const { return impl_->FaultRecords(); }
Engine* Coordinator::engine() { return impl_->EngineOrNull(); }
WorkerGroup* Coordinator::workers() { return impl_->GroupOrNull(); }

}  // namespace lockstep
