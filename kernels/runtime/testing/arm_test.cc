#include "kernels/runtime/testing/arm_test.h"

#include <cstring>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/check.h"
#include "kernels/base/float_types.h"
#include "kernels/base/hash.h"
#include "kernels/runtime/device_memory.h"

namespace lockstep {
namespace testing {
namespace {

DeviceType test_device = DeviceType::kCpu;

std::vector<uint8_t> Encode(DType dtype, const std::vector<float>& values) {
  std::vector<uint8_t> bytes(values.size() * static_cast<size_t>(SizeOf(dtype)));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kF32) {
      std::memcpy(bytes.data() + i * 4, &values[i], 4);
    } else {
      CHECK(dtype == DType::kBF16) << Name(dtype) << " ";
      const BF16 b = ToBF16(values[i]);
      std::memcpy(bytes.data() + i * 2, &b.bits, 2);
    }
  }
  return bytes;
}

}  // namespace

DeviceType TestDevice() { return test_device; }

CpuArmScope::CpuArmScope() : before_(test_device) { test_device = DeviceType::kCpu; }
CpuArmScope::~CpuArmScope() { test_device = before_; }

ArmContext::ArmContext(int num_threads, int64_t workspace_bytes) : pool_(num_threads) {
  CHECK_OK(workspace_.Allocate(TestDevice(), workspace_bytes));
  context_.device = TestDevice();
  context_.pool = &pool_;
  context_.workspace = &workspace_;
  context_.counters = &counters_;
}

DryRunContext::DryRunContext() : workspace_(TestDevice()) {
  context_.device = TestDevice();
  context_.workspace = &workspace_;
  context_.counters = &counters_;
}

ArmTensor::ArmTensor(DType dtype, Shape shape) {
  auto buffer = DeviceBuffer::Allocate(TestDevice(), shape.num_elements() * SizeOf(dtype));
  CHECK_OK(buffer.status());
  buffer_ = std::move(buffer).value();
  view_ = buffer_.View(dtype, shape);
}

ArmTensor::ArmTensor(DType dtype, Shape shape, const std::vector<float>& values)
    : ArmTensor(dtype, shape) {
  Set(values);
}

ArmTensor::ArmTensor(Shape shape, const std::vector<int32_t>& values)
    : ArmTensor(DType::kI32, shape) {
  Set(values);
}

void ArmTensor::Set(const std::vector<float>& values) { SetBytes(Encode(view_.dtype, values)); }

void ArmTensor::Set(const std::vector<int32_t>& values) {
  std::vector<uint8_t> bytes(values.size() * 4);
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  SetBytes(bytes);
}

void ArmTensor::SetBytes(const std::vector<uint8_t>& bytes) {
  CHECK_EQ(static_cast<int64_t>(bytes.size()), view_.bytes());
  CHECK_OK(CopyBytes(view_.device, buffer_.data(), DeviceType::kCpu, bytes.data(), view_.bytes()));
}

std::vector<uint8_t> ArmTensor::GetBytes() const {
  CHECK_OK(SynchronizeDevice(view_.device));
  std::vector<uint8_t> bytes(static_cast<size_t>(view_.bytes()));
  CHECK_OK(CopyBytes(DeviceType::kCpu, bytes.data(), view_.device, buffer_.data(), view_.bytes()));
  return bytes;
}

std::vector<float> ArmTensor::Get() const {
  const std::vector<uint8_t> bytes = GetBytes();
  std::vector<float> values(static_cast<size_t>(view_.shape.num_elements()));
  for (size_t i = 0; i < values.size(); ++i) {
    if (view_.dtype == DType::kF32) {
      std::memcpy(&values[i], bytes.data() + i * 4, 4);
    } else {
      CHECK(view_.dtype == DType::kBF16) << Name(view_.dtype) << " ";
      BF16 b;
      std::memcpy(&b.bits, bytes.data() + i * 2, 2);
      values[i] = ToFloat(b);
    }
  }
  return values;
}

std::vector<float> RandomFloats(int64_t count, uint64_t seed, float scale) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    const int64_t bits = static_cast<int64_t>(Mix64(Mix64(seed) + i) >> 40) - (1 << 23);
    values[i] = static_cast<float>(bits) * (scale / static_cast<float>(1 << 23));
  }
  return values;
}

std::vector<float> Rounded(std::vector<float> values, DType dtype) {
  if (dtype == DType::kBF16) {
    for (float& v : values) v = ToFloat(ToBF16(v));
  }
  return values;
}

}  // namespace testing
}  // namespace lockstep

int main(int argc, char** argv) {
  ::testing::InitGoogleMock(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--arm=cuda") {
      lockstep::testing::test_device = lockstep::DeviceType::kCuda;
    } else if (argument != "--arm=cpu") {
      std::cerr << "unknown argument " << argument << "; --arm=cpu or --arm=cuda is known\n";
      return 2;
    }
  }
  return RUN_ALL_TESTS();
}
