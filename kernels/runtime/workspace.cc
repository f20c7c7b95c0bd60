#include "kernels/runtime/workspace.h"

#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"

namespace lockstep {

absl::Status Workspace::Allocate(DeviceType device, int64_t bytes) {
  CHECK_EQ(used_, 0) << "workspace is in use ";
  ASSIGN_OR_RETURN(buffer_, DeviceBuffer::Allocate(device, std::max<int64_t>(bytes, 64)));
  device_ = device;
  return absl::OkStatus();
}

TensorView Workspace::Take(DType dtype, Shape shape) {
  const int64_t bytes = (shape.num_elements() * SizeOf(dtype) + 63) / 64 * 64;
  void* data = nullptr;
  if (!counting()) {
    CHECK_LE(used_ + bytes, buffer_.bytes())
        << "workspace of " << buffer_.bytes() << " bytes is too small for " << Name(dtype)
        << shape.ToString() << " after " << used_ << " ";
    data = static_cast<uint8_t*>(buffer_.data()) + used_;
  }
  used_ += bytes;
  peak_ = std::max(peak_, used_);
  return TensorView(data, dtype, shape, device_);
}

}  // namespace lockstep
