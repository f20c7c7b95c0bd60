// What the CUDA side of the runtime shares. Only *_cuda.cc files include it.
#pragma once

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace lockstep {

inline absl::Status CudaStatus(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("cuda: ", what, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error)));
}

// The device that BindCudaThread binds from now on.
void SelectCudaDevice(int ordinal);
int SelectedCudaDevice();
// Makes the device of SelectDevice the current one of this thread; the first device when none was
// selected.
absl::Status BindCudaThread();

#define RETURN_IF_CUDA_UNBOUND()                  \
  do {                                            \
    const absl::Status bound_ = BindCudaThread(); \
    if (!bound_.ok()) return bound_;              \
  } while (0)

}  // namespace lockstep
