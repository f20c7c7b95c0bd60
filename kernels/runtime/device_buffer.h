// DeviceBuffer: owns bytes on one device. Move-only. CPU memory is 64-byte aligned. Allocation goes
// through here and nowhere else, so that what a rank holds can be counted.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/base/tensor_view.h"

namespace lockstep {

class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  // Zeroed memory. ResourceExhausted names the device and the bytes asked for.
  static absl::StatusOr<DeviceBuffer> Allocate(DeviceType device, int64_t bytes);

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  DeviceType device() const { return device_; }

  // The front of the buffer as a tensor; CHECKs that it fits.
  TensorView View(DType dtype, Shape shape) const;

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
  DeviceType device_ = DeviceType::kCpu;
};

}  // namespace lockstep
