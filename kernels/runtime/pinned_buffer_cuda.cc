// The CUDA side of pinned_buffer.h; compiled under --config=cuda only.
#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/runtime/cuda_status.h"
#include "kernels/runtime/pinned_buffer.h"

namespace lockstep {
namespace cuda_memory {

absl::StatusOr<void*> AllocatePinned(int64_t bytes) {
  RETURN_IF_CUDA_UNBOUND();
  void* data = nullptr;
  const cudaError_t error =
      cudaHostAlloc(&data, static_cast<size_t>(bytes == 0 ? 64 : bytes), cudaHostAllocPortable);
  if (error == cudaSuccess) return data;
  return absl::ResourceExhaustedError(
      absl::StrCat("cuda: no pinned memory for ", bytes, " bytes: ", cudaGetErrorString(error)));
}

void FreePinned(void* data) {
  const cudaError_t error = cudaFreeHost(data);
  CHECK(error == cudaSuccess) << cudaGetErrorString(error) << " ";
}

absl::Status CopyAsync(void* to, const void* from, int64_t bytes, void* stream) {
  const cudaError_t error = cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault,
                                            static_cast<cudaStream_t>(stream));
  return CudaStatus(error, "cudaMemcpyAsync");
}

}  // namespace cuda_memory
}  // namespace lockstep
