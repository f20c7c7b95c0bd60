#include "worker/step_executor.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "kernels/base/check.h"
#include "kernels/base/hash.h"
#include "kernels/base/status_macros.h"
#include "kernels/rows/rows.h"
#include "kernels/sampling/sampling.h"

namespace lockstep {
namespace {

using worker::v1::SequenceResult;
using worker::v1::StepRequest;
using worker::v1::StepResult;

// Rows of a step in the order in which they are assembled: sampled ones first, so that they are one
// tensor, then those that give digests only. Indices are rows of batch.logit_rows.
struct RowOrder {
  std::vector<int32_t> order;
  int64_t num_sampled = 0;
};

RowOrder OrderRows(const PlannedStep& step) {
  RowOrder rows;
  std::vector<int32_t> others;
  int32_t row = 0;
  for (const PlannedSequence& sequence : step.sequences) {
    for (int64_t i = 0; i < sequence.num_logits; ++i, ++row) {
      const bool sampled = sequence.sample && i + 1 == sequence.num_logits;
      (sampled ? rows.order : others).push_back(row);
    }
  }
  rows.num_sampled = static_cast<int64_t>(rows.order.size());
  rows.order.insert(rows.order.end(), others.begin(), others.end());
  return rows;
}

bool HasNan(const float* row, int64_t n) {
  bool nan = false;
  for (int64_t i = 0; i < n; ++i) nan |= std::isnan(row[i]);
  return nan;
}

void FillLogprobs(const SampleResult& sample, int num_logprobs, SequenceResult* result) {
  if (num_logprobs < 0 || sample.nan) return;
  worker::v1::Logprob* first = result->add_logprobs();
  first->set_id(sample.id);
  first->set_logprob(sample.logprob);
  for (const auto& top : sample.top_logprobs) {
    worker::v1::Logprob* entry = result->add_logprobs();
    entry->set_id(top.first);
    entry->set_logprob(top.second);
  }
}

}  // namespace

StepExecutor::StepExecutor(DeviceType device, Counters* counters)
    : device_(device), counters_(counters), pool_(std::make_unique<ThreadPool>(1)) {
  thread_ = std::thread([this] { Loop(); });
}

StepExecutor::~StepExecutor() {
  EndEpoch(absl::CancelledError("the worker stops"));
  {
    std::lock_guard<std::mutex> lock(mu_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

// ---- the queue ----

void StepExecutor::Loop() {
  bool after_step = false;
  std::unique_lock<std::mutex> lock(mu_);
  for (;;) {
    if (queue_.empty() && !stop_) {
      const bool open = stream_open_;
      if (open && after_step) idle_waits_.fetch_add(1);
      const absl::Time start = absl::Now();
      wake_.wait(lock, [&] { return !queue_.empty() || stop_ || stream_open_ != open; });
      if (open) idle_micros_.fetch_add(absl::ToInt64Microseconds(absl::Now() - start));
      after_step = false;
      continue;
    }
    if (queue_.empty()) return;
    Job job = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    after_step = !job.fn;
    lock.unlock();
    RunJob(std::move(job));
    lock.lock();
    busy_ = false;
    idle_.notify_all();
  }
}

void StepExecutor::RunJob(Job job) {
  if (job.fn) {
    job.fn();
    return;
  }
  const absl::Time start = absl::Now();
  running_since_ = absl::ToUnixNanos(start);
  bool refused = false;
  absl::StatusOr<StepResult> result = broken_.ok() ? RunStep(job.request, &refused) : broken_;
  running_since_ = 0;
  if (refused) refused_steps_.fetch_add(1);
  if (result.ok()) {
    const int64_t micros = absl::ToInt64Microseconds(absl::Now() - start);
    step_micros_.fetch_add(micros);
    steps_.fetch_add(1);
    result->set_step_micros(micros);
    result->set_queue_micros(absl::ToInt64Microseconds(start - job.queued));
  } else if (broken_.ok()) {
    broken_ = result.status();
    // Peers that wait for this rank in a collective end at once.
    if (comm_ != nullptr) comm_->Abort(broken_.message());
  }
  job.done(std::move(result));
}

void StepExecutor::Submit(StepRequest request, Done done) {
  {
    std::lock_guard<std::mutex> lock(mu_);
    queue_.push_back({nullptr, std::move(request), std::move(done), absl::Now()});
  }
  wake_.notify_all();
}

void StepExecutor::RunAndWait(const std::function<void()>& fn) {
  std::mutex mu;
  std::condition_variable cv;
  bool finished = false;
  {
    std::lock_guard<std::mutex> lock(mu_);
    Job job;
    job.fn = [&] {
      fn();
      // Notified under the lock: the waiting thread owns both and may destroy them right after.
      std::lock_guard<std::mutex> done_lock(mu);
      finished = true;
      cv.notify_all();
    };
    queue_.push_back(std::move(job));
  }
  wake_.notify_all();
  std::unique_lock<std::mutex> lock(mu);
  cv.wait(lock, [&] { return finished; });
}

void StepExecutor::OpenStream() {
  std::lock_guard<std::mutex> lock(mu_);
  stream_open_ = true;
  wake_.notify_all();
}

void StepExecutor::EndEpoch(const absl::Status& reason) {
  std::vector<Done> dropped;
  {
    std::lock_guard<std::mutex> lock(mu_);
    stream_open_ = false;
    std::deque<Job> kept;
    for (Job& job : queue_) {
      if (job.fn) {
        kept.push_back(std::move(job));
      } else {
        dropped.push_back(std::move(job.done));
      }
    }
    queue_ = std::move(kept);
    wake_.notify_all();
    idle_.notify_all();
  }
  for (const Done& done : dropped) done(reason);
}

bool StepExecutor::WaitUntilIdle(absl::Time deadline) {
  std::unique_lock<std::mutex> lock(mu_);
  return idle_.wait_until(lock, absl::ToChronoTime(deadline),
                          [&] { return queue_.empty() && !busy_; });
}

StepExecutor::Stats StepExecutor::stats() const {
  Stats s;
  s.steps = steps_;
  s.refused_steps = refused_steps_;
  s.last_step = last_step_;
  s.step_micros = step_micros_;
  s.idle_micros = idle_micros_;
  s.idle_waits = idle_waits_;
  const int64_t since = running_since_;
  s.running = since != 0;
  if (s.running)
    s.running_millis = std::max<int64_t>(1, (absl::GetCurrentTimeNanos() - since) / 1000000);
  return s;
}

// ---- set-up ----

ExecContext StepExecutor::Context(Workspace* workspace) {
  ExecContext ctx;
  ctx.device = device_;
  ctx.pool = pool_.get();
  ctx.workspace = workspace;
  ctx.counters = counters_;
  return ctx;
}

void StepExecutor::SetModel(std::unique_ptr<Model> model, int threads) {
  RunAndWait([&] {
    model_ = std::move(model);
    pool_ = std::make_unique<ThreadPool>(threads);
  });
}

void StepExecutor::SetComm(std::shared_ptr<CommGroup> comm) {
  RunAndWait([&] {
    comm_ = std::move(comm);
    slots_.reset();
    broken_ = absl::OkStatus();
    last_step_ = 0;
  });
}

void StepExecutor::Run(
    const std::function<void(ExecContext* ctx, const Model* model, CommGroup* comm)>& fn) {
  RunAndWait([&] {
    Workspace counting;
    ExecContext ctx = Context(&counting);
    fn(&ctx, model_.get(), comm_.get());
  });
}

namespace {

// Before anything is allocated: what the limits need must fit into the memory of the machine.
absl::Status CheckMemory(const CacheSpec& spec, const BatchLimits& limits,
                         int64_t workspace_bytes) {
  const double kv =
      static_cast<double>(limits.kv_blocks) * static_cast<double>(spec.BytesPerKvBlock());
  const double slots = static_cast<double>(limits.slots) * static_cast<double>(spec.BytesPerSlot());
  const double snapshots =
      static_cast<double>(limits.snapshots) * static_cast<double>(spec.BytesPerSnapshot());
  const double workspace = static_cast<double>(workspace_bytes);
  const double total =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  if (kv + slots + snapshots + workspace <= total) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrFormat(
      "the limits need %.3f GB (%.3f for %d KV blocks, %.3f for %d slots, %.3f for %d snapshots, "
      "%.3f "
      "for the workspace), this machine has %.3f GB; lower the limits",
      (kv + slots + snapshots + workspace) * 1e-9, kv * 1e-9, limits.kv_blocks, slots * 1e-9,
      limits.slots, snapshots * 1e-9, limits.snapshots, workspace * 1e-9, total * 1e-9));
}

}  // namespace

absl::StatusOr<StepExecutor::Sizes> StepExecutor::Configure(BatchLimits limits) {
  Sizes sizes;
  absl::Status status;
  const auto configure = [&]() -> absl::Status {
    if (model_ == nullptr || comm_ == nullptr) {
      return absl::FailedPreconditionError("configure: there is no model or no group");
    }
    limits.vocab_size = model_->vocab_size();
    for (const CacheSpec::SlotTensor& t : model_->cache_spec().slot_tensors) {
      limits.stateful = limits.stateful || t.snapshot;
    }
    RETURN_IF_ERROR(limits.Validate());
    int64_t workspace_bytes = 0;
    RETURN_IF_ERROR(SizeWorkspace(limits, &workspace_bytes));
    RETURN_IF_ERROR(CheckMemory(model_->cache_spec(), limits, workspace_bytes));
    if (limits == limits_ && workspace_bytes <= workspace_.capacity()) {
      arena_.ZeroAll();
    } else {
      limits_ = BatchLimits();
      arena_ = CacheArena();
      workspace_ = Workspace();
      ASSIGN_OR_RETURN(arena_, CacheArena::Allocate(device_, model_->cache_spec(), limits.kv_blocks,
                                                    limits.slots, limits.snapshots));
      ASSIGN_OR_RETURN(builder_, BatchBuilder::Create(device_, limits));
      RETURN_IF_ERROR(workspace_.Allocate(device_, workspace_bytes));
      limits_ = limits;
    }
    slots_ = std::make_unique<SlotTable>(limits);
    broken_ = absl::OkStatus();
    next_step_ = 1;
    digest_ = 0;
    last_step_ = 0;
    sizes = {arena_.bytes(), workspace_.capacity()};
    return absl::OkStatus();
  };
  RunAndWait([&] { status = configure(); });
  RETURN_IF_ERROR(status);
  return sizes;
}

absl::Status StepExecutor::SizeWorkspace(const BatchLimits& limits, int64_t* bytes) {
  Workspace counting;
  ExecContext ctx = Context(&counting);
  CacheViews caches;
  for (const CacheSpec::KvLayer& layer : model_->cache_spec().kv_layers) {
    const TensorView view(nullptr, model_->cache_spec().kv_dtype,
                          Shape{limits.kv_blocks, layer.num_kv_heads, kGrid, layer.head_dim});
    caches.kv_layers.push_back({view, view});
  }
  for (const CacheSpec::SlotTensor& t : model_->cache_spec().slot_tensors) {
    Shape slots = {limits.slots}, snapshots = {limits.snapshots};
    for (int i = 0; i < t.shape.rank(); ++i) {
      slots.push_back(t.shape[i]);
      snapshots.push_back(t.shape[i]);
    }
    caches.slot_tensors.emplace_back(nullptr, t.dtype, slots);
    caches.snapshot_tensors.push_back(t.snapshot ? TensorView(nullptr, t.dtype, snapshots)
                                                 : TensorView());
  }
  const ForwardBatch batch = BatchBuilder::Largest(limits);
  const TensorView rows = counting.Take(DType::kF32, {batch.num_logits, limits.vocab_size});
  const TensorView order(nullptr, DType::kI32, {batch.num_logits}, device_);
  RETURN_IF_ERROR(Logits(&ctx, batch, caches, order, rows));
  const SamplingState state;
  std::vector<SampleResult> samples;
  const size_t max_sampled = static_cast<size_t>(std::min(batch.num_sequences, batch.num_logits));
  RETURN_IF_ERROR(Sample(&ctx, rows.Rows(0, static_cast<int64_t>(max_sampled)), limits.vocab_size,
                         std::vector<const SamplingState*>(max_sampled, &state),
                         std::vector<int64_t>(max_sampled, 0), &samples));
  *bytes = counting.peak();
  return absl::OkStatus();
}

// ---- one step ----

absl::Status StepExecutor::CheckRequest(const StepRequest& request) const {
  if (slots_ == nullptr || comm_ == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("step ", request.step_id(), ": no epoch is configured"));
  }
  if (request.epoch() != comm_->epoch()) {
    return absl::FailedPreconditionError(absl::StrCat(
        request.epoch() < comm_->epoch() ? "STALE_EPOCH: " : "", "step ", request.step_id(),
        " is of epoch ", request.epoch(), ", this rank is in epoch ", comm_->epoch()));
  }
  if (request.step_id() != next_step_) {
    return absl::FailedPreconditionError(absl::StrCat("step ", request.step_id(), " of epoch ",
                                                      request.epoch(), " was sent, step ",
                                                      next_step_, " was expected"));
  }
  const uint64_t digest = Fold64(digest_, HashBytes(request.plan()));
  if (request.batch_digest() != digest) {
    return absl::FailedPreconditionError(absl::StrCat(
        "step ", request.step_id(), ": batch digest ", absl::Hex(request.batch_digest()),
        " was sent, the plan and the steps before give ", absl::Hex(digest)));
  }
  return absl::OkStatus();
}

absl::StatusOr<StepResult> StepExecutor::RunStep(const StepRequest& request, bool* refused) {
  *refused = true;
  RETURN_IF_ERROR(CheckRequest(request));
  worker::v1::StepPlan plan;
  if (!plan.ParseFromString(request.plan())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "step ", request.step_id(), ": ", request.plan().size(), " bytes are no StepPlan"));
  }
  absl::StatusOr<PlannedStep> step = slots_->Admit(request.step_id(), plan);
  if (!step.ok()) {
    return absl::Status(step.status().code(), absl::StrCat("step ", request.step_id(),
                                                           " refused: ", step.status().message()));
  }
  *refused = false;
  next_step_ = request.step_id() + 1;
  digest_ = request.batch_digest();

  StepResult result;
  result.set_epoch(request.epoch());
  result.set_step_id(request.step_id());
  result.set_batch_digest(digest_);
  comm_->BeginStep(request.step_id(), digest_);
  if (step->sequences.empty()) {
    // Nothing but releases: the ranks still compare their digests.
    ExecContext ctx = Context(&workspace_);
    RETURN_IF_ERROR(comm_->Barrier(&ctx));
  } else {
    for (const PlannedSequence& sequence : step->sequences) {
      if (!sequence.begin) continue;
      if (sequence.restore_snapshot >= 0) {
        arena_.RestoreSlot(sequence.slot, sequence.restore_snapshot);
      } else {
        arena_.ZeroSlot(sequence.slot);
      }
    }
    const ForwardBatch batch = builder_.Build(plan, *step, *slots_, counters_);
    RETURN_IF_ERROR(Compute(batch, *step, request.step_id(), &result));
  }
  last_step_ = request.step_id();
  return result;
}

// rows[i] = whole row order[i] of the batch's logits.
absl::Status StepExecutor::Logits(ExecContext* ctx, const ForwardBatch& batch,
                                  const CacheViews& caches, ConstTensorView order,
                                  TensorView rows) {
  Workspace::Scope scope(ctx->workspace);
  const int64_t local = model_->local_vocab_rows();
  TensorView logits = ctx->workspace->Take(DType::kF32, {batch.num_logits, local});
  TensorView gathered = ctx->workspace->Take(DType::kF32, {comm_->size(), batch.num_logits, local});
  RETURN_IF_ERROR(model_->Forward(ctx, comm_.get(), batch, caches, logits));
  if (batch.num_logits == 0) return absl::OkStatus();
  RETURN_IF_ERROR(comm_->AllGather(ctx, logits, gathered));
  return AssembleLogits(ctx, gathered, order, rows);
}

absl::Status StepExecutor::Compute(const ForwardBatch& batch, const PlannedStep& step,
                                   uint64_t step_id, StepResult* result) {
  ExecContext ctx = Context(&workspace_);
  Workspace::Scope scope(&workspace_);
  const int64_t vocab = limits_.vocab_size;
  const RowOrder rows = OrderRows(step);
  TensorView logits = workspace_.Take(DType::kF32, {batch.num_logits, vocab});
  const ConstTensorView order(rows.order.data(), DType::kI32, {batch.num_logits});
  RETURN_IF_ERROR(Logits(&ctx, batch, arena_.views(), order, logits));

  std::vector<const SamplingState*> states;
  std::vector<int64_t> positions;
  for (const PlannedSequence& sequence : step.sequences) {
    if (!sequence.sample) continue;
    states.push_back(&slots_->sampling(sequence.slot));
    positions.push_back(sequence.start + sequence.num_tokens);
  }
  std::vector<SampleResult> samples;
  if (rows.num_sampled > 0) {
    RETURN_IF_ERROR(
        Sample(&ctx, logits.Rows(0, rows.num_sampled), vocab, states, positions, &samples));
  }
  // Digest, and whether there is a NaN, of each row of the batch.
  std::vector<uint64_t> digests(static_cast<size_t>(batch.num_logits));
  std::vector<uint8_t> nan(static_cast<size_t>(batch.num_logits));
  std::vector<int64_t> assembled(static_cast<size_t>(batch.num_logits));
  pool_->ParallelFor(batch.num_logits, [&](int64_t i) {
    const size_t row = static_cast<size_t>(rows.order[static_cast<size_t>(i)]);
    const bool sampled = i < rows.num_sampled;
    const SampleResult* sample = sampled ? &samples[static_cast<size_t>(i)] : nullptr;
    assembled[row] = i;
    digests[row] = sampled ? sample->digest : LogitsDigest(logits.row<float>(i), vocab);
    nan[row] = sampled ? sample->nan : HasNan(logits.row<float>(i), vocab);
  });

  uint64_t result_digest = 0;
  size_t row = 0;
  size_t next_sample = 0;
  for (const PlannedSequence& sequence : step.sequences) {
    SequenceResult out;
    out.set_slot(sequence.slot);
    out.set_generation(sequence.generation);
    out.set_sampled_id(-1);
    for (int64_t i = 0; i < sequence.num_logits; ++i, ++row) {
      out.add_digests(digests[row]);
      if (nan[row] != 0) out.set_nan(true);
      result_digest = Fold64(result_digest, digests[row]);
      if (sequence.return_logits && comm_->rank() == 0) {
        out.mutable_logits()->append(
            reinterpret_cast<const char*>(logits.row<float>(assembled[row])),
            static_cast<size_t>(vocab) * sizeof(float));
      }
    }
    if (sequence.sample) {
      const SampleResult& sample = samples[next_sample++];
      const int num_logprobs = slots_->sampling(sequence.slot).params().num_logprobs;
      out.set_sampled_id(sample.nan ? -1 : sample.id);
      result_digest = Fold64(result_digest, static_cast<uint32_t>(out.sampled_id()));
      FillLogprobs(sample, num_logprobs, &out);
      slots_->Sampled(sequence.slot, step_id, out.sampled_id());
    }
    counters_->Add(Traffic::kResultsToHost, 8 * sequence.num_logits + (sequence.sample ? 5 : 0));
    counters_->Add(Traffic::kLogitsToHost, static_cast<int64_t>(out.logits().size()) +
                                               8 * static_cast<int64_t>(out.logprobs_size()));
    if (comm_->rank() == 0) *result->add_sequences() = std::move(out);
  }
  result->set_result_digest(result_digest);
  return absl::OkStatus();
}

}  // namespace lockstep
