#include "kernels/runtime/device_buffer.h"

#include <utility>

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "kernels/runtime/device_memory.h"

namespace lockstep {

DeviceBuffer::~DeviceBuffer() { FreeBytes(device_, data_); }

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      device_(other.device_) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(device_, other.device_);
  return *this;
}

absl::StatusOr<DeviceBuffer> DeviceBuffer::Allocate(DeviceType device, int64_t bytes) {
  DeviceBuffer buffer;
  ASSIGN_OR_RETURN(buffer.data_, AllocateBytes(device, bytes));
  buffer.device_ = device;
  buffer.bytes_ = bytes;
  return buffer;
}

TensorView DeviceBuffer::View(DType dtype, Shape shape) const {
  TensorView view(data_, dtype, shape, device_);
  CHECK_LE(view.bytes(), bytes_) << view.ToString() << " ";
  return view;
}

}  // namespace lockstep
