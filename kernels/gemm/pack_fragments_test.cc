// Tests of the fragment layout: nothing is lost, and the order is that of the instruction.
#include "kernels/gemm/pack_fragments.h"

#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/float_types.h"

namespace lockstep {
namespace {

// Rows of `row_bytes` bytes without a pattern.
std::vector<std::vector<uint8_t>> Rows(int64_t n, int64_t row_bytes, uint32_t seed) {
  std::vector<std::vector<uint8_t>> rows(n, std::vector<uint8_t>(row_bytes));
  for (auto& row : rows) {
    for (uint8_t& b : row) {
      seed = seed * 1664525 + 1013904223;
      b = static_cast<uint8_t>(seed >> 24);
    }
  }
  return rows;
}

std::vector<const uint8_t*> Pointers(const std::vector<std::vector<uint8_t>>& rows) {
  std::vector<const uint8_t*> p;
  for (const auto& row : rows) p.push_back(row.data());
  return p;
}

struct Cut {
  int64_t n, k;
  int leaves;
};
// Short last groups, leaves that end in short runs.
constexpr Cut kCuts[] = {{16, 16, 1},  {4, 48, 1},   {20, 80, 1},
                         {37, 272, 1}, {20, 544, 2}, {33, 640, 8}};

TEST(PackFragmentsTest, EveryCodeIsFoundAgain) {
  for (const WeightFormat format : {WeightFormat::kBF16, WeightFormat::kFp8}) {
    const int64_t unit = format == WeightFormat::kBF16 ? 2 : 1;
    for (const Cut& cut : kCuts) {
      const auto rows = Rows(cut.n, cut.k * unit, 1);
      std::vector<uint8_t> packed(FragmentCodeBytes(format, cut.n, cut.k));
      EXPECT_EQ(static_cast<int64_t>(packed.size()), (cut.n + 15) / 16 * 16 * cut.k * unit);
      PackFragments(nullptr, format, Pointers(rows), cut.k, cut.leaves, packed.data());
      for (int64_t r = 0; r < (cut.n + 15) / 16 * 16; ++r) {
        for (int64_t k = 0; k < cut.k; ++k) {
          uint32_t want = 0;
          for (int64_t b = 0; r < cut.n && b < unit; ++b) want |= rows[r][k * unit + b] << (8 * b);
          ASSERT_EQ(FragmentCode(format, packed.data(), cut.k, cut.leaves, r, k), want)
              << r << " " << k;
        }
      }
    }
  }
}

TEST(PackFragmentsTest, EveryNvfp4CodeAndScaleIsFoundAgain) {
  const WeightFormat format = WeightFormat::kNvfp4;
  for (const Cut& cut : kCuts) {
    const auto rows = Rows(cut.n, cut.k / 2, 2);
    auto scales = Rows(cut.n, cut.k / 16, 3);
    int next = 0;
    for (auto& row : scales) {
      for (uint8_t& b : row) b = static_cast<uint8_t>(next++ % 127);
    }
    scales[0][0] = 0x80;  // a negative zero is a zero
    std::vector<uint8_t> codes(FragmentCodeBytes(format, cut.n, cut.k));
    std::vector<uint8_t> packed_scales(FragmentScaleBytes(cut.n, cut.k));
    PackNvfp4Fragments(nullptr, Pointers(rows), Pointers(scales), cut.k, cut.leaves, codes.data(),
                       packed_scales.data());
    for (int64_t r = 0; r < (cut.n + 15) / 16 * 16; ++r) {
      for (int64_t k = 0; k < cut.k; ++k) {
        const uint8_t scale = r < cut.n ? scales[r][k / 16] & 0x7f : 0;
        ASSERT_EQ(FragmentScale(packed_scales.data(), cut.k, cut.leaves, r, k / 16), scale)
            << r << " " << k;
        const uint32_t want = scale == 0 ? 0 : rows[r][k / 2] >> (4 * (k % 2)) & 15;
        ASSERT_EQ(FragmentCode(format, codes.data(), cut.k, cut.leaves, r, k), want)
            << r << " " << k;
      }
    }
  }
}

// A lane's word of BF16 is a pair of the instruction's operand: rows lane / 4 (+ 8), columns
// 2 (lane % 4) (+ 8).
TEST(PackFragmentsTest, Bf16IsTheOperandOfTheInstruction) {
  std::vector<std::vector<uint8_t>> rows(16, std::vector<uint8_t>(32));
  for (int r = 0; r < 16; ++r) {
    for (int c = 0; c < 16; ++c) rows[r][2 * c] = static_cast<uint8_t>(r * 16 + c);
  }
  std::vector<uint8_t> packed(512);
  PackFragments(nullptr, WeightFormat::kBF16, Pointers(rows), 16, 1, packed.data());
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 8; ++i) {
      const int row = lane / 4 + (i / 2 % 2) * 8;
      const int column = lane % 4 * 2 + i % 2 + i / 4 * 8;
      EXPECT_EQ(packed[lane * 16 + i * 2], row * 16 + column) << lane << " " << i;
    }
  }
}

// A scale has 5 bits of exponent biased by 10 and 3 of fraction: no subnormals but zero.
TEST(PackFragmentsTest, ScalesAreNormalNumbers) {
  for (int code = 0; code < 127; ++code) {
    std::vector<std::vector<uint8_t>> rows(1, std::vector<uint8_t>(8, 0x11));
    std::vector<std::vector<uint8_t>> scales(1, {static_cast<uint8_t>(code)});
    std::vector<uint8_t> codes(128), packed(16);
    PackNvfp4Fragments(nullptr, Pointers(rows), Pointers(scales), 16, 1, codes.data(),
                       packed.data());
    const float value = E4M3ToFloat(static_cast<uint8_t>(code));
    if (value == 0.0f) {
      EXPECT_EQ(packed[0], 0);
    } else {
      const uint32_t bits = (static_cast<uint32_t>(packed[0]) << 20) + ((127u - 10) << 23);
      EXPECT_EQ(BitsToFloat(bits), value) << code;
    }
  }
}

}  // namespace
}  // namespace lockstep
