// The CUDA side of push_memory.h; compiled under --config=cuda only.
#include <cuda_runtime_api.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/comm/push_memory.h"
#include "kernels/runtime/cuda_status.h"

namespace lockstep {
namespace push_memory {

static_assert(sizeof(cudaIpcMemHandle_t) == kHandleBytes, "");

absl::StatusOr<std::string> Export(void* data) {
  RETURN_IF_CUDA_UNBOUND();
  cudaIpcMemHandle_t handle;
  const absl::Status status = CudaStatus(cudaIpcGetMemHandle(&handle, data), "cudaIpcGetMemHandle");
  if (!status.ok()) return status;
  return std::string(reinterpret_cast<const char*>(&handle), sizeof(handle));
}

absl::StatusOr<void*> Open(const std::string& bytes) {
  RETURN_IF_CUDA_UNBOUND();
  if (static_cast<int64_t>(bytes.size()) != kHandleBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a memory handle has ", kHandleBytes, " bytes, not ", bytes.size()));
  }
  cudaIpcMemHandle_t handle;
  std::memcpy(&handle, bytes.data(), sizeof(handle));
  void* data = nullptr;
  const cudaError_t error = cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return absl::UnavailableError(
        absl::StrCat("the memory of a peer cannot be opened (", cudaGetErrorName(error), ": ",
                     cudaGetErrorString(error), "): are the GPUs in one host with peer access?"));
  }
  return data;
}

void Close(void* data) { (void)cudaIpcCloseMemHandle(data); }

}  // namespace push_memory
}  // namespace lockstep
