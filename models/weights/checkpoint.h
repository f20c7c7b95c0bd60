// Checkpoint: the tensors of a model directory in safetensors format: one `model.safetensors`, or
// the shards that `model.safetensors.index.json` names. Files are mapped read-only; opening reads
// headers only. Everything that a header or an index says is checked against the files before Open
// returns: afterwards every view is in bounds. Thread safe after Open.
//
// Errors of Open: NotFound (no such directory or no safetensors in it); DataLoss, with the file,
// what was expected and what was found, for a truncated file (bytes missing), a missing shard, an
// index that names tensors or files that are not there (or leaves out some that are), duplicate,
// overlapping or out-of-range tensors, a header that is too long (100 MB) or no JSON, holes between
// tensors, a shape that does not match its bytes. The message begins with one of
// CHECKPOINT_TRUNCATED, CHECKPOINT_MISSING_SHARD, CHECKPOINT_INDEX_MISMATCH,
// CHECKPOINT_DUPLICATE_TENSOR, CHECKPOINT_INVALID.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/base/tensor_view.h"

namespace lockstep {

struct TensorInfo {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;     // any rank; [] is a scalar
  std::string file;               // base name of the shard
  const uint8_t* data = nullptr;  // may be unaligned for its dtype: copy, do not cast
  int64_t bytes = 0;

  int64_t num_elements() const {
    int64_t n = 1;
    for (int64_t d : shape) n *= d;
    return n;
  }
  // "F8_E4M3[96, 80]"
  std::string ToString() const;
};

class Checkpoint {
 public:
  static absl::StatusOr<std::unique_ptr<Checkpoint>> Open(const std::string& directory);
  // One safetensors file, e.g. reference outputs.
  static absl::StatusOr<std::unique_ptr<Checkpoint>> OpenFile(const std::string& path);
  ~Checkpoint();

  // nullptr when there is no such tensor.
  const TensorInfo* Find(const std::string& name) const;
  // NotFound names the tensor and the directory.
  absl::StatusOr<const TensorInfo*> Get(const std::string& name) const;
  const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }
  const std::string& directory() const { return directory_; }
  int64_t total_bytes() const;
  // XXH3 over names, dtypes, shapes and sizes of the files, in name order: identifies the
  // checkpoint.
  uint64_t digest() const { return digest_; }

 private:
  struct Mapping;
  Checkpoint() = default;
  absl::Status AddFile(const std::string& path);
  void ComputeDigest();

  std::string directory_;
  std::vector<std::unique_ptr<Mapping>> mappings_;
  std::map<std::string, TensorInfo> tensors_;
  uint64_t digest_ = 0;
};

}  // namespace lockstep
