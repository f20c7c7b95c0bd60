#include "worker/cache_arena.h"

#include <utility>

#include "kernels/base/status_macros.h"
#include "kernels/runtime/pinned_buffer.h"

namespace lockstep {
namespace {

Shape Stack(int64_t count, const Shape& shape) {
  Shape stacked = {count};
  for (int i = 0; i < shape.rank(); ++i) stacked.push_back(shape[i]);
  return stacked;
}

}  // namespace

absl::StatusOr<TensorView> CacheArena::Take(DeviceType device, DType dtype, const Shape& shape) {
  const int64_t bytes = shape.num_elements() * SizeOf(dtype);
  ASSIGN_OR_RETURN(DeviceBuffer buffer, DeviceBuffer::Allocate(device, bytes));
  bytes_ += bytes;
  buffers_.push_back(std::move(buffer));
  return buffers_.back().View(dtype, shape);
}

absl::StatusOr<CacheArena> CacheArena::Allocate(DeviceType device, const CacheSpec& spec,
                                                int64_t kv_blocks, int64_t slots,
                                                int64_t snapshots) {
  CacheArena arena;
  for (const CacheSpec::KvLayer& layer : spec.kv_layers) {
    const Shape shape = {kv_blocks, layer.num_kv_heads, kGrid, layer.head_dim};
    KvCacheView view;
    ASSIGN_OR_RETURN(view.keys, arena.Take(device, spec.kv_dtype, shape));
    ASSIGN_OR_RETURN(view.values, arena.Take(device, spec.kv_dtype, shape));
    arena.views_.kv_layers.push_back(view);
  }
  for (const CacheSpec::SlotTensor& tensor : spec.slot_tensors) {
    ASSIGN_OR_RETURN(TensorView slot_view,
                     arena.Take(device, tensor.dtype, Stack(slots, tensor.shape)));
    TensorView snapshot_view(nullptr, tensor.dtype, Stack(snapshots, tensor.shape), device);
    if (tensor.snapshot && snapshots > 0) {
      ASSIGN_OR_RETURN(snapshot_view,
                       arena.Take(device, tensor.dtype, Stack(snapshots, tensor.shape)));
    } else if (!tensor.snapshot) {
      snapshot_view = TensorView();
    }
    arena.views_.slot_tensors.push_back(slot_view);
    arena.views_.snapshot_tensors.push_back(snapshot_view);
  }
  return arena;
}

absl::Status CacheArena::ZeroAll(DeviceStream* stream) {
  for (const DeviceBuffer& buffer : buffers_) {
    RETURN_IF_ERROR(stream->Zero(buffer.data(), buffer.bytes()));
  }
  return absl::OkStatus();
}

absl::Status CacheArena::ZeroSlot(DeviceStream* stream, int32_t slot) {
  for (size_t i = 0; i < views_.slot_tensors.size(); ++i) {
    if (views_.snapshot_tensors[i].shape.rank() == 0) continue;
    const TensorView row = views_.slot_tensors[i].Rows(slot, 1);
    RETURN_IF_ERROR(stream->Zero(row.data, row.bytes()));
  }
  return absl::OkStatus();
}

absl::Status CacheArena::RestoreSlot(DeviceStream* stream, int32_t slot, int32_t snapshot) {
  for (size_t i = 0; i < views_.slot_tensors.size(); ++i) {
    if (views_.snapshot_tensors[i].shape.rank() == 0) continue;
    const TensorView to = views_.slot_tensors[i].Rows(slot, 1);
    const TensorView from = views_.snapshot_tensors[i].Rows(snapshot, 1);
    RETURN_IF_ERROR(CopyAsync(stream->device(), to.data, from.data, to.bytes(), stream->handle()));
  }
  return absl::OkStatus();
}

}  // namespace lockstep
