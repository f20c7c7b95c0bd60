// Raw memory of a device: what DeviceBuffer owns, and blocking copies for loading, tests and tools.
// Ops never call these. Builds without --config=cuda know the CPU only.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/tensor_view.h"

namespace lockstep {

// Zeroed, 64-byte aligned. ResourceExhausted names the device and the bytes asked for;
// Unimplemented when this build has no such device.
absl::StatusOr<void*> AllocateBytes(DeviceType device, int64_t bytes);
void FreeBytes(DeviceType device, void* data);

// Copies and returns when the bytes are there. Internal carries the vendor's message.
absl::Status CopyBytes(DeviceType to_device, void* to, DeviceType from_device, const void* from,
                       int64_t bytes);

// Waits for the work of the device's default stream and gives its pending error, if any. For tests
// and tools.
absl::Status SynchronizeDevice(DeviceType device);

namespace cuda_memory {

absl::StatusOr<void*> Allocate(int64_t bytes);
void Free(void* data);
absl::Status Copy(void* to, const void* from, int64_t bytes);
absl::Status Synchronize();

}  // namespace cuda_memory
}  // namespace lockstep
