// The CPU arm of activation quantization, built once per instruction set: plain loops in a form
// that the compiler turns into vectors. Every step is exact or rounds once per element, so all
// builds agree.
#include <cstdint>
#include <cstring>

#include "kernels/quantize/quantize_args.h"

namespace lockstep {
namespace LOCKSTEP_ISA {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kChunk = 512;

uint32_t Bits(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  return bits;
}

float FromBits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

// Columns [begin, begin + count) of the row as floats.
void Widen(const QuantizeRowArgs& a, int64_t begin, int64_t count, float* out) {
  if (!a.x_bf16) {
    std::memcpy(out, static_cast<const float*>(a.x) + begin, static_cast<size_t>(count) * 4);
    return;
  }
  const uint16_t* x = static_cast<const uint16_t*>(a.x) + begin;
  for (int64_t i = 0; i < count; ++i) out[i] = FromBits(static_cast<uint32_t>(x[i]) << 16);
}

// The largest magnitude, in any order; a NaN is passed over.
float AbsMax(const float* x, int64_t count, float amax) {
  float lanes[kLanes];
  for (int64_t l = 0; l < kLanes; ++l) lanes[l] = amax;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) {
      const float m = FromBits(Bits(x[i + l]) & 0x7fffffffu);
      lanes[l] = lanes[l] < m ? m : lanes[l];
    }
  }
  for (; i < count; ++i) {
    const float m = FromBits(Bits(x[i]) & 0x7fffffffu);
    lanes[0] = lanes[0] < m ? m : lanes[0];
  }
  for (int64_t l = 0; l < kLanes; ++l) amax = amax < lanes[l] ? lanes[l] : amax;
  return amax;
}

// The E4M3 code nearest to f, ties to even, saturating at +-448; a NaN gives 0x7f.
uint32_t Encode(float f) {
  const uint32_t bits = Bits(f);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  // Below 2^-6 codes are multiples of 2^-9, the last bit of a float near 2^14.
  const uint32_t subnormal = Bits(FromBits(magnitude) + 16384.0f) - Bits(16384.0f);
  uint32_t code = magnitude < 0x3c800000u ? subnormal : normal;
  code = magnitude >= 0x43e00000u ? 0x7eu : code;
  code |= sign;
  return magnitude > 0x7f800000u ? 0x7fu : code;
}

// The reference divides by 448 as a multiplication with its rounded reciprocal: a division differs
// in the last bit of about half of all scales.
constexpr float kReciprocal448 = 1.0f / 448.0f;

float ScaleOf(const QuantizeRowArgs& a, float amax) {
  if (a.scale_rule == 1) {
    const float scale = amax * kReciprocal448;
    const float floor = kReciprocal448 / 512.0f;
    return scale < floor ? floor : scale;
  }
  return (amax < 1e-10f ? 1e-10f : amax) * kReciprocal448;
}

void QuantizeGroup(const QuantizeRowArgs& a, int64_t begin, int64_t end, float* scale_out) {
  float chunk[kChunk];
  float scale = a.static_scale;
  if (a.scale_rule != 0) {
    float amax = 0.0f;
    for (int64_t i = begin; i < end; i += kChunk) {
      const int64_t count = end - i < kChunk ? end - i : kChunk;
      Widen(a, i, count, chunk);
      amax = AbsMax(chunk, count, amax);
    }
    scale = ScaleOf(a, amax);
  }
  for (int64_t i = begin; i < end; i += kChunk) {
    const int64_t count = end - i < kChunk ? end - i : kChunk;
    Widen(a, i, count, chunk);
    uint8_t* codes = a.codes + i;
    for (int64_t j = 0; j < count; ++j) codes[j] = static_cast<uint8_t>(Encode(chunk[j] / scale));
  }
  *scale_out = scale;
}

}  // namespace

void QuantizeRow(const QuantizeRowArgs& a) {
  float* scale = a.scales;
  for (int64_t shard = 0; shard < a.k; shard += a.shard_size) {
    const int64_t shard_end = shard + a.shard_size;
    for (int64_t begin = shard; begin < shard_end; begin += a.group) {
      const int64_t end = begin + a.group < shard_end ? begin + a.group : shard_end;
      QuantizeGroup(a, begin, end, scale++);
    }
  }
}

}  // namespace LOCKSTEP_ISA
}  // namespace lockstep
