#include "kernels/runtime/pinned_buffer.h"

#include <cstring>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "kernels/runtime/device_memory.h"

namespace lockstep {

#if !defined(KERNELS_WITH_CUDA)
namespace cuda_memory {
namespace {

absl::Status NoCuda() {
  return absl::UnimplementedError(
      "pinned memory: this build has no cuda; build with --config=cuda or use the cpu");
}

}  // namespace

absl::StatusOr<void*> AllocatePinned(int64_t) { return NoCuda(); }
void FreePinned(void*) { CHECK(false) << "this build has no cuda "; }
absl::Status CopyAsync(void*, const void*, int64_t, void*) { return NoCuda(); }

}  // namespace cuda_memory
#endif

PinnedBuffer::~PinnedBuffer() {
  if (data_ == nullptr) return;
  device_ == DeviceType::kCuda ? cuda_memory::FreePinned(data_) : FreeBytes(device_, data_);
}

PinnedBuffer::PinnedBuffer(PinnedBuffer&& other) noexcept { *this = std::move(other); }

PinnedBuffer& PinnedBuffer::operator=(PinnedBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(device_, other.device_);
  return *this;
}

absl::StatusOr<PinnedBuffer> PinnedBuffer::Allocate(DeviceType device, int64_t bytes) {
  PinnedBuffer buffer;
  if (device == DeviceType::kCuda) {
    ASSIGN_OR_RETURN(buffer.data_, cuda_memory::AllocatePinned(bytes));
    std::memset(buffer.data_, 0, static_cast<size_t>(bytes));
  } else {
    ASSIGN_OR_RETURN(buffer.data_, AllocateBytes(device, bytes));
  }
  buffer.bytes_ = bytes;
  buffer.device_ = device;
  return buffer;
}

absl::Status CopyAsync(DeviceType device, void* to, const void* from, int64_t bytes, void* stream) {
  if (bytes == 0) return absl::OkStatus();
  if (device == DeviceType::kCuda) return cuda_memory::CopyAsync(to, from, bytes, stream);
  std::memmove(to, from, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

}  // namespace lockstep
