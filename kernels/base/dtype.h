// DType: the element types that tensors of this system have, in memory and in checkpoints.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lockstep {

enum class DType : uint8_t {
  kF32,
  kBF16,
  kF16,
  kE4M3,  // FP8 E4M3FN: bias 7, no infinity, 0x7F and 0xFF are NaN
  kU8,    // bytes; NVFP4 keeps two E2M1 codes in each
  kI32,
  kI64,
  kBool,
  kF64,
};

// Bytes of one element.
int64_t SizeOf(DType dtype);

// "F32", "BF16", "F8_E4M3", ...: the names that safetensors uses.
absl::string_view Name(DType dtype);

// InvalidArgument for a name that this system does not read; the message carries the name.
absl::StatusOr<DType> ParseDType(absl::string_view safetensors_name);

}  // namespace lockstep
