#include "worker/step_executor.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "kernels/base/check.h"
#include "kernels/base/hash.h"
#include "kernels/base/log.h"
#include "kernels/base/result_digest.h"
#include "kernels/base/status_macros.h"
#include "kernels/runtime/device_memory.h"
#include "kernels/runtime/device_stream.h"

namespace lockstep {
namespace {

using worker::v1::SequenceResult;
using worker::v1::StepRequest;
using worker::v1::StepResult;

// The rows of logits of a step, in the batch's order.
std::vector<LogitRow> LogitRows(const PlannedStep& step) {
  std::vector<LogitRow> rows;
  for (const PlannedSequence& sequence : step.sequences) {
    for (int64_t i = 0; i < sequence.num_logits; ++i) {
      LogitRow row;
      if (sequence.sample && i + 1 == sequence.num_logits) {
        row.slot = sequence.slot;
        row.position = sequence.start + sequence.num_tokens;
      }
      rows.push_back(row);
    }
  }
  return rows;
}

std::vector<int32_t> ToVector(const google::protobuf::RepeatedField<int32_t>& ids) {
  return std::vector<int32_t>(ids.begin(), ids.end());
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

StepExecutor::StepExecutor(DeviceType device, Counters* counters,
                           std::function<absl::Status()> check_device)
    : device_(device),
      counters_(counters),
      check_device_(check_device ? std::move(check_device)
                                 : [device] { return GetDeviceInfo(device).status(); }),
      pool_(std::make_unique<ThreadPool>(1)) {
  thread_ = std::thread([this] { Loop(); });
}

StepExecutor::~StepExecutor() {
  EndEpoch(absl::CancelledError("the worker stops"));
  {
    std::lock_guard<std::mutex> lock(mu_);
    stop_ = true;
    stop_requested_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

// ---- the queue ----

void StepExecutor::Loop() {
  device_status_ = OpenDevice();
  bool after_step = false;
  std::unique_lock<std::mutex> lock(mu_);
  for (;;) {
    if (!in_flight_.empty()) {
      const bool step_follows = !queue_.empty() && !queue_.front().fn;
      const bool full = in_flight_.size() >= static_cast<size_t>(StepSampler::kTickets);
      if (full || !step_follows) {
        // Nothing to queue yet: the oldest step may end meanwhile.
        lock.unlock();
        const bool wait = full || stop_requested_ || has_function_;
        const bool collected = CollectOldest(wait);
        if (!collected) std::this_thread::yield();
        lock.lock();
        SetBusy(!in_flight_.empty());
        continue;
      }
    }
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
    SetBusy(!in_flight_.empty());
  }
}

void StepExecutor::SetBusy(bool busy) {
  busy_ = busy;
  has_function_ = !queue_.empty() && static_cast<bool>(queue_.front().fn);
  if (!busy) idle_.notify_all();
}

absl::Status StepExecutor::OpenDevice() {
  ASSIGN_OR_RETURN(stream_, DeviceStream::Create(device_));
  for (DeviceEvent& event : events_) {
    ASSIGN_OR_RETURN(event, DeviceEvent::Create(device_));
  }
  return absl::OkStatus();
}

void StepExecutor::RunJob(Job job) {
  if (job.fn) {
    job.fn();
    return;
  }
  InFlight step;
  step.launched = absl::Now();
  step.queued = job.queued;
  step.done = std::move(job.done);
  if (in_flight_.empty()) running_since_ = absl::ToUnixNanos(step.launched);
  bool refused = false;
  const absl::Status launched = broken_.ok() ? LaunchStep(job.request, &step, &refused) : broken_;
  if (refused) refused_steps_.fetch_add(1);
  if (launched.ok()) {
    in_flight_.push_back(std::move(step));
    // A CPU has computed everything by now.
    if (device_ == DeviceType::kCpu) CollectOldest(/*wait=*/true);
    return;
  }
  // Results leave in order.
  while (!in_flight_.empty()) CollectOldest(/*wait=*/true);
  running_since_ = 0;
  Fail(launched);
  step.done(launched);
}

void StepExecutor::Fail(const absl::Status& status) {
  if (!broken_.ok()) return;
  broken_ = status;
  // Peers that wait for this rank in a collective end at once.
  if (comm_ != nullptr) comm_->Abort(broken_.message());
  CheckDevice();
}

void StepExecutor::CheckDevice() {
  if (device_lost_) return;
  const absl::Status device = check_device_();
  if (device.ok() || device_lost_.exchange(true)) return;
  LogError("the device is lost, restart the process: ", device.ToString());
}

bool StepExecutor::CollectOldest(bool wait) {
  InFlight& oldest = in_flight_.front();
  const DeviceEvent& event = events_[oldest.ticket];
  absl::StatusOr<bool> done = event.Done();
  while (wait && done.ok() && !*done) {
    std::this_thread::yield();
    done = event.Done();
  }
  if (done.ok() && !*done) return false;
  InFlight step = std::move(oldest);
  in_flight_.pop_front();
  absl::Status status = done.status();
  if (status.ok()) status = CollectStep(&step);
  const absl::Time now = absl::Now();
  const absl::Time start = std::max(step.launched, last_collected_);
  last_collected_ = now;
  running_since_ = in_flight_.empty() ? 0 : absl::ToUnixNanos(now);
  if (!status.ok()) {
    Fail(status);
    step.done(status);
    return true;
  }
  const int64_t micros = absl::ToInt64Microseconds(now - start);
  step_micros_.fetch_add(micros);
  steps_.fetch_add(1);
  last_step_ = step.result.step_id();
  step.result.set_step_micros(micros);
  step.result.set_queue_micros(absl::ToInt64Microseconds(step.launched - step.queued));
  step.done(std::move(step.result));
  return true;
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
    has_function_ = static_cast<bool>(queue_.front().fn);
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
  ctx.stream = stream_ == nullptr ? nullptr : stream_->handle();
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
    graphs_.clear();  // they hold the addresses of the old group
    comm_ = std::move(comm);
    slots_.reset();
    broken_ = absl::OkStatus();
    last_step_ = 0;
  });
}

void StepExecutor::Release() {
  RunAndWait([&] {
    graphs_.clear();
    comm_.reset();
    slots_.reset();
    sampler_.reset();
    arena_ = CacheArena();
    builder_ = BatchBuilder();
    workspace_ = Workspace();
    limits_ = BatchLimits();
    broken_ = absl::OkStatus();
    last_step_ = 0;
  });
}

absl::Status StepExecutor::Run(
    const std::function<absl::Status(ExecContext* ctx, const Model* model, CommGroup* comm)>& fn) {
  absl::Status status;
  RunAndWait([&] {
    Workspace counting(device_);
    ExecContext ctx = Context(&counting);
    status = fn(&ctx, model_.get(), comm_.get());
    if (!status.ok()) CheckDevice();
  });
  return status;
}

namespace {

// Before anything is allocated: what the limits need must fit into the memory of the device.
absl::Status CheckMemory(DeviceType device, const CacheSpec& spec, const BatchLimits& limits,
                         int64_t workspace_bytes) {
  const double kv =
      static_cast<double>(limits.kv_blocks) * static_cast<double>(spec.BytesPerKvBlock());
  const double slots = static_cast<double>(limits.slots) * static_cast<double>(spec.BytesPerSlot());
  const double snapshots =
      static_cast<double>(limits.snapshots) * static_cast<double>(spec.BytesPerSnapshot());
  const double workspace = static_cast<double>(workspace_bytes);
  ASSIGN_OR_RETURN(const DeviceInfo info, GetDeviceInfo(device));
  const double total = static_cast<double>(info.total_bytes);
  if (kv + slots + snapshots + workspace <= total) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrFormat(
      "the limits need %.3f GB (%.3f for %d KV blocks, %.3f for %d slots, %.3f for %d snapshots, "
      "%.3f for the workspace), this %s has %.3f GB; lower the limits",
      (kv + slots + snapshots + workspace) * 1e-9, kv * 1e-9, limits.kv_blocks, slots * 1e-9,
      limits.slots, snapshots * 1e-9, limits.snapshots, workspace * 1e-9,
      device == DeviceType::kCpu ? "machine" : "device", total * 1e-9));
}

}  // namespace

absl::StatusOr<StepExecutor::Sizes> StepExecutor::Configure(BatchLimits limits) {
  Sizes sizes;
  absl::Status status;
  const auto configure = [&]() -> absl::Status {
    slots_.reset();  // steps are refused unless all of this succeeds
    if (model_ == nullptr || comm_ == nullptr) {
      return absl::FailedPreconditionError("configure: there is no model or no group");
    }
    RETURN_IF_ERROR(device_status_);
    limits.vocab_size = model_->vocab_size();
    for (const CacheSpec::SlotTensor& t : model_->cache_spec().slot_tensors) {
      limits.stateful = limits.stateful || t.snapshot;
    }
    RETURN_IF_ERROR(limits.Validate());
    int64_t workspace_bytes = 0;
    RETURN_IF_ERROR(SizeWorkspace(limits, &workspace_bytes));
    RETURN_IF_ERROR(CheckMemory(device_, model_->cache_spec(), limits, workspace_bytes));
    if (limits == limits_ && workspace_bytes <= workspace_.capacity()) {
      RETURN_IF_ERROR(arena_.ZeroAll(stream_.get()));
    } else {
      limits_ = BatchLimits();
      graphs_.clear();
      arena_ = CacheArena();
      workspace_ = Workspace();
      ASSIGN_OR_RETURN(arena_, CacheArena::Allocate(device_, model_->cache_spec(), limits.kv_blocks,
                                                    limits.slots, limits.snapshots));
      ASSIGN_OR_RETURN(builder_, BatchBuilder::Create(device_, limits));
      RETURN_IF_ERROR(workspace_.Allocate(device_, workspace_bytes));
      limits_ = limits;
    }
    slots_ = std::make_unique<SlotTable>(limits);
    graphs_.clear();  // and those of the old sampler
    ASSIGN_OR_RETURN(sampler_, MakeStepSampler(stream_.get(), limits, counters_));
    broken_ = absl::OkStatus();
    next_step_ = 1;
    digest_ = 0;
    last_step_ = 0;
    sizes = {arena_.bytes(), workspace_.capacity()};
    return absl::OkStatus();
  };
  RunAndWait([&] {
    status = configure();
    if (!status.ok()) CheckDevice();
  });
  RETURN_IF_ERROR(status);
  return sizes;
}

absl::Status StepExecutor::SizeWorkspace(const BatchLimits& limits, int64_t* bytes) {
  Workspace counting(device_);
  ExecContext ctx = Context(&counting);
  CacheViews caches;
  for (const CacheSpec::KvLayer& layer : model_->cache_spec().kv_layers) {
    const TensorView view(nullptr, model_->cache_spec().kv_dtype,
                          Shape{limits.kv_blocks, layer.num_kv_heads, kGrid, layer.head_dim},
                          device_);
    caches.kv_layers.push_back({view, view});
  }
  for (const CacheSpec::SlotTensor& t : model_->cache_spec().slot_tensors) {
    Shape slots = {limits.slots}, snapshots = {limits.snapshots};
    for (int i = 0; i < t.shape.rank(); ++i) {
      slots.push_back(t.shape[i]);
      snapshots.push_back(t.shape[i]);
    }
    caches.slot_tensors.emplace_back(nullptr, t.dtype, slots, device_);
    caches.snapshot_tensors.push_back(t.snapshot ? TensorView(nullptr, t.dtype, snapshots, device_)
                                                 : TensorView());
  }
  const ForwardBatch batch = BatchBuilder::Largest(device_, limits);
  ASSIGN_OR_RETURN(const auto sampler, MakeStepSampler(stream_.get(), limits, counters_));
  ConstTensorView gathered;
  RETURN_IF_ERROR(Compute(&ctx, batch, caches, sampler.get(), &gathered));
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

absl::Status StepExecutor::LaunchStep(const StepRequest& request, InFlight* step, bool* refused) {
  *refused = true;
  RETURN_IF_ERROR(CheckRequest(request));
  worker::v1::StepPlan plan;
  if (!plan.ParseFromString(request.plan())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "step ", request.step_id(), ": ", request.plan().size(), " bytes are no StepPlan"));
  }
  absl::StatusOr<PlannedStep> planned = slots_->Admit(request.step_id(), plan);
  if (!planned.ok()) {
    return absl::Status(
        planned.status().code(),
        absl::StrCat("step ", request.step_id(), " refused: ", planned.status().message()));
  }
  *refused = false;
  next_step_ = request.step_id() + 1;
  digest_ = request.batch_digest();
  step->plan = *std::move(planned);
  if (device_ == DeviceType::kCuda) {
    // Few widths of block tables, so that few graphs are captured.
    int64_t columns = 1;
    while (columns < step->plan.table_columns) columns *= 2;
    step->plan.table_columns = std::min(columns, limits_.max_sequence_blocks);
  }
  step->ticket = static_cast<int>(request.step_id() % StepSampler::kTickets);
  step->result.set_epoch(request.epoch());
  step->result.set_step_id(request.step_id());
  step->result.set_batch_digest(digest_);

  comm_->BeginStep(request.step_id(), digest_);
  ExecContext ctx = Context(&workspace_);
  if (step->plan.sequences.empty()) {
    // Nothing but releases: the ranks still compare their digests.
    RETURN_IF_ERROR(comm_->Barrier(&ctx));
    return stream_->Record(&events_[step->ticket]);
  }
  // Transports that queue their work say nothing of the step in their messages: they compare it
  // here.
  if (device_ == DeviceType::kCuda) RETURN_IF_ERROR(comm_->Barrier(&ctx));
  RETURN_IF_ERROR(sampler_->BeginStep());
  RETURN_IF_ERROR(BeginSequences(&ctx, plan, step->plan));
  ASSIGN_OR_RETURN(const ForwardBatch batch, builder_.Build(stream_.get(), plan, step->plan,
                                                            *slots_, step->ticket, counters_));
  RETURN_IF_ERROR(sampler_->Stage(&ctx, LogitRows(step->plan), step->ticket));
  Workspace::Scope scope(&workspace_);
  ConstTensorView gathered;
  RETURN_IF_ERROR(ComputeOrReplay(&ctx, batch, step->plan, &gathered));
  RETURN_IF_ERROR(sampler_->Finish(&ctx, step->ticket));
  for (const PlannedSequence& sequence : step->plan.sequences) {
    if (sequence.sample) slots_->Samples(sequence.slot, request.step_id());
  }
  RETURN_IF_ERROR(stream_->Record(&events_[step->ticket]));
  return CopyLogits(gathered, step);
}

// Steps that only decode have few shapes: each is captured once and queued as one graph from then
// on. The first step of a shape runs op by op, so that everything it needs is loaded.
absl::Status StepExecutor::ComputeOrReplay(ExecContext* ctx, const ForwardBatch& batch,
                                           const PlannedStep& plan, ConstTensorView* gathered) {
  const CacheViews& caches = arena_.views();
  const bool logits_leave = std::any_of(plan.sequences.begin(), plan.sequences.end(),
                                        [](const auto& s) { return s.return_logits; });
  const bool decodes = batch.num_tokens == batch.num_sequences &&
                       batch.num_logits == batch.num_sequences && batch.num_snapshots == 0;
  if (device_ != DeviceType::kCuda || !decodes || logits_leave) {
    return Compute(ctx, batch, caches, sampler_.get(), gathered);
  }
  StepGraph& entry = graphs_[{batch.num_sequences, batch.block_table.shape[1]}];
  if (!entry.seen) {
    entry.seen = true;
    return Compute(ctx, batch, caches, sampler_.get(), gathered);
  }
  if (entry.graph.empty()) {
    const int64_t before = counters_->op_launches.load();
    RETURN_IF_ERROR(stream_->BeginCapture());
    const absl::Status captured = Compute(ctx, batch, caches, sampler_.get(), gathered);
    absl::StatusOr<DeviceGraph> graph = stream_->EndCapture();
    RETURN_IF_ERROR(captured);
    RETURN_IF_ERROR(graph.status());
    entry.graph = *std::move(graph);
    entry.op_launches = counters_->op_launches.exchange(before) - before;
  }
  counters_->op_launches.fetch_add(entry.op_launches, std::memory_order_relaxed);
  counters_->graph_launches.fetch_add(1, std::memory_order_relaxed);
  return stream_->Launch(entry.graph);
}

absl::Status StepExecutor::BeginSequences(ExecContext* ctx, const worker::v1::StepPlan& plan,
                                          const PlannedStep& step) {
  for (size_t b = 0; b < step.sequences.size(); ++b) {
    const PlannedSequence& sequence = step.sequences[b];
    if (!sequence.begin) continue;
    if (sequence.restore_snapshot >= 0) {
      RETURN_IF_ERROR(arena_.RestoreSlot(stream_.get(), sequence.slot, sequence.restore_snapshot));
    } else {
      RETURN_IF_ERROR(arena_.ZeroSlot(stream_.get(), sequence.slot));
    }
    const auto& begin = plan.sequences(static_cast<int>(b)).begin();
    RETURN_IF_ERROR(sampler_->Begin(ctx, sequence.slot, slots_->params(sequence.slot),
                                    ToVector(begin.prompt_ids()), ToVector(begin.output_ids())));
  }
  return absl::OkStatus();
}

// From token ids to sampled ones.
absl::Status StepExecutor::Compute(ExecContext* ctx, const ForwardBatch& batch,
                                   const CacheViews& caches, StepSampler* sampler,
                                   ConstTensorView* gathered) {
  RETURN_IF_ERROR(sampler->Feed(ctx, batch));
  const int64_t local = model_->local_vocab_rows();
  TensorView logits = ctx->workspace->Take(DType::kF32, {batch.num_logits, local});
  TensorView pieces = ctx->workspace->Take(DType::kF32, {comm_->size(), batch.num_logits, local});
  RETURN_IF_ERROR(model_->Forward(ctx, comm_.get(), batch, caches, logits));
  *gathered = pieces;
  if (batch.num_logits == 0) return absl::OkStatus();
  RETURN_IF_ERROR(comm_->AllGather(ctx, logits, pieces));
  return sampler->Launch(ctx, pieces);
}

// For evaluation: logits leave the device only when a sequence asks for them, and only rank 0's.
absl::Status StepExecutor::CopyLogits(ConstTensorView gathered, InFlight* step) {
  bool wanted = false;
  for (const PlannedSequence& sequence : step->plan.sequences) wanted |= sequence.return_logits;
  if (!wanted || comm_->rank() != 0) return absl::OkStatus();
  RETURN_IF_ERROR(stream_->Synchronize());
  const int64_t vocab = limits_.vocab_size;
  const int64_t rows = gathered.shape[1];
  const int64_t local = gathered.shape[2];
  int64_t row = 0;
  for (const PlannedSequence& sequence : step->plan.sequences) {
    std::string bytes;
    for (int64_t i = 0; i < sequence.num_logits; ++i, ++row) {
      if (!sequence.return_logits) continue;
      for (int64_t c = 0; c < vocab; c += local) {
        const float* from =
            static_cast<const float*>(gathered.data) + (c / local * rows + row) * local;
        const size_t size = static_cast<size_t>(std::min(local, vocab - c)) * sizeof(float);
        bytes.resize(bytes.size() + size);
        RETURN_IF_ERROR(CopyBytes(DeviceType::kCpu, bytes.data() + bytes.size() - size, device_,
                                  from, static_cast<int64_t>(size)));
      }
    }
    step->logits.push_back(std::move(bytes));
  }
  return absl::OkStatus();
}

absl::Status StepExecutor::CollectStep(InFlight* step) {
  RETURN_IF_ERROR(comm_->Check());
  if (step->plan.sequences.empty()) return absl::OkStatus();
  std::vector<SampleResult> rows;
  RETURN_IF_ERROR(sampler_->Collect(step->ticket, &rows));
  ResultDigest digest;
  size_t row = 0;
  for (size_t b = 0; b < step->plan.sequences.size(); ++b) {
    const PlannedSequence& sequence = step->plan.sequences[b];
    SequenceResult out;
    out.set_slot(sequence.slot);
    out.set_generation(sequence.generation);
    out.set_sampled_id(-1);
    for (int64_t i = 0; i < sequence.num_logits; ++i, ++row) {
      out.add_digests(rows[row].digest);
      if (rows[row].nan) out.set_nan(true);
      digest.AddLogits(rows[row].digest);
    }
    if (sequence.sample) {
      const SampleResult& sample = rows[row - 1];
      out.set_sampled_id(sample.nan ? -1 : sample.id);
      digest.AddSampled(out.sampled_id());
      FillLogprobs(sample, slots_->params(sequence.slot).num_logprobs, &out);
    }
    if (!step->logits.empty()) out.set_logits(std::move(step->logits[b]));
    counters_->Add(Traffic::kResultsToHost, 8 * sequence.num_logits + (sequence.sample ? 5 : 0));
    counters_->Add(Traffic::kLogitsToHost, static_cast<int64_t>(out.logits().size()) +
                                               8 * static_cast<int64_t>(out.logprobs_size()));
    if (comm_->rank() == 0) *step->result.add_sequences() = std::move(out);
  }
  step->result.set_result_digest(digest.value());
  return absl::OkStatus();
}

}  // namespace lockstep
