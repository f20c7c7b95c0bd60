// The plain parts of model.h: what specs add up to. No architecture is needed for them.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "models/model.h"

namespace lockstep {

int64_t CacheSpec::BytesPerKvBlock() const {
  int64_t bytes = 0;
  for (const KvLayer& layer : kv_layers) {
    bytes += 2 * layer.num_kv_heads * kGrid * layer.head_dim * SizeOf(kv_dtype);
  }
  return bytes;
}

int64_t CacheSpec::BytesPerSlot() const {
  int64_t bytes = 0;
  for (const SlotTensor& t : slot_tensors) bytes += t.shape.num_elements() * SizeOf(t.dtype);
  return bytes;
}

int64_t CacheSpec::BytesPerSnapshot() const {
  int64_t bytes = 0;
  for (const SlotTensor& t : slot_tensors) {
    if (t.snapshot) bytes += t.shape.num_elements() * SizeOf(t.dtype);
  }
  return bytes;
}

absl::Status TpLegality::Check(int tp) const {
  if (std::find(legal.begin(), legal.end(), tp) != legal.end()) return absl::OkStatus();
  std::string reason = "tensor-parallel sizes are powers of two up to 8";
  for (const std::string& r : reasons) {
    if (r.rfind(absl::StrCat(tp, ": "), 0) == 0) reason = r.substr(r.find(' ') + 1);
  }
  return absl::InvalidArgumentError(absl::StrCat("tensor-parallel size ", tp,
                                                 " is not legal for this checkpoint: ", reason,
                                                 "; legal: ", absl::StrJoin(legal, ", ")));
}

}  // namespace lockstep
