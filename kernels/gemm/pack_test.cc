// Tests of the interleaved layout.
#include "kernels/gemm/pack.h"

#include <vector>

#include "gtest/gtest.h"

namespace lockstep {
namespace {

TEST(PackRowsTest, LastGroupHasItsOwnStride) {
  constexpr int kRows = 19, kUnits = 3;
  for (int unit_bytes : {1, 2, 4}) {
    std::vector<std::vector<uint8_t>> source(kRows, std::vector<uint8_t>(kUnits * unit_bytes));
    std::vector<const uint8_t*> rows;
    for (int r = 0; r < kRows; ++r) {
      for (int b = 0; b < kUnits * unit_bytes; ++b) source[r][b] = static_cast<uint8_t>(r * 12 + b);
      rows.push_back(source[r].data());
    }
    std::vector<uint8_t> packed(kRows * kUnits * unit_bytes);
    PackRows(rows, kUnits, unit_bytes, packed.data());
    for (int r = 0; r < kRows; ++r) {
      const int group = r / 16, in_group = group == 0 ? 16 : 3;
      for (int u = 0; u < kUnits; ++u) {
        for (int b = 0; b < unit_bytes; ++b) {
          const int at = (group * 16 * kUnits + u * in_group + r % 16) * unit_bytes + b;
          EXPECT_EQ(packed[at], source[r][u * unit_bytes + b]) << r << " " << u << " " << b;
        }
      }
    }
  }
}

}  // namespace
}  // namespace lockstep
