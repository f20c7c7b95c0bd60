// The CPU arm of activation quantization, built once per instruction set: plain loops in a form
// that the compiler turns into vectors. Every step is exact or rounds once per element, so all
// builds agree.
#include <cstdint>
#include <cstring>

#include "kernels/base/float_types.h"
#include "kernels/quantize/quantize_args.h"
#include "kernels/quantize/quantize_element.h"

namespace lockstep {
namespace LOCKSTEP_ISA {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kChunk = 512;

// Columns [begin, begin + count) of the row as floats.
void Widen(const QuantizeRowArgs& a, int64_t begin, int64_t count, float* out) {
  if (!a.x_bf16) {
    std::memcpy(out, static_cast<const float*>(a.x) + begin, static_cast<size_t>(count) * 4);
    return;
  }
  const uint16_t* x = static_cast<const uint16_t*>(a.x) + begin;
  for (int64_t i = 0; i < count; ++i) out[i] = BitsToFloat(static_cast<uint32_t>(x[i]) << 16);
}

// The largest magnitude, in any order; a NaN is passed over.
float AbsMax(const float* x, int64_t count, float amax) {
  float lanes[kLanes];
  for (int64_t l = 0; l < kLanes; ++l) lanes[l] = amax;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) {
      const float m = BitsToFloat(FloatToBits(x[i + l]) & 0x7fffffffu);
      lanes[l] = lanes[l] < m ? m : lanes[l];
    }
  }
  for (; i < count; ++i) {
    const float m = BitsToFloat(FloatToBits(x[i]) & 0x7fffffffu);
    lanes[0] = lanes[0] < m ? m : lanes[0];
  }
  for (int64_t l = 0; l < kLanes; ++l) amax = amax < lanes[l] ? lanes[l] : amax;
  return amax;
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
    scale = DynamicScale(a.scale_rule, amax);
  }
  for (int64_t i = begin; i < end; i += kChunk) {
    const int64_t count = end - i < kChunk ? end - i : kChunk;
    Widen(a, i, count, chunk);
    uint8_t* codes = a.codes + i;
    for (int64_t j = 0; j < count; ++j) codes[j] = static_cast<uint8_t>(E4M3Code(chunk[j] / scale));
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
