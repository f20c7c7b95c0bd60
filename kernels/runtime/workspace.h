// Workspace: a bump arena for the temporaries of one step. A workspace without memory only counts:
// the same code that will run sizes it at load time (run it once in counting mode, then Allocate).
// Single thread.
//
//   Workspace::Scope scope(&workspace);           // gives back what is taken below, at its end
//   TensorView x = workspace.Take(DType::kF32, {tokens, hidden});
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/base/tensor_view.h"
#include "kernels/runtime/device_buffer.h"

namespace lockstep {

class Workspace {
 public:
  // Counting: Take gives views of that device with a null pointer, and peak() grows.
  explicit Workspace(DeviceType device = DeviceType::kCpu) : device_(device) {}

  // Owns `bytes` on `device` from now on; afterwards Take gives memory and CHECKs that it fits.
  absl::Status Allocate(DeviceType device, int64_t bytes);

  bool counting() const { return buffer_.data() == nullptr; }
  int64_t used() const { return used_; }
  int64_t peak() const { return peak_; }
  int64_t capacity() const { return buffer_.bytes(); }

  // Uninitialized memory, 64-byte aligned, valid until the enclosing Scope ends.
  TensorView Take(DType dtype, Shape shape);

  class Scope {
   public:
    explicit Scope(Workspace* workspace) : workspace_(workspace), mark_(workspace->used_) {}
    ~Scope() { workspace_->used_ = mark_; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Workspace* workspace_;
    int64_t mark_;
  };

 private:
  DeviceType device_;
  DeviceBuffer buffer_;
  int64_t used_ = 0;
  int64_t peak_ = 0;
};

}  // namespace lockstep
