// Device memory that another process of this host may write: what a push group's arenas are.
// Builds without --config=cuda have none: Unimplemented.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lockstep {
namespace push_memory {

// Opaque bytes, always this many, with which another process opens `data` (the start of an
// allocation of DeviceBuffer).
constexpr int64_t kHandleBytes = 64;
absl::StatusOr<std::string> Export(void* data);

// The other process's memory; Close gives it back. Unavailable when the device cannot reach it.
absl::StatusOr<void*> Open(const std::string& handle);
void Close(void* data);

}  // namespace push_memory
}  // namespace lockstep
