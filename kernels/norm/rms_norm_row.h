// The arithmetic of one RMS norm row on the CPU, shared by every op that normalizes.
#pragma once

#include <cmath>
#include <cstdint>

namespace lockstep {

// 1 / sqrt(mean(x^2) + eps). Sixteen lanes (index mod 16) ascend with one product and one sum per
// element, then lane i takes lane i + 8, i + 4, i + 2, i + 1: the order depends on dim alone.
inline float RmsScale(const float* x, int64_t dim, float eps) {
  float lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= dim; i += 16) {
    for (int l = 0; l < 16; ++l) lanes[l] += x[i + l] * x[i + l];
  }
  for (int l = 0; i + l < dim; ++l) lanes[l] += x[i + l] * x[i + l];
  for (int width = 8; width >= 1; width /= 2) {
    for (int l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  }
  return 1.0f / std::sqrt(lanes[0] / static_cast<float>(dim) + eps);
}

}  // namespace lockstep
