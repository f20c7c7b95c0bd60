#include "kernels/runtime/device_buffer.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

namespace lockstep {
namespace {

constexpr int64_t kAlignment = 64;

}  // namespace

DeviceBuffer::~DeviceBuffer() { std::free(data_); }

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
  CHECK_GE(bytes, 0);
  if (device != DeviceType::kCpu) {
    return absl::UnimplementedError("DeviceBuffer: this build allocates on the CPU only");
  }
  DeviceBuffer buffer;
  buffer.device_ = device;
  buffer.bytes_ = bytes;
  const int64_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  buffer.data_ = std::aligned_alloc(kAlignment, static_cast<size_t>(rounded ? rounded : kAlignment));
  if (buffer.data_ == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cpu: no memory for ", bytes, " bytes; lower the limits or free memory"));
  }
  std::memset(buffer.data_, 0, static_cast<size_t>(rounded ? rounded : kAlignment));
  return buffer;
}

TensorView DeviceBuffer::View(DType dtype, Shape shape) const {
  TensorView view(data_, dtype, shape, device_);
  CHECK_LE(view.bytes(), bytes_) << view.ToString() << " ";
  return view;
}

}  // namespace lockstep
