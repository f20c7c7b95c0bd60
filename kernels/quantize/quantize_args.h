// Plain structs of activation quantization, safe to include under any instruction set.
#pragma once

#include <cstdint>

namespace lockstep {

// One row to quantize. `scale_rule`: 0 static, 1 per token, 2 per block of 128 (quantize.h).
struct QuantizeRowArgs {
  const void* x = nullptr;  // k values
  bool x_bf16 = false;      // else F32
  int64_t k = 0;
  int64_t shard_size = 0;
  int64_t group = 0;
  int scale_rule = 0;
  float static_scale = 0.0f;
  uint8_t* codes = nullptr;  // k
  float* scales = nullptr;   // one per group
};

}  // namespace lockstep
