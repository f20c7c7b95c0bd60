// Which device the process uses; compiled under --config=cuda only.
#include <cuda_runtime_api.h>

#include <atomic>

#include "kernels/runtime/cuda_status.h"

namespace lockstep {
namespace {

std::atomic<int> selected_device{0};

}  // namespace

void SelectCudaDevice(int ordinal) { selected_device.store(ordinal, std::memory_order_release); }

int SelectedCudaDevice() { return selected_device.load(std::memory_order_acquire); }

absl::Status BindCudaThread() {
  // The vendor keeps the current device per thread.
  static thread_local int bound = -1;
  const int wanted = SelectedCudaDevice();
  if (bound == wanted) return absl::OkStatus();
  const absl::Status status = CudaStatus(cudaSetDevice(wanted), "cudaSetDevice");
  if (status.ok()) bound = wanted;
  return status;
}

}  // namespace lockstep
