// The harness of op tests that run against every arm: `x_test --arm=cpu` (the default) or
// `x_test --arm=cuda`. Its library brings main(). Tensors live on the arm's device; the data that a
// test makes and checks are vectors of float on the host, rounded to the tensor's dtype.
//
//   ArmContext context;
//   ArmTensor x(DType::kBF16, {rows, dim}, RandomFloats(rows * dim, 1));
//   ArmTensor y(DType::kBF16, {rows, dim});
//   ASSERT_OK(RmsNorm(context.get(), x.view(), w.view(), {}, y.view()));
//   EXPECT_EQ(y.Get(), want);
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/base/tensor_view.h"
#include "kernels/runtime/device_buffer.h"
#include "kernels/runtime/exec_context.h"

namespace lockstep {
namespace testing {

// The device that --arm names; the CPU while a CpuArmScope lives.
DeviceType TestDevice();

// What is made while it lives is on the CPU: a test runs the same code once more and compares the
// arm's bits with those of the reference arm.
class CpuArmScope {
 public:
  CpuArmScope();
  ~CpuArmScope();
  CpuArmScope(const CpuArmScope&) = delete;
  CpuArmScope& operator=(const CpuArmScope&) = delete;

 private:
  DeviceType before_;
};

// An ExecContext on TestDevice() with its pool, workspace and counters.
class ArmContext {
 public:
  explicit ArmContext(int num_threads = 2, int64_t workspace_bytes = int64_t{16} << 20);
  ExecContext* get() { return &context_; }
  int64_t op_launches() const { return counters_.op_launches.load(); }

 private:
  ThreadPool pool_;
  Workspace workspace_;
  Counters counters_;
  ExecContext context_;
};

// The same in counting mode: every op must return before it touches memory.
class DryRunContext {
 public:
  DryRunContext();
  ExecContext* get() { return &context_; }
  const Workspace& workspace() const { return workspace_; }

 private:
  Workspace workspace_;
  Counters counters_;
  ExecContext context_;
};

// A tensor on TestDevice(). F32, BF16 or I32 elements, seen as floats or as int32_t; those of other
// dtypes are seen as bytes.
class ArmTensor {
 public:
  ArmTensor(DType dtype, Shape shape);  // zeros
  ArmTensor(DType dtype, Shape shape, const std::vector<float>& values);
  ArmTensor(Shape shape, const std::vector<int32_t>& values);

  TensorView view() const { return view_; }
  void Set(const std::vector<float>& values);
  void Set(const std::vector<int32_t>& values);
  // Waits for the device, then reads.
  std::vector<float> Get() const;
  // The raw bytes, for comparisons bit for bit.
  std::vector<uint8_t> GetBytes() const;
  void SetBytes(const std::vector<uint8_t>& bytes);

 private:
  DeviceBuffer buffer_;
  TensorView view_;
};

// Uniform in [-scale, scale], a function of the seed alone.
std::vector<float> RandomFloats(int64_t count, uint64_t seed, float scale = 1.0f);
// Each value rounded to dtype (F32 or BF16).
std::vector<float> Rounded(std::vector<float> values, DType dtype);

}  // namespace testing
}  // namespace lockstep
