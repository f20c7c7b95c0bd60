// Random matrix products of every format, for tests that run on every arm: the weight as a
// checkpoint stores it, parts of it packed for TestDevice(), inputs, and the exact result.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/gemm/gemm.h"
#include "kernels/runtime/testing/arm_test.h"

namespace lockstep {
namespace testing {

struct GemmCase {
  std::string name;
  WeightFormat format = WeightFormat::kBF16;
  WeightScaling scaling = WeightScaling::kNone;
  int64_t n = 0;
  int64_t k = 0;
  int64_t shards = 1;     // of the full K; 1: column-parallel
  int64_t act_group = 0;  // 0: BF16 values, else E4M3 codes with a scale per group
  bool bf16_scales = false;
};

// Every format and scaling, column- and row-parallel, with odd shapes.
std::vector<GemmCase> GemmCases();

// A whole weight [n, k] as stored.
class TestWeight {
 public:
  explicit TestWeight(const GemmCase& c);

  const GemmCase& c() const { return c_; }
  int64_t shard_size() const { return c_.k / c_.shards; }
  // Without what scales segments.
  double Value(int64_t n, int64_t k) const;
  float Scale(int64_t n, int64_t k) const;

  // Rows of codes, of NVFP4 block scales, and the scales of rows or 128-blocks.
  std::vector<uint8_t> codes;
  std::vector<uint8_t> block16;
  std::vector<float> scales;
  float tensor_scale = 1.0f;

 private:
  GemmCase c_;
};

// Rows [row_begin, row_begin + rows) and the columns of `rank` of `world`, on TestDevice().
class PackedPart {
 public:
  PackedPart(const TestWeight& weight, int64_t row_begin, int64_t rows, int rank, int world);
  const GemmWeight& weight() const { return weight_; }

 private:
  const void* Place(const std::vector<uint8_t>& bytes);

  GemmWeight weight_;
  std::vector<std::unique_ptr<ArmTensor>> tensors_;
};

// tokens rows of x: BF16 values, or codes with their scales.
class TestInput {
 public:
  TestInput(const GemmCase& c, int64_t tokens);
  double Value(int64_t t, int64_t k) const;
  float Scale(int64_t t, int64_t k) const;  // 1 without codes
  // Rows [begin, begin + count) and the columns of `rank` of `world` on TestDevice(). The row
  // stride exceeds the columns by `padding` elements.
  struct Part {
    std::unique_ptr<ArmTensor> x;
    std::unique_ptr<ArmTensor> scales;
    TensorView view;
  };
  Part Rows(int64_t begin, int64_t count, int rank = 0, int world = 1, int64_t padding = 0) const;

 private:
  GemmCase c_;
  int64_t scales_per_token_ = 0;
  std::vector<uint8_t> bytes_;  // rows of k elements
  std::vector<float> scales_;
};

// The product of an input and a packed part: F32 [count, rows of the part].
std::vector<float> RunGemm(const PackedPart& part, const TestInput::Part& input);

// out[t, n] in double, and the sum of the magnitudes of its terms.
struct Exact {
  double value;
  double magnitude;
};
Exact ExactElement(const TestWeight& w, const TestInput& x, int64_t t, int64_t n);

}  // namespace testing
}  // namespace lockstep
