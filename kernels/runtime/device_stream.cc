#include "kernels/runtime/device_stream.h"

#include <unistd.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "kernels/runtime/pinned_buffer.h"

namespace lockstep {

#if !defined(KERNELS_WITH_CUDA)
namespace cuda_stream {
namespace {

absl::Status NoCuda() {
  return absl::UnimplementedError(
      "this build has no cuda; build with --config=cuda or use the cpu");
}

}  // namespace

absl::Status Select(int) { return NoCuda(); }
absl::StatusOr<DeviceInfo> Info() { return NoCuda(); }
absl::StatusOr<void*> CreateEvent() { return NoCuda(); }
void DestroyEvent(void*) {}
absl::StatusOr<bool> EventDone(void*) { return NoCuda(); }
absl::StatusOr<void*> CreateStream() { return NoCuda(); }
void DestroyStream(void*) {}
absl::Status Zero(void*, void*, int64_t) { return NoCuda(); }
absl::Status Record(void*, void*) { return NoCuda(); }
absl::Status Synchronize(void*) { return NoCuda(); }
absl::Status BeginCapture(void*) { return NoCuda(); }
absl::StatusOr<void*> EndCapture(void*) { return NoCuda(); }
void DestroyGraph(void*) {}
absl::Status LaunchGraph(void*, void*) { return NoCuda(); }

}  // namespace cuda_stream
#endif

absl::Status SelectDevice(DeviceType device, int ordinal) {
  if (device == DeviceType::kCuda) return cuda_stream::Select(ordinal);
  if (ordinal == 0) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat("cpu:", ordinal, " does not exist; use cpu"));
}

absl::StatusOr<DeviceInfo> GetDeviceInfo(DeviceType device) {
  if (device == DeviceType::kCuda) return cuda_stream::Info();
  DeviceInfo info;
  info.name = "host CPU";
  const int64_t page = sysconf(_SC_PAGESIZE);
  info.total_bytes = sysconf(_SC_PHYS_PAGES) * page;
  info.free_bytes = sysconf(_SC_AVPHYS_PAGES) * page;
  return info;
}

// ---- DeviceEvent, DeviceGraph ----

DeviceEvent::~DeviceEvent() {
  if (event_ != nullptr) cuda_stream::DestroyEvent(event_);
}

DeviceEvent::DeviceEvent(DeviceEvent&& other) noexcept
    : event_(std::exchange(other.event_, nullptr)) {}

DeviceEvent& DeviceEvent::operator=(DeviceEvent&& other) noexcept {
  std::swap(event_, other.event_);
  return *this;
}

absl::StatusOr<DeviceEvent> DeviceEvent::Create(DeviceType device) {
  DeviceEvent event;
  if (device == DeviceType::kCuda) {
    ASSIGN_OR_RETURN(event.event_, cuda_stream::CreateEvent());
  }
  return event;
}

absl::StatusOr<bool> DeviceEvent::Done() const {
  if (event_ == nullptr) return true;
  return cuda_stream::EventDone(event_);
}

DeviceGraph::~DeviceGraph() {
  if (exec_ != nullptr) cuda_stream::DestroyGraph(exec_);
}

DeviceGraph::DeviceGraph(DeviceGraph&& other) noexcept
    : exec_(std::exchange(other.exec_, nullptr)) {}

DeviceGraph& DeviceGraph::operator=(DeviceGraph&& other) noexcept {
  std::swap(exec_, other.exec_);
  return *this;
}

// ---- DeviceStream ----

absl::StatusOr<std::unique_ptr<DeviceStream>> DeviceStream::Create(DeviceType device) {
  std::unique_ptr<DeviceStream> stream(new DeviceStream(device));
  if (device == DeviceType::kCuda) {
    ASSIGN_OR_RETURN(stream->stream_, cuda_stream::CreateStream());
  }
  return stream;
}

DeviceStream::~DeviceStream() {
  if (stream_ != nullptr) cuda_stream::DestroyStream(stream_);
}

absl::Status DeviceStream::CopyToDevice(void* to, const void* host, int64_t bytes) {
  return CopyAsync(device_, to, host, bytes, stream_);
}

absl::Status DeviceStream::CopyToHost(void* host, const void* from, int64_t bytes) {
  return CopyAsync(device_, host, from, bytes, stream_);
}

absl::Status DeviceStream::Zero(void* data, int64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  if (device_ == DeviceType::kCuda) return cuda_stream::Zero(stream_, data, bytes);
  std::memset(data, 0, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

absl::Status DeviceStream::Record(DeviceEvent* event) {
  if (device_ == DeviceType::kCpu) return absl::OkStatus();
  CHECK(event->event_ != nullptr) << "the event was not created ";
  return cuda_stream::Record(stream_, event->event_);
}

absl::Status DeviceStream::Synchronize() { return SynchronizeStream(device_, stream_); }

absl::Status DeviceStream::BeginCapture() {
  if (device_ == DeviceType::kCuda) return cuda_stream::BeginCapture(stream_);
  return absl::UnimplementedError("the cpu has no graphs");
}

absl::StatusOr<DeviceGraph> DeviceStream::EndCapture() {
  if (device_ != DeviceType::kCuda) return absl::UnimplementedError("the cpu has no graphs");
  DeviceGraph graph;
  ASSIGN_OR_RETURN(graph.exec_, cuda_stream::EndCapture(stream_));
  return graph;
}

absl::Status DeviceStream::Launch(const DeviceGraph& graph) {
  CHECK(!graph.empty());
  return cuda_stream::LaunchGraph(stream_, graph.exec_);
}

absl::Status SynchronizeStream(DeviceType device, void* stream) {
  return device == DeviceType::kCuda ? cuda_stream::Synchronize(stream) : absl::OkStatus();
}

}  // namespace lockstep
