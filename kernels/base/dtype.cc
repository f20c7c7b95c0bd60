#include "kernels/base/dtype.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

namespace lockstep {
namespace {

struct Row {
  DType dtype;
  const char* name;
  int64_t size;
};

constexpr Row kRows[] = {
    {DType::kF32, "F32", 4},      {DType::kBF16, "BF16", 2}, {DType::kF16, "F16", 2},
    {DType::kE4M3, "F8_E4M3", 1}, {DType::kU8, "U8", 1},     {DType::kI32, "I32", 4},
    {DType::kI64, "I64", 8},      {DType::kBool, "BOOL", 1}, {DType::kF64, "F64", 8},
};

const Row& RowOf(DType dtype) {
  for (const Row& row : kRows) {
    if (row.dtype == dtype) return row;
  }
  CHECK(false) << "dtype " << static_cast<int>(dtype) << " has no row";
  __builtin_unreachable();
}

}  // namespace

int64_t SizeOf(DType dtype) { return RowOf(dtype).size; }

absl::string_view Name(DType dtype) { return RowOf(dtype).name; }

absl::StatusOr<DType> ParseDType(absl::string_view safetensors_name) {
  for (const Row& row : kRows) {
    if (safetensors_name == row.name) return row.dtype;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "dtype \"", safetensors_name,
      "\" is not supported; supported: F32, BF16, F16, F8_E4M3, U8, I32, I64, BOOL, F64"));
}

}  // namespace lockstep
