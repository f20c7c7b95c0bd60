// DeviceStream: the queue of one device's work, in order, and what a step needs around its ops:
// copies through page-locked memory, events, captured graphs. On the CPU everything happens at
// once, so that the same code drives both. Used by one thread.
//
// Errors are Internal and carry the vendor's message; an error of the device itself stays: every
// later call gives it too.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/base/tensor_view.h"

namespace lockstep {

// A device of this machine.
struct DeviceInfo {
  std::string name;  // "NVIDIA H200"
  int64_t total_bytes = 0;
  int64_t free_bytes = 0;
  int capability = 0;  // 90 for sm_90; 0 for a CPU
  std::string uuid;    // "GPU-" and 32 hexadecimal digits with dashes; empty for a CPU
};

// The device that this process computes on: a process serves one rank, hence one device. Called
// once, before anything of the device is used. NotFound names the devices there are; Unimplemented
// when this build knows no such device.
absl::Status SelectDevice(DeviceType device, int ordinal);
absl::StatusOr<DeviceInfo> GetDeviceInfo(DeviceType device);

// A point in a stream. One that was never recorded is done.
class DeviceEvent {
 public:
  DeviceEvent() = default;
  ~DeviceEvent();
  DeviceEvent(DeviceEvent&& other) noexcept;
  DeviceEvent& operator=(DeviceEvent&& other) noexcept;
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  static absl::StatusOr<DeviceEvent> Create(DeviceType device);
  // Whether everything queued before the record has ended.
  absl::StatusOr<bool> Done() const;

 private:
  friend class DeviceStream;
  void* event_ = nullptr;
};

// Captured work that can be queued again at the cost of one call. Borrows every address in it.
class DeviceGraph {
 public:
  DeviceGraph() = default;
  ~DeviceGraph();
  DeviceGraph(DeviceGraph&& other) noexcept;
  DeviceGraph& operator=(DeviceGraph&& other) noexcept;
  DeviceGraph(const DeviceGraph&) = delete;
  DeviceGraph& operator=(const DeviceGraph&) = delete;

  bool empty() const { return exec_ == nullptr; }

 private:
  friend class DeviceStream;
  void* exec_ = nullptr;
};

class DeviceStream {
 public:
  static absl::StatusOr<std::unique_ptr<DeviceStream>> Create(DeviceType device);
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  DeviceType device() const { return device_; }
  // For ExecContext::stream.
  void* handle() const { return stream_; }

  // `host` is memory of a PinnedBuffer and stays as it is until the copy has ended.
  absl::Status CopyToDevice(void* to, const void* host, int64_t bytes);
  absl::Status CopyToHost(void* host, const void* from, int64_t bytes);
  absl::Status Zero(void* data, int64_t bytes);
  absl::Status Record(DeviceEvent* event);
  // Waits for everything queued.
  absl::Status Synchronize();

  // Between the two, work is recorded instead of run. Unimplemented on the CPU. EndCapture must
  // follow, also after an error of an op in between; it then gives an error or a graph to drop.
  absl::Status BeginCapture();
  absl::StatusOr<DeviceGraph> EndCapture();
  absl::Status Launch(const DeviceGraph& graph);

 private:
  explicit DeviceStream(DeviceType device) : device_(device) {}

  const DeviceType device_;
  void* stream_ = nullptr;
};

// Waits for what `stream` (of ExecContext) has queued: for set-up and evaluation, never in a step.
absl::Status SynchronizeStream(DeviceType device, void* stream);

namespace cuda_stream {

absl::Status Select(int ordinal);
absl::StatusOr<DeviceInfo> Info();
absl::StatusOr<void*> CreateEvent();
void DestroyEvent(void* event);
absl::StatusOr<bool> EventDone(void* event);
absl::StatusOr<void*> CreateStream();
void DestroyStream(void* stream);
absl::Status Zero(void* stream, void* data, int64_t bytes);
absl::Status Record(void* stream, void* event);
absl::Status Synchronize(void* stream);
absl::Status BeginCapture(void* stream);
absl::StatusOr<void*> EndCapture(void* stream);
void DestroyGraph(void* exec);
absl::Status LaunchGraph(void* stream, void* exec);

}  // namespace cuda_stream
}  // namespace lockstep
