#include "kernels/comm/push_comm_group.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/hash.h"
#include "kernels/base/status_macros.h"
#include "kernels/comm/collective_checks.h"
#include "kernels/comm/push_launch.h"
#include "kernels/comm/push_memory.h"
#include "kernels/runtime/device_buffer.h"
#include "kernels/runtime/device_memory.h"
#include "kernels/runtime/launch_status.h"
#include "kernels/runtime/pinned_buffer.h"

namespace lockstep {

#if !defined(KERNELS_WITH_CUDA)
namespace push_memory {
namespace {

absl::Status NoCuda() {
  return absl::UnimplementedError("push: this build has no cuda; build with --config=cuda");
}

}  // namespace

absl::StatusOr<std::string> Export(void*) { return NoCuda(); }
absl::StatusOr<void*> Open(const std::string&) { return NoCuda(); }
void Close(void*) {}

}  // namespace push_memory

// Never reached: without CUDA no group can be made.
LaunchStatus LaunchPushAllReduce(const PushChannel*, int, float*, int64_t, void*) {
  return LaunchStatus{1};
}
LaunchStatus LaunchPushAllGather(const PushChannel*, int, const uint32_t*, int64_t, uint32_t*,
                                 int64_t, void*) {
  return LaunchStatus{1};
}
LaunchStatus LaunchPushAgree(const PushChannel*, uint64_t, void*) { return LaunchStatus{1}; }

#endif

namespace {

constexpr int64_t kSlots = 2;

// What a rank allocates: the arena that peers write, and what its own kernels keep.
struct PushMemory {
  DeviceBuffer arena;    // [world][kSlots][capacity] packets: messages of each rank
  DeviceBuffer words;    // sequence, ended, failed
  DeviceBuffer channel;  // the PushChannel
  PinnedBuffer host;     // the abort word, then the PushFailureRecord

  static constexpr int64_t kRecordOffset = 64;
  PushFailureRecord* record() const {
    return reinterpret_cast<PushFailureRecord*>(static_cast<uint8_t*>(host.data()) + kRecordOffset);
  }
  uint32_t* abort() const { return static_cast<uint32_t*>(host.data()); }
};

int64_t CapacityOf(const PushOptions& options) {
  return options.message_bytes / (kPushPacketWords * 4);
}

absl::StatusOr<PushMemory> AllocateMemory(int world, int64_t capacity) {
  constexpr DeviceType kCuda = DeviceType::kCuda;
  PushMemory m;
  ASSIGN_OR_RETURN(m.arena,
                   DeviceBuffer::Allocate(kCuda, world * kSlots * capacity * kPushPacketBytes));
  ASSIGN_OR_RETURN(m.words, DeviceBuffer::Allocate(kCuda, 256));
  ASSIGN_OR_RETURN(m.channel, DeviceBuffer::Allocate(kCuda, sizeof(PushChannel)));
  ASSIGN_OR_RETURN(m.host, PinnedBuffer::Allocate(kCuda, 256));
  RETURN_IF_ERROR(SynchronizeDevice(kCuda));
  return m;
}

// arenas[r]: the arena of rank r as this process sees it.
absl::Status WriteChannel(const PushMemory& m, int rank, const std::vector<void*>& arenas,
                          int64_t capacity, absl::Duration timeout) {
  PushChannel channel;
  channel.rank = rank;
  channel.world = static_cast<int>(arenas.size());
  channel.capacity = capacity;
  const int64_t pair_bytes = kSlots * capacity * kPushPacketBytes;
  for (size_t r = 0; r < arenas.size(); ++r) {
    channel.to[r] = static_cast<uint8_t*>(arenas[r]) + rank * pair_bytes;
    channel.from[r] = static_cast<uint8_t*>(m.arena.data()) + static_cast<int64_t>(r) * pair_bytes;
  }
  uint32_t* words = static_cast<uint32_t*>(m.words.data());
  channel.sequence = words;
  channel.ended = words + 16;
  channel.failed = words + 32;
  channel.abort = m.abort();
  channel.record = m.record();
  channel.timeout_ns = static_cast<uint64_t>(absl::ToInt64Nanoseconds(timeout));
  return CopyBytes(DeviceType::kCuda, m.channel.data(), DeviceType::kCpu, &channel,
                   sizeof(channel));
}

class PushCommGroup : public CommGroup {
 public:
  PushCommGroup(int rank, int world, uint64_t epoch, int64_t capacity, PushMemory memory,
                std::unique_ptr<CommGroup> control, std::vector<void*> opened)
      : rank_(rank),
        world_(world),
        epoch_(epoch),
        piece_(capacity * kPushPacketWords),
        memory_(std::move(memory)),
        control_(std::move(control)),
        opened_(std::move(opened)) {}

  ~PushCommGroup() override {
    // Kernels of this rank may still read the peers' memory.
    (void)SynchronizeDevice(DeviceType::kCuda);
    for (void* data : opened_) push_memory::Close(data);
  }

  int rank() const override { return rank_; }
  int size() const override { return world_; }
  uint64_t epoch() const override { return epoch_; }

  void BeginStep(uint64_t step_id, uint64_t digest) override {
    step_id_ = step_id;
    agreement_ = Fold64(Fold64(Fold64(0, epoch_), step_id), digest);
  }

  absl::Status AllReduce(ExecContext* ctx, TensorView data) override {
    RETURN_IF_ERROR(CheckAllReduce(data));
    if (ctx->dry_run()) return absl::OkStatus();
    RETURN_IF_ERROR(Begin(ctx, data.bytes()));
    float* values = static_cast<float*>(data.data);
    const int64_t n = data.shape.num_elements();
    for (int64_t i = 0; i < n; i += piece_) {
      RETURN_IF_ERROR(
          ToStatus("push all_reduce", LaunchPushAllReduce(channel(), world_, values + i,
                                                          std::min(piece_, n - i), ctx->stream)));
    }
    return absl::OkStatus();
  }

  absl::Status AllGather(ExecContext* ctx, ConstTensorView local, TensorView out) override {
    RETURN_IF_ERROR(CheckAllGather(local, out, world_));
    if (local.bytes() % 4 != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("all_gather: ", local.ToString(), " has no whole number of 32-bit words"));
    }
    if (ctx->dry_run()) return absl::OkStatus();
    RETURN_IF_ERROR(Begin(ctx, local.bytes()));
    const int64_t n = local.bytes() / 4;
    const uint32_t* words = static_cast<const uint32_t*>(local.data);
    uint32_t* gathered = static_cast<uint32_t*>(out.data);
    for (int64_t i = 0; i < n; i += piece_) {
      RETURN_IF_ERROR(
          ToStatus("push all_gather",
                   LaunchPushAllGather(channel(), world_, words + i, std::min(piece_, n - i),
                                       gathered + i, n, ctx->stream)));
    }
    return absl::OkStatus();
  }

  absl::Status Barrier(ExecContext* ctx) override {
    if (ctx->dry_run()) return absl::OkStatus();
    RETURN_IF_ERROR(Begin(ctx, 8));
    return ToStatus("push barrier", LaunchPushAgree(channel(), agreement_, ctx->stream));
  }

  absl::Status Check() override {
    std::lock_guard<std::mutex> lock(mu_);
    if (error_.ok()) error_ = ReadRecord();
    return error_;
  }

  void Abort(absl::string_view reason) override {
    {
      std::lock_guard<std::mutex> lock(mu_);
      if (abort_reason_.empty()) abort_reason_ = std::string(reason);
      if (error_.ok()) error_ = absl::AbortedError(reason);
    }
    __atomic_store_n(memory_.abort(), 1u, __ATOMIC_RELEASE);
    if (control_ != nullptr) control_->Abort(reason);
  }

 private:
  const PushChannel* channel() const {
    return static_cast<const PushChannel*>(memory_.channel.data());
  }

  absl::Status Begin(ExecContext* ctx, int64_t bytes) {
    ctx->counters->collectives.fetch_add(1, std::memory_order_relaxed);
    ctx->counters->Add(Traffic::kCollectivesSent, bytes * (world_ - 1));
    return Check();
  }

  absl::Status ReadRecord() const {
    const PushFailureRecord& r = *memory_.record();
    const uint32_t failure =
        __atomic_load_n(reinterpret_cast<const uint32_t*>(&r.failure), __ATOMIC_ACQUIRE);
    const std::string where = absl::StrCat("push: rank ", rank_, " in step ", step_id_,
                                           " of epoch ", epoch_, ", collective ", r.sequence);
    switch (static_cast<PushFailure>(failure)) {
      case PushFailure::kNone:
        return absl::OkStatus();
      case PushFailure::kTimeout:
        return absl::DeadlineExceededError(
            absl::StrCat(where, ": rank ", r.peer, " sent nothing within the time bound"));
      case PushFailure::kAborted:
        return absl::AbortedError(abort_reason_.empty() ? where : abort_reason_);
      case PushFailure::kDisagreed:
        return absl::FailedPreconditionError(
            absl::StrCat(where, ": the ranks do not run the same step: agreement ",
                         absl::Hex(r.mine), " here, ", absl::Hex(r.theirs), " at rank ", r.peer));
    }
    return absl::InternalError(absl::StrCat(where, ": unknown failure ", failure));
  }

  const int rank_;
  const int world_;
  const uint64_t epoch_;
  const int64_t piece_;  // words of a message
  PushMemory memory_;
  std::unique_ptr<CommGroup> control_;
  const std::vector<void*> opened_;
  uint64_t step_id_ = 0;
  uint64_t agreement_ = 0;
  std::mutex mu_;
  absl::Status error_;        // guarded by mu_
  std::string abort_reason_;  // guarded by mu_
};

}  // namespace

absl::StatusOr<std::unique_ptr<CommGroup>> MakePushCommGroup(std::unique_ptr<CommGroup> control,
                                                             const PushOptions& options) {
  const int world = control->size();
  const int rank = control->rank();
  CHECK(world >= 2 && world <= kMaxPushRanks) << world << " ranks ";
  const int64_t capacity = CapacityOf(options);
  // A rank that fails still gives its peers an answer: an empty handle.
  std::string handle(static_cast<size_t>(push_memory::kHandleBytes), 0);
  absl::StatusOr<PushMemory> memory = AllocateMemory(world, capacity);
  absl::Status status = memory.status();
  if (status.ok()) {
    absl::StatusOr<std::string> exported = push_memory::Export(memory->arena.data());
    status = exported.status();
    if (status.ok()) handle = *std::move(exported);
  }
  Counters uncounted;
  ExecContext host;
  Workspace scratch;
  RETURN_IF_ERROR(scratch.Allocate(DeviceType::kCpu, 1 << 16));
  host.workspace = &scratch;
  host.counters = &uncounted;
  const Shape local_shape = {push_memory::kHandleBytes};
  std::string all(static_cast<size_t>(world) * handle.size(), 0);
  control->BeginStep(0, control->epoch());
  RETURN_IF_ERROR(control->AllGather(
      &host, ConstTensorView(handle.data(), DType::kU8, local_shape),
      TensorView(all.data(), DType::kU8, Shape{world, push_memory::kHandleBytes})));
  std::vector<void*> arenas(static_cast<size_t>(world), nullptr);
  std::vector<void*> opened;
  for (int r = 0; r < world && status.ok(); ++r) {
    if (r == rank) {
      arenas[static_cast<size_t>(r)] = memory->arena.data();
      continue;
    }
    absl::StatusOr<void*> peer =
        push_memory::Open(all.substr(static_cast<size_t>(r) * handle.size(), handle.size()));
    status = peer.status();
    if (!status.ok()) {
      status = absl::Status(status.code(), absl::StrCat("rank ", r, ": ", status.message()));
      break;
    }
    arenas[static_cast<size_t>(r)] = *peer;
    opened.push_back(*peer);
  }
  if (status.ok()) {
    status = WriteChannel(*memory, rank, arenas, capacity, options.timeout);
  }
  // No rank pushes before every rank is ready.
  const absl::Status together = status.ok() ? control->Barrier(&host) : status;
  if (!together.ok()) {
    for (void* data : opened) push_memory::Close(data);
    control->Abort(together.message());
    return together;
  }
  const uint64_t epoch = control->epoch();
  return std::unique_ptr<CommGroup>(std::make_unique<PushCommGroup>(
      rank, world, epoch, capacity, *std::move(memory), std::move(control), std::move(opened)));
}

absl::StatusOr<std::vector<std::unique_ptr<CommGroup>>> MakeLocalPushCommGroups(
    int world, uint64_t epoch, const PushOptions& options) {
  const int64_t capacity = CapacityOf(options);
  std::vector<PushMemory> memories;
  std::vector<void*> arenas;
  for (int r = 0; r < world; ++r) {
    ASSIGN_OR_RETURN(PushMemory memory, AllocateMemory(world, capacity));
    arenas.push_back(memory.arena.data());
    memories.push_back(std::move(memory));
  }
  std::vector<std::unique_ptr<CommGroup>> groups;
  for (int r = 0; r < world; ++r) {
    PushMemory& memory = memories[static_cast<size_t>(r)];
    RETURN_IF_ERROR(WriteChannel(memory, r, arenas, capacity, options.timeout));
    groups.push_back(std::make_unique<PushCommGroup>(r, world, epoch, capacity, std::move(memory),
                                                     nullptr, std::vector<void*>()));
  }
  return groups;
}

}  // namespace lockstep
