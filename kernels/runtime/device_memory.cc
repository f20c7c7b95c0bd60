#include "kernels/runtime/device_memory.h"

#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

namespace lockstep {

#if !defined(KERNELS_WITH_CUDA)
namespace cuda_memory {
namespace {

absl::Status NoCuda() {
  return absl::UnimplementedError(
      "device memory: this build has no cuda; build with --config=cuda or use the cpu");
}

}  // namespace

absl::StatusOr<void*> Allocate(int64_t) { return NoCuda(); }
void Free(void*) { CHECK(false) << "this build has no cuda "; }
absl::Status Copy(void*, const void*, int64_t) { return NoCuda(); }
absl::Status Synchronize() { return NoCuda(); }

}  // namespace cuda_memory
#endif

namespace {

constexpr int64_t kAlignment = 64;

}  // namespace

absl::StatusOr<void*> AllocateBytes(DeviceType device, int64_t bytes) {
  CHECK_GE(bytes, 0);
  if (device == DeviceType::kCuda) return cuda_memory::Allocate(bytes);
  const int64_t rounded =
      bytes == 0 ? kAlignment : (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* data = std::aligned_alloc(kAlignment, static_cast<size_t>(rounded));
  if (data == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cpu: no memory for ", bytes, " bytes; lower the limits or free memory"));
  }
  std::memset(data, 0, static_cast<size_t>(rounded));
  return data;
}

void FreeBytes(DeviceType device, void* data) {
  if (data == nullptr) return;
  if (device == DeviceType::kCuda) {
    cuda_memory::Free(data);
  } else {
    std::free(data);
  }
}

absl::Status CopyBytes(DeviceType to_device, void* to, DeviceType from_device, const void* from,
                       int64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  if (to_device == DeviceType::kCuda || from_device == DeviceType::kCuda) {
    return cuda_memory::Copy(to, from, bytes);
  }
  std::memcpy(to, from, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

absl::Status SynchronizeDevice(DeviceType device) {
  return device == DeviceType::kCuda ? cuda_memory::Synchronize() : absl::OkStatus();
}

}  // namespace lockstep
