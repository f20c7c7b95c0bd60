// The CUDA side of device_stream.h; compiled under --config=cuda only.
#include <cuda_runtime_api.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/runtime/cuda_status.h"
#include "kernels/runtime/device_stream.h"

namespace lockstep {

namespace cuda_stream {
namespace {

cudaStream_t Stream(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t Event(void* event) { return static_cast<cudaEvent_t>(event); }

// As nvidia-smi writes it.
std::string UuidText(const cudaUUID_t& uuid) {
  const absl::string_view bytes(uuid.bytes, sizeof(uuid.bytes));
  std::string hex = absl::BytesToHexString(bytes);
  for (const size_t dash : {8, 13, 18, 23}) hex.insert(dash, "-");
  return absl::StrCat("GPU-", hex);
}

}  // namespace

absl::Status Select(int ordinal) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    return absl::NotFoundError(absl::StrCat("cuda:", ordinal, ": no CUDA device can be used (",
                                            cudaGetErrorString(error),
                                            "); check the driver with nvidia-smi, or use the cpu"));
  }
  if (ordinal < 0 || ordinal >= count) {
    return absl::NotFoundError(absl::StrCat("cuda:", ordinal, " does not exist; this machine has ",
                                            count, ": cuda:0 to cuda:", count - 1));
  }
  SelectCudaDevice(ordinal);
  return BindCudaThread();
}

absl::StatusOr<DeviceInfo> Info() {
  RETURN_IF_CUDA_UNBOUND();
  DeviceInfo info;
  cudaDeviceProp properties;
  absl::Status status = CudaStatus(cudaGetDeviceProperties(&properties, SelectedCudaDevice()),
                                   "cudaGetDeviceProperties");
  if (!status.ok()) return status;
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  status = CudaStatus(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
  if (!status.ok()) return status;
  info.name = properties.name;
  info.uuid = UuidText(properties.uuid);
  info.capability = properties.major * 10 + properties.minor;
  info.total_bytes = static_cast<int64_t>(total_bytes);
  info.free_bytes = static_cast<int64_t>(free_bytes);
  return info;
}

absl::StatusOr<void*> CreateEvent() {
  RETURN_IF_CUDA_UNBOUND();
  cudaEvent_t event = nullptr;
  const absl::Status status =
      CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  if (!status.ok()) return status;
  return static_cast<void*>(event);
}

// The three below may meet a device that has failed; there is nothing left to do about it then.
void DestroyEvent(void* event) { (void)cudaEventDestroy(Event(event)); }
void DestroyStream(void* stream) { (void)cudaStreamDestroy(Stream(stream)); }
void DestroyGraph(void* exec) { (void)cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(exec)); }

absl::StatusOr<bool> EventDone(void* event) {
  const cudaError_t error = cudaEventQuery(Event(event));
  if (error == cudaErrorNotReady) return false;
  const absl::Status status = CudaStatus(error, "a step on the device");
  if (!status.ok()) return status;
  return true;
}

absl::StatusOr<void*> CreateStream() {
  RETURN_IF_CUDA_UNBOUND();
  cudaStream_t stream = nullptr;
  const absl::Status status = CudaStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                                         "cudaStreamCreateWithFlags");
  if (!status.ok()) return status;
  return static_cast<void*>(stream);
}

absl::Status Zero(void* stream, void* data, int64_t bytes) {
  return CudaStatus(cudaMemsetAsync(data, 0, static_cast<size_t>(bytes), Stream(stream)),
                    "cudaMemsetAsync");
}

absl::Status Record(void* stream, void* event) {
  return CudaStatus(cudaEventRecord(Event(event), Stream(stream)), "cudaEventRecord");
}

absl::Status Synchronize(void* stream) {
  return CudaStatus(cudaStreamSynchronize(Stream(stream)), "cudaStreamSynchronize");
}

absl::Status BeginCapture(void* stream) {
  return CudaStatus(cudaStreamBeginCapture(Stream(stream), cudaStreamCaptureModeThreadLocal),
                    "cudaStreamBeginCapture");
}

absl::StatusOr<void*> EndCapture(void* stream) {
  cudaGraph_t graph = nullptr;
  absl::Status status =
      CudaStatus(cudaStreamEndCapture(Stream(stream), &graph), "cudaStreamEndCapture");
  if (!status.ok()) return status;
  cudaGraphExec_t exec = nullptr;
  status = CudaStatus(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  (void)cudaGraphDestroy(graph);
  if (!status.ok()) return status;
  return static_cast<void*>(exec);
}

absl::Status LaunchGraph(void* stream, void* exec) {
  return CudaStatus(cudaGraphLaunch(static_cast<cudaGraphExec_t>(exec), Stream(stream)),
                    "cudaGraphLaunch");
}

}  // namespace cuda_stream
}  // namespace lockstep
