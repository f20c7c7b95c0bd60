// PinnedBuffer: page-locked host memory that a device reads and writes by the same address, and
// that asynchronous copies need. Move-only. For the CPU it is plain memory.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/tensor_view.h"

namespace lockstep {

class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  ~PinnedBuffer();
  PinnedBuffer(PinnedBuffer&& other) noexcept;
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept;
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  // Zeroed, 64-byte aligned. ResourceExhausted names the bytes asked for; Unimplemented when this
  // build has no such device.
  static absl::StatusOr<PinnedBuffer> Allocate(DeviceType device, int64_t bytes);

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
  DeviceType device_ = DeviceType::kCpu;
};

// Copies inside a device, or between it and pinned memory, in the order of `stream`; returns at
// once. On the CPU it copies at once; the two may overlap. Internal carries the vendor's message.
absl::Status CopyAsync(DeviceType device, void* to, const void* from, int64_t bytes, void* stream);

namespace cuda_memory {

absl::StatusOr<void*> AllocatePinned(int64_t bytes);
void FreePinned(void* data);
absl::Status CopyAsync(void* to, const void* from, int64_t bytes, void* stream);

}  // namespace cuda_memory
}  // namespace lockstep
