// Interleaves rows of codes in groups of 16.
#include "kernels/gemm/pack.h"

#include <algorithm>
#include <cstring>

#include "kernels/base/check.h"
#include "kernels/gemm/gemm_args.h"

namespace lockstep {
namespace {

template <int kUnitBytes>
void Pack(const std::vector<const uint8_t*>& rows, int64_t units, uint8_t* out) {
  const int64_t n = static_cast<int64_t>(rows.size());
  for (int64_t begin = 0; begin < n; begin += kGroupRows) {
    const int64_t count = std::min<int64_t>(kGroupRows, n - begin);
    for (int64_t u = 0; u < units; ++u) {
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(out, rows[begin + i] + u * kUnitBytes, kUnitBytes);
        out += kUnitBytes;
      }
    }
  }
}

}  // namespace

void PackRows(const std::vector<const uint8_t*>& rows, int64_t units, int unit_bytes, void* out) {
  uint8_t* bytes = static_cast<uint8_t*>(out);
  switch (unit_bytes) {
    case 1:
      return Pack<1>(rows, units, bytes);
    case 2:
      return Pack<2>(rows, units, bytes);
    case 4:
      return Pack<4>(rows, units, bytes);
  }
  CHECK(false) << "unit of " << unit_bytes << " bytes ";
}

}  // namespace lockstep
