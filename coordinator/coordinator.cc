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
#include "coordinator/errors.h"
#include "coordinator/load_progress.h"
#include "coordinator/prefix_cache.h"
#include "coordinator/public_server.h"
#include "coordinator/restore_requests.h"
#include "coordinator/served_model.h"
#include "coordinator/serving_backend.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/version.h"

namespace lockstep {
namespace {

using inference::v1::ServerStatus;
using worker::v1::LoadModelResult;

constexpr absl::Duration kReadinessPeriod = absl::Milliseconds(50);
constexpr absl::Duration kWorkerHealthPeriod = absl::Seconds(1);
constexpr absl::Duration kWorkerHealthTimeout = absl::Seconds(2);
// A rank whose last good answer is older is not counted on.
constexpr absl::Duration kWorkerLease = absl::Seconds(3);
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

// Every rank must have loaded the same model.
absl::Status CheckSameModel(const std::vector<LoadModelResult>& results,
                            const std::vector<std::string>& workers) {
  for (size_t rank = 1; rank < results.size(); ++rank) {
    const LoadModelResult& mine = results[rank];
    const LoadModelResult& first = results[0];
    if (mine.identity().model_digest() == first.identity().model_digest() &&
        mine.vocab_size() == first.vocab_size() && mine.architecture() == first.architecture()) {
      continue;
    }
    return absl::FailedPreconditionError(
        absl::StrFormat("rank %d (%s) loaded a checkpoint with digest %016x, rank 0 (%s) one with "
                        "%016x: give every "
                        "worker's host the same files",
                        rank, workers[rank], mine.identity().model_digest(), workers[0],
                        first.identity().model_digest()));
  }
  return absl::OkStatus();
}

}  // namespace

class Coordinator::Impl : public ServingBackend {
 public:
  explicit Impl(const CoordinatorOptions& options)
      : options_(options),
        started_(absl::Now()),
        progress_(static_cast<int>(options.workers.size())) {}
  ~Impl() override { Stop(); }

  absl::Status Listen() {
    if (!options_.journal.directory.empty()) {
      ASSIGN_OR_RETURN(journal_, Journal::Open(options_.journal));
    }
    ASSIGN_OR_RETURN(server_, PublicServer::Start(absl::StrCat(options_.host, ":", options_.port),
                                                  this, options_.generations));
    for (size_t rank = 0; rank < options_.workers.size(); ++rank) {
      server_->SetHealth(absl::StrCat("worker/", rank), false);
    }
    return absl::OkStatus();
  }

  absl::Status Load() {
    absl::Status status = LoadSteps();
    if (!status.ok()) {
      absl::MutexLock lock(&mutex_);
      failure_ = status;
    }
    return status;
  }

  absl::Status Healthy() const {
    absl::MutexLock lock(&mutex_);
    if (!failure_.ok()) return failure_;
    return engine_ == nullptr ? absl::OkStatus() : engine_->Ready();
  }

  void Drain() {
    draining_ = true;
    server_->SetReady(false);
    if (Engine* engine = EngineOrNull()) engine->Drain();
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
  }

  std::string Describe() const {
    const auto model = Model();
    if (!model.ok()) return std::string(model.status().message());
    const ServedModel& m = **model;
    const int64_t concurrent = m.kv_capacity_tokens / std::max<int64_t>(m.max_context, 1);
    return absl::StrCat("lockstep ", kVersion, " is ready\n",  //
                        "  model         ", m.name, "  (", options_.model_path, ")\n",
                        "  architecture  ", m.architecture, "\n",  //
                        "  weights       ", m.quantization, "\n",  //
                        "  digest        ", absl::StrFormat("%016x", m.checkpoint_digest), "\n",
                        "  activations   ", m.activation_dtype, ", quantization ",
                        m.activation_quant, "\n", "  ranks         ", m.tensor_parallel, "  (",
                        absl::StrJoin(options_.workers, ", "), ")\n", "  context       ",
                        m.max_context, " tokens, prompt plus output\n", "  KV cache      ",
                        m.kv_capacity_tokens, " tokens, ", concurrent, " requests of full length, ",
                        capacity_.kv_bytes >> 20, " MiB per rank\n", "  batch         ",
                        capacity_.slots, " sequences, ", capacity_.max_batch_tokens,
                        " tokens a step, ", capacity_.snapshots, " snapshots\n", "  text          ",
                        m.tokenizer == nullptr ? "no tokenizer: token ids only"
                        : m.has_chat_template  ? "text and chat"
                                               : "text",
                        "\n",  //
                        "  listening on  ", options_.host, ":", server_->port(), "\n");
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

  Engine* EngineOrNull() const {
    absl::MutexLock lock(&mutex_);
    return engine_.get();
  }
  WorkerGroup* group() const { return group_.get(); }
  int port() const { return server_->port(); }

 private:
  std::string ServedName() const {
    return options_.served_model_name.empty() ? LastPart(options_.model_path)
                                              : options_.served_model_name;
  }
  absl::Status LoadSteps();
  // The tokenizer of the model, or nothing when the checkpoint has none.
  absl::StatusOr<std::shared_ptr<const Tokenizer>> LoadTokenizer() const;
  absl::Status Join(const std::vector<LoadModelResult>& results);
  std::shared_ptr<const ServedModel> MakeModel(const std::vector<LoadModelResult>& results,
                                               std::shared_ptr<const Tokenizer> tokenizer) const;
  // The last good answer of a rank.
  struct WorkerHealth {
    worker::v1::HealthResponse last;
    absl::Time answered = absl::InfinitePast();
  };

  // OK while the rank's lease holds, else why not.
  absl::Status LeaseOf(size_t rank, const WorkerHealth& health, absl::Time now) const;
  absl::Status WorkersReady() const;
  void Monitor();
  void CheckWorkers();

  const CoordinatorOptions options_;
  const absl::Time started_;
  // Bumped with every start of a coordinator: the clock is later than that of any before.
  const uint64_t term_ = static_cast<uint64_t>(absl::ToUnixMillis(absl::Now()));
  LoadProgress progress_;
  std::unique_ptr<PublicServer> server_;
  std::unique_ptr<Journal> journal_;
  std::unique_ptr<WorkerGroup> group_;
  std::unique_ptr<StepTransport> wrapped_;  // around group_, when the options ask for it
  Capacity capacity_;
  std::atomic<uint64_t> epoch_{0};
  std::thread monitor_;
  std::atomic<bool> draining_{false};
  std::atomic<bool> stopped_{false};

  mutable absl::Mutex mutex_;
  std::unique_ptr<Engine> engine_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const ServedModel> model_ ABSL_GUARDED_BY(mutex_);  // set when ready
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);                      // of Load
  std::vector<LoadModelResult> loaded_ ABSL_GUARDED_BY(mutex_);
  std::vector<WorkerHealth> worker_health_ ABSL_GUARDED_BY(mutex_);
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

absl::Status Coordinator::Impl::Join(const std::vector<LoadModelResult>& results) {
  ASSIGN_OR_RETURN(capacity_, PlanCapacity(options_.capacity, results));
  uint64_t epoch = 0;
  for (const LoadModelResult& result : results) epoch = std::max(epoch, result.identity().epoch());
  epoch_ = epoch + 1;
  worker::v1::ConfigureRequest limits;
  limits.set_term(term_);
  limits.set_epoch(epoch_);
  limits.set_kv_blocks(capacity_.kv_blocks);
  limits.set_slots(capacity_.slots);
  limits.set_snapshots(capacity_.snapshots);
  limits.set_max_batch_tokens(capacity_.max_batch_tokens);
  limits.set_max_batch_sequences(capacity_.slots);
  limits.set_max_logit_rows(capacity_.max_logit_rows);
  limits.set_max_sequence_blocks(capacity_.max_sequence_blocks);
  return group_->Join(term_, epoch_, limits);
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
  WorkerGroupOptions group_options;
  group_options.addresses = options_.workers;
  group_options.model_path = options_.model_path;
  group_options.activation_dtype = options_.activation_dtype;
  group_options.activation_quant = options_.activation_quant;
  group_options.connect_timeout = options_.connect_timeout;
  group_ = std::make_unique<WorkerGroup>(group_options);
  ASSIGN_OR_RETURN(const std::vector<LoadModelResult> results,
                   group_->Load(term_, [this](int rank, const auto& progress) {
                     if (progress_.Update(rank, progress, absl::Now())) {
                       LogInfo("loading: ", progress_.Line());
                     }
                   }));
  LogInfo("loaded: ", progress_.Line());
  RETURN_IF_ERROR(CheckSameModel(results, options_.workers));
  if (tokenizer != nullptr && tokenizer->size() > results[0].vocab_size()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "vocabulary mismatch: tokenizer.json of ", options_.model_path, " has ids up to ",
        tokenizer->size() - 1, ", the model's vocabulary has ", results[0].vocab_size(), " ids"));
  }
  RETURN_IF_ERROR(Join(results));

  EngineOptions engine_options = options_.engine;
  engine_options.model_name = ServedName();
  engine_options.server_version = kVersion;
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
  engine->Start(term_, epoch_);
  if (draining_) engine->Drain();
  {
    absl::MutexLock lock(&mutex_);
    engine_ = std::move(engine);
    loaded_ = results;
    model_ = std::move(model);
  }
  CheckWorkers();
  CheckWorkers();
  server_->SetReady(Ready().ok());
  monitor_ = std::thread([this]() { Monitor(); });
  return absl::OkStatus();
}

void Coordinator::Impl::Monitor() {
  absl::Time next_check = absl::Now() + kWorkerHealthPeriod;
  bool ready = true;
  while (!stopped_) {
    absl::SleepFor(kReadinessPeriod);
    const bool now_ready = Ready().ok();
    if (now_ready != ready) {
      server_->SetReady(now_ready);
      LogInfo(now_ready ? "ready" : "not ready: ", now_ready ? "" : Ready().message());
    }
    ready = now_ready;
    if (absl::Now() < next_check) continue;
    CheckWorkers();
    next_check = absl::Now() + kWorkerHealthPeriod;
  }
}

void Coordinator::Impl::CheckWorkers() {
  const auto health = group_->Health(kWorkerHealthTimeout);
  const absl::Time now = absl::Now();
  std::vector<bool> serving;
  {
    absl::MutexLock lock(&mutex_);
    worker_health_.resize(options_.workers.size());
    for (size_t rank = 0; rank < options_.workers.size(); ++rank) {
      WorkerHealth& mine = worker_health_[rank];
      if (health[rank].ok()) {
        mine.last = *health[rank];
        mine.answered = now;
      }
      serving.push_back(LeaseOf(rank, mine, now).ok());
    }
  }
  for (size_t rank = 0; rank < serving.size(); ++rank) {
    server_->SetHealth(absl::StrCat("worker/", rank), serving[rank]);
  }
}

absl::Status Coordinator::Impl::LeaseOf(size_t rank, const WorkerHealth& health,
                                        absl::Time now) const {
  const std::string name = absl::StrCat("rank ", rank, " (", options_.workers[rank], ")");
  absl::Status status;
  if (now - health.answered > kWorkerLease) {
    status = absl::UnavailableError(absl::StrCat(
        name, " has not answered for ",
        absl::FormatDuration(absl::Trunc(now - health.answered, absl::Milliseconds(100)))));
  } else if (health.last.identity().term() > term_) {
    status = absl::UnavailableError(absl::StrCat(name, " belongs to another coordinator, of term ",
                                                 health.last.identity().term(), "; this one's is ",
                                                 term_));
  } else if (health.last.state() != worker::v1::READY && health.last.state() != worker::v1::BUSY) {
    status = absl::UnavailableError(
        absl::StrCat(name, " is in state ", worker::v1::WorkerState_Name(health.last.state()),
                     health.last.error().empty() ? "" : ": ", health.last.error()));
  }
  return status;
}

absl::Status Coordinator::Impl::WorkersReady() const {
  absl::MutexLock lock(&mutex_);
  for (size_t rank = 0; rank < worker_health_.size(); ++rank) {
    RETURN_IF_ERROR(LeaseOf(rank, worker_health_[rank], absl::Now()));
  }
  return absl::OkStatus();
}

ServerStatus Coordinator::Impl::Status() const {
  ServerStatus status;
  status.set_version(kVersion);
  status.set_term(term_);
  status.set_epoch(epoch_);
  status.set_uptime_seconds(absl::ToInt64Seconds(absl::Now() - started_));
  const absl::Status ready = Ready();
  const absl::Status healthy = Healthy();
  Engine* engine = EngineOrNull();
  status.set_state(!healthy.ok()       ? "FAILED"
                   : draining_         ? "DRAINING"
                   : engine == nullptr ? "LOADING"
                   : ready.ok()        ? "READY"
                                       : "NOT_READY");
  if (!ready.ok()) status.set_state_detail(std::string(ready.message()));
  {
    absl::MutexLock lock(&mutex_);
    for (size_t rank = 0; rank < options_.workers.size(); ++rank) {
      auto* worker = status.add_workers();
      worker->set_rank(static_cast<int32_t>(rank));
      worker->set_address(options_.workers[rank]);
      worker->set_load_progress(progress_.FractionOf(static_cast<int>(rank)));
      if (rank < loaded_.size()) {
        worker->set_worker_id(loaded_[rank].identity().worker_id());
        worker->set_resident_bytes(loaded_[rank].resident_bytes());
      }
      worker->set_state("UNKNOWN");
      if (rank < worker_health_.size()) {
        const WorkerHealth& health = worker_health_[rank];
        if (absl::Now() - health.answered <= kWorkerLease) {
          worker->set_state(worker::v1::WorkerState_Name(health.last.state()));
        }
        worker->set_last_step(health.last.last_step());
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

absl::StatusOr<std::unique_ptr<Coordinator>> Coordinator::Start(const CoordinatorOptions& options) {
  auto impl = std::make_unique<Impl>(options);
  RETURN_IF_ERROR(impl->Listen());
  return std::unique_ptr<Coordinator>(new Coordinator(std::move(impl)));
}

Coordinator::Coordinator(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Coordinator::~Coordinator() = default;
int Coordinator::port() const { return impl_->port(); }
absl::Status Coordinator::Load() { return impl_->Load(); }
absl::Status Coordinator::Healthy() const { return impl_->Healthy(); }
void Coordinator::Drain() { impl_->Drain(); }
bool Coordinator::Idle() const { return impl_->Idle(); }
void Coordinator::Stop() { impl_->Stop(); }
void Coordinator::EndCalls() { impl_->EndCalls(); }
std::string Coordinator::Describe() const { return impl_->Describe(); }
Engine* Coordinator::engine() { return impl_->EngineOrNull(); }
WorkerGroup* Coordinator::workers() { return impl_->group(); }

}  // namespace lockstep
