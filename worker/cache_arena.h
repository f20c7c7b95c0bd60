// CacheArena: the memory of one rank's caches: KV blocks, slot states and their snapshots, as a
// CacheSpec asks. Allocated once per Configure; steps allocate nothing. One thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/runtime/device_buffer.h"
#include "kernels/runtime/device_stream.h"
#include "models/model.h"

namespace lockstep {

class CacheArena {
 public:
  // Zeroed. ResourceExhausted names the bytes that did not fit.
  static absl::StatusOr<CacheArena> Allocate(DeviceType device, const CacheSpec& spec,
                                             int64_t kv_blocks, int64_t slots, int64_t snapshots);

  const CacheViews& views() const { return views_; }
  int64_t bytes() const { return bytes_; }

  // All of these are queued on the stream.
  absl::Status ZeroAll(DeviceStream* stream);
  // The snapshotted tensors of a slot, at the start of a sequence: zero, or those of a snapshot.
  absl::Status ZeroSlot(DeviceStream* stream, int32_t slot);
  absl::Status RestoreSlot(DeviceStream* stream, int32_t slot, int32_t snapshot);

 private:
  absl::StatusOr<TensorView> Take(DeviceType device, DType dtype, const Shape& shape);

  std::vector<DeviceBuffer> buffers_;
  CacheViews views_;
  int64_t bytes_ = 0;
};

}  // namespace lockstep
