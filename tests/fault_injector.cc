#include "tests/fault_injector.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/base/check.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"
#include "models/model.h"

namespace lockstep {
namespace testing {
namespace {

namespace pb = worker::v1;

constexpr absl::Duration kOvertakeTime = absl::Milliseconds(100);

[[noreturn]] void Abort() {
  const rlimit none = {0, 0};
  setrlimit(RLIMIT_CORE, &none);
  signal(SIGABRT, SIG_DFL);
  std::abort();
}

// Stops the process; a child continues it.
void StopAndResume(absl::Duration time) {
  const timespec wait = absl::ToTimespec(time);
  const pid_t parent = getpid();
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    // Only what is safe after a fork of threads; no socket of the worker stays open here.
    close_range(0, ~0U, 0);
    nanosleep(&wait, nullptr);
    if (getppid() == parent) kill(parent, SIGCONT);
    _exit(0);
  }
  raise(SIGSTOP);
  waitpid(child, nullptr, 0);
}

// One write, so that lines of several processes do not mix.
void AppendLine(const std::string& path, const std::string& line) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  CHECK(fd >= 0) << path;
  CHECK_EQ(write(fd, line.data(), line.size()), static_cast<ssize_t>(line.size())) << path;
  close(fd);
}

// Who reads sees the old text or the new one.
void WriteWhole(const std::string& path, const std::string& text) {
  std::ofstream(path + ".new") << text;
  CHECK_EQ(rename((path + ".new").c_str(), path.c_str()), 0) << path;
}

// A model with faults around its forward pass.
class FaultyModel : public Model {
 public:
  FaultyModel(std::unique_ptr<Model> inner, FaultInjector* faults)
      : inner_(std::move(inner)), faults_(faults) {}

  const CacheSpec& cache_spec() const override { return inner_->cache_spec(); }
  int64_t vocab_size() const override { return inner_->vocab_size(); }
  int64_t local_vocab_rows() const override { return inner_->local_vocab_rows(); }
  const Linear* FindLinear(const std::string& module) const override {
    return inner_->FindLinear(module);
  }

  absl::Status Forward(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                       const CacheViews& caches, TensorView logits) const override {
    if (ctx->dry_run()) return inner_->Forward(ctx, comm, batch, caches, logits);
    faults_->CheckPoison(static_cast<const int32_t*>(batch.tokens.data), batch.num_tokens);
    const bool prefill = batch.num_tokens > batch.num_sequences;
    RETURN_IF_ERROR(faults_->At(prefill ? FaultPhase::kPrefill : FaultPhase::kDecode));
    RETURN_IF_ERROR(inner_->Forward(ctx, comm, batch, caches, logits));
    if (batch.num_logits == 0) return absl::OkStatus();
    RETURN_IF_ERROR(faults_->At(FaultPhase::kSampling));
    if (faults_->TakeNan()) *logits.row<float>(0) = std::numeric_limits<float>::quiet_NaN();
    return absl::OkStatus();
  }

 private:
  const std::unique_ptr<Model> inner_;
  FaultInjector* const faults_;
};

// The calls of the service with faults before them.
class FaultyService : public WorkerServiceImpl {
 public:
  FaultyService(Worker* worker, FaultInjector* faults)
      : WorkerServiceImpl(worker, faults), faults_(faults) {}

  grpc::Status PrepareComm(grpc::ServerContext* context, const pb::PrepareCommRequest* request,
                           pb::PrepareCommResponse* response) override {
    const absl::Status fault = faults_->At(FaultPhase::kPrepare);
    if (!fault.ok()) return ToGrpcStatus(fault);
    return WorkerServiceImpl::PrepareComm(context, request, response);
  }
  grpc::Status InitComm(grpc::ServerContext* context, const pb::InitCommRequest* request,
                        pb::InitCommResponse* response) override {
    const absl::Status fault = faults_->At(FaultPhase::kInit);
    if (!fault.ok()) return ToGrpcStatus(fault);
    return WorkerServiceImpl::InitComm(context, request, response);
  }
  grpc::Status Configure(grpc::ServerContext* context, const pb::ConfigureRequest* request,
                         pb::ConfigureResponse* response) override {
    const absl::Status fault = faults_->At(FaultPhase::kConfigure);
    if (!fault.ok()) return ToGrpcStatus(fault);
    return WorkerServiceImpl::Configure(context, request, response);
  }
  grpc::Status Drain(grpc::ServerContext* context, const pb::DrainRequest* request,
                     pb::DrainResponse* response) override {
    const absl::Status fault = faults_->At(FaultPhase::kDrain);
    if (!fault.ok()) return ToGrpcStatus(fault);
    return WorkerServiceImpl::Drain(context, request, response);
  }
  grpc::Status Health(grpc::ServerContext* context, const pb::HealthRequest* request,
                      pb::HealthResponse* response) override {
    const grpc::Status status = WorkerServiceImpl::Health(context, request, response);
    if (!status.ok() || response->state() != pb::READY) return status;
    return ToGrpcStatus(faults_->At(FaultPhase::kIdle));
  }

 private:
  FaultInjector* const faults_;
};

}  // namespace

ModelLoader FaultInjector::WrapLoader(ModelLoader inner) {
  return [this, inner = std::move(inner)](
             const LoadSpec& spec, Counters* counters,
             const LoadProgressFn& progress) -> absl::StatusOr<LoadedModel> {
    if (spec.device != DeviceType::kCpu) {
      return absl::InvalidArgumentError("a worker with faults computes on the cpu only");
    }
    {
      std::lock_guard<std::mutex> lock(mu_);
      rank_ = spec.rank;
    }
    RETURN_IF_ERROR(At(FaultPhase::kLoad));
    ASSIGN_OR_RETURN(LoadedModel loaded, inner(spec, counters, progress));
    loaded.model = std::make_unique<FaultyModel>(std::move(loaded.model), this);
    return loaded;
  };
}

std::unique_ptr<WorkerServiceImpl> FaultInjector::MakeService(Worker* worker) {
  steps_ = worker;
  return std::make_unique<FaultyService>(worker, this);
}

bool FaultInjector::Fires(const FaultRule& rule, int64_t occurrence) {
  if (rule.occurrence != occurrence) return false;
  if (!options_.once_file.empty()) {
    std::ifstream fired(options_.once_file);
    std::string line;
    while (std::getline(fired, line)) {
      if (line == rule.text) return false;
    }
    AppendLine(options_.once_file, rule.text + "\n");
  }
  LogWarning("fault: ", rule.text);
  return true;
}

bool FaultInjector::TakeStrike(FaultPhase phase, FaultRule* rule) {
  if (options_.strike_prefix.empty()) return false;
  std::lock_guard<std::mutex> lock(mu_);
  if (rank_ < 0) return false;
  const std::string path = absl::StrCat(options_.strike_prefix, ".", rank_);
  std::ifstream file(path);
  std::string text;
  if (!std::getline(file, text)) return false;
  const absl::StatusOr<FaultRule> parsed = ParseFaultRule(text);
  CHECK(parsed.ok()) << parsed.status().message();
  if (text != strike_) {
    strike_ = text;
    strike_occurrences_ = 0;
  }
  if (parsed->phase != phase || ++strike_occurrences_ < parsed->occurrence) return false;
  strike_.clear();
  std::ostringstream rest;
  rest << file.rdbuf();
  if (rest.str().empty()) {
    CHECK_EQ(unlink(path.c_str()), 0) << path;
  } else {
    WriteWhole(path, rest.str());
  }
  LogWarning("fault: ", text);
  *rule = *parsed;
  return true;
}

absl::Status FaultInjector::At(FaultPhase phase) {
  int64_t occurrence = 0;
  {
    std::lock_guard<std::mutex> lock(mu_);
    occurrence = ++occurrences_[phase];
  }
  for (const FaultRule& rule : options_.rules) {
    if (rule.phase == phase && Fires(rule, occurrence)) RETURN_IF_ERROR(Do(rule));
  }
  FaultRule strike;
  return TakeStrike(phase, &strike) ? Do(strike) : absl::OkStatus();
}

absl::Status FaultInjector::Do(const FaultRule& rule) {
  switch (rule.kind) {
    case FaultKind::kKill:
      raise(SIGKILL);
      break;
    case FaultKind::kAbort:
      Abort();
    case FaultKind::kExit0:
      _exit(0);
    case FaultKind::kExit1:
      _exit(1);
    case FaultKind::kStop:
      raise(SIGSTOP);
      break;
    case FaultKind::kStopResume:
      StopAndResume(rule.time);
      break;
    case FaultKind::kDelay:
      absl::SleepFor(rule.time);
      break;
    case FaultKind::kError:
      return absl::InternalError(absl::StrCat("fault: ", rule.text));
    case FaultKind::kOom:
      return absl::ResourceExhaustedError(absl::StrCat("fault: ", rule.text));
    default: {
      std::lock_guard<std::mutex> lock(mu_);
      of_step_.push_back(rule.kind);
    }
  }
  return absl::OkStatus();
}

bool FaultInjector::TakeNan() {
  std::lock_guard<std::mutex> lock(mu_);
  const auto end = std::remove(of_step_.begin(), of_step_.end(), FaultKind::kNan);
  const bool nan = end != of_step_.end();
  of_step_.erase(end, of_step_.end());
  return nan;
}

void FaultInjector::CheckPoison(const int32_t* ids, int64_t count) const {
  for (const int32_t poison : options_.poison_ids) {
    if (std::find(ids, ids + count, poison) == ids + count) continue;
    LogWarning("fault: token ", poison, " is in a step");
    Abort();
  }
}

// ---- steps ----

absl::StatusOr<uint64_t> FaultInjector::OpenStream(std::function<void(const absl::Status&)> ended) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    held_.clear();
    of_step_.clear();
    ended_ = ended;
  }
  return steps_->OpenStream(std::move(ended));
}

void FaultInjector::CloseStream(uint64_t token, const absl::Status& status) {
  steps_->CloseStream(token, status);
}

void FaultInjector::Submit(uint64_t token, pb::StepRequest request, StepExecutor::Done done) {
  const pb::StepRequest copy = request;
  steps_->Submit(token, std::move(request),
                 [this, copy, done = std::move(done)](absl::StatusOr<pb::StepResult> result) {
                   Deliver(copy, std::move(result), done);
                 });
}

void FaultInjector::Deliver(const pb::StepRequest& request, absl::StatusOr<pb::StepResult> result,
                            const StepExecutor::Done& done) {
  std::vector<FaultKind> kinds;
  std::vector<Held> held;
  std::function<void(const absl::Status&)> ended;
  {
    std::lock_guard<std::mutex> lock(mu_);
    kinds.swap(of_step_);
    held.swap(held_);
    ended = ended_;
  }
  int copies = 1;
  for (const FaultKind kind : kinds) {
    if (!result.ok()) break;
    if (kind == FaultKind::kDigest) result->set_result_digest(result->result_digest() ^ 1);
    if (kind == FaultKind::kDuplicateResult) ++copies;
    if (kind == FaultKind::kCorruptResult) {
      // What only one rank sends cannot be compared with the others.
      if (result->sequences_size() > 0) {
        auto* sequence = result->mutable_sequences(0);
        sequence->set_sampled_id(sequence->sampled_id() ^ 1);
      } else {
        result->set_batch_digest(result->batch_digest() ^ 1);
      }
    }
    if (kind == FaultKind::kReorderResults) {
      std::lock_guard<std::mutex> lock(mu_);
      held_.push_back({*std::move(result), done});
      release_.Arm(kOvertakeTime);
      copies = 0;
      break;
    }
    if (kind == FaultKind::kDropStream) {
      ended(absl::UnavailableError("fault: the step stream is dropped"));
      copies = 0;
      break;
    }
  }
  if (copies > 0 && result.ok()) WriteLedger(request);
  for (int i = 0; i < copies; ++i) done(result);
  for (Held& late : held) late.done(std::move(late.result));
}

void FaultInjector::ReleaseHeld() {
  std::vector<Held> held;
  {
    std::lock_guard<std::mutex> lock(mu_);
    held.swap(held_);
  }
  for (Held& late : held) late.done(std::move(late.result));
}

void FaultInjector::WriteLedger(const pb::StepRequest& request) const {
  if (options_.ledger.empty()) return;
  pb::StepPlan plan;
  CHECK(plan.ParseFromString(request.plan()));  // the step has run
  std::string lines;
  for (const pb::SequenceEntry& entry : plan.sequences()) {
    if (!entry.sample()) continue;
    const int64_t tokens = entry.sampled_in_step() != 0 ? 1 : entry.token_ids_size();
    absl::StrAppend(&lines, request.epoch(), " ", request.step_id(), " ", entry.slot(), " ",
                    entry.generation(), " ", entry.position() + tokens, "\n");
  }
  if (!lines.empty()) AppendLine(options_.ledger, lines);
}

}  // namespace testing
}  // namespace lockstep
