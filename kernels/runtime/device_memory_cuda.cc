// The CUDA side of device_memory.h; compiled under --config=cuda only.
#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/runtime/cuda_status.h"
#include "kernels/runtime/device_memory.h"

namespace lockstep {
namespace cuda_memory {
absl::StatusOr<void*> Allocate(int64_t bytes) {
  RETURN_IF_CUDA_UNBOUND();
  const size_t size = static_cast<size_t>(bytes == 0 ? 64 : bytes);
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, size);
  if (error != cudaSuccess) {
    return absl::ResourceExhaustedError(absl::StrCat("cuda: no memory for ", bytes,
                                                     " bytes: ", cudaGetErrorString(error),
                                                     "; lower the limits or free memory"));
  }
  const absl::Status zeroed = CudaStatus(cudaMemset(data, 0, size), "cudaMemset");
  if (!zeroed.ok()) {
    cudaFree(data);
    return zeroed;
  }
  return data;
}

void Free(void* data) { CHECK_OK(CudaStatus(cudaFree(data), "cudaFree")); }

absl::Status Copy(void* to, const void* from, int64_t bytes) {
  RETURN_IF_CUDA_UNBOUND();
  return CudaStatus(cudaMemcpy(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault),
                    "cudaMemcpy");
}

absl::Status Synchronize() {
  RETURN_IF_CUDA_UNBOUND();
  return CudaStatus(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}

}  // namespace cuda_memory
}  // namespace lockstep
