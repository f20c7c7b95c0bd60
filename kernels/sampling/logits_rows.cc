#include "kernels/sampling/logits_rows.h"

#include "kernels/base/hash.h"
#include "kernels/base/simd_math.h"
#include "kernels/sampling/gumbel_noise.h"

namespace lockstep {
namespace LOCKSTEP_ISA {
namespace {

constexpr int64_t kBlock = 256;
constexpr int64_t kLeaf = 128;
constexpr float kInfinity = __builtin_inff();

// Sum of up to kLeaf terms.
float LeafSum(const float* logits, int64_t count, float maximum, float temperature) {
  float e[kLeaf];
  for (int64_t i = 0; i < count; ++i) {
    e[i] = Exp(ScaledLogit(logits[i], maximum, temperature));
  }
  for (int64_t i = count; i < kLeaf; ++i) e[i] = 0.0f;
  F32x16 sum = Zero();
  for (int64_t i = 0; i < kLeaf; i += 16) sum = Add(sum, Load(e + i));
  return ReduceAdd(sum);
}

}  // namespace

RowScan ScanRow(const float* logits, int64_t count) {
  uint64_t digest = 0;
  float maximum = -kInfinity;
  uint32_t broken = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = begin + kBlock < count ? begin + kBlock : count;
    for (int64_t i = begin; i < end; ++i) {
      digest += Mix64(static_cast<uint64_t>(i) << 32 | FloatToBits(logits[i]));
    }
    float lanes[16];
    for (int l = 0; l < 16; ++l) lanes[l] = -kInfinity;
    int64_t i = begin;
    for (; i + 16 <= end; i += 16) {
      for (int l = 0; l < 16; ++l) lanes[l] = logits[i + l] > lanes[l] ? logits[i + l] : lanes[l];
    }
    for (int l = 0; i + l < end; ++l)
      lanes[l] = logits[i + l] > lanes[l] ? logits[i + l] : lanes[l];
    for (int l = 0; l < 16; ++l) maximum = lanes[l] > maximum ? lanes[l] : maximum;
    // Bits above those of the largest finite number: +infinity and every positive NaN; negative NaN
    // after dropping the sign, -infinity not.
    for (i = begin; i < end; ++i) {
      const uint32_t bits = FloatToBits(logits[i]);
      broken |= (bits & 0x7fffffffu) > 0x7f800000u || bits == 0x7f800000u ? 1u : 0u;
    }
  }
  RowScan scan;
  scan.digest = digest;
  scan.maximum = maximum;
  scan.broken = broken != 0;
  return scan;
}

int64_t FindFirst(const float* logits, int64_t count, float value) {
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = begin + kBlock < count ? begin + kBlock : count;
    uint32_t found = 0;
    for (int64_t i = begin; i < end; ++i) found |= logits[i] == value ? 1u : 0u;
    if (found == 0) continue;
    for (int64_t i = begin; i < end; ++i) {
      if (logits[i] == value) return i;
    }
  }
  return -1;
}

float SumExp(const float* logits, int64_t count, float maximum, float temperature) {
  // digit[b] is the sum of 2^b leaves when bit b of the number of leaves so far is set.
  float digit[64];
  uint64_t leaves = 0;
  for (int64_t begin = 0; begin < count; begin += kLeaf) {
    const int64_t left = count - begin;
    float sum = LeafSum(logits + begin, left < kLeaf ? left : kLeaf, maximum, temperature);
    int b = 0;
    for (; (leaves >> b) & 1; ++b) sum = digit[b] + sum;
    digit[b] = sum;
    ++leaves;
  }
  float total = 0.0f;
  bool first = true;
  for (int b = 0; b < 64; ++b) {
    if (((leaves >> b) & 1) == 0) continue;
    total = first ? digit[b] : digit[b] + total;
    first = false;
  }
  return total;
}

uint64_t SumWeights(const float* logits, int64_t count, float maximum, float temperature) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    sum += NucleusWeight(ScaledLogit(logits[i], maximum, temperature));
  }
  return sum;
}

int64_t GumbelArgmax(const float* logits, int64_t count, float maximum, float temperature,
                     uint64_t key) {
  float best = -kInfinity;
  int64_t id = -1;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t size = begin + kBlock < count ? kBlock : count - begin;
    float scores[kBlock];
    for (int64_t i = 0; i < size; ++i) {
      scores[i] = ScaledLogit(logits[begin + i], maximum, temperature) +
                  GumbelNoise(key, static_cast<uint64_t>(begin + i));
    }
    for (int64_t i = 0; i < size; ++i) {
      if (scores[i] > best) {
        best = scores[i];
        id = begin + i;
      }
    }
  }
  return id;
}

}  // namespace LOCKSTEP_ISA
}  // namespace lockstep
