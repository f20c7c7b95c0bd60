// WeightStore: the one place where weights become resident on a rank's device. Accounts every byte
// by format and module class, reports progress, and proves that no weight is placed twice or behind
// its back. One thread. Buffers live as long as the store, which lives as long as the process.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/runtime/counters.h"
#include "kernels/runtime/device_buffer.h"
#include "kernels/runtime/thread_pool.h"
#include "models/weights/checkpoint.h"
#include "models/weights/shard_spec.h"

namespace lockstep {

// What a byte belongs to. `format` is "bf16", "nvfp4", "fp8_channel", "fp8_tensor", "fp8_block",
// ...; `module_class` is "embedding", "attention", "delta_net", "mlp", "norm", "head", ...
struct WeightClass {
  std::string format;
  std::string module_class;
  bool operator<(const WeightClass& o) const {
    return std::tie(format, module_class) < std::tie(o.format, o.module_class);
  }
};

struct LoadProgress {
  int64_t bytes_done = 0;  // of the checkpoint's bytes that this rank reads
  int64_t bytes_total = 0;
  int64_t tensors_done = 0;
  std::string current;  // tensor being placed
};

class WeightStore {
 public:
  using ProgressFn = std::function<void(const LoadProgress&)>;

  WeightStore(const Checkpoint* checkpoint, DeviceType device, int rank, int world,
              Counters* counters, ProgressFn progress);

  const Checkpoint& checkpoint() const { return *checkpoint_; }
  int rank() const { return rank_; }
  int world() const { return world_; }
  DeviceType device() const { return device_; }
  // Threads to check and pack weights with.
  ThreadPool* pool() { return &pool_; }

  // Marks a tensor as used by this model: tensors that nobody used are an error at the end
  // (Leftovers). NotFound names it. Using a tensor twice is fine (tied heads).
  absl::StatusOr<const TensorInfo*> Use(const std::string& name);
  // As Use, but nullptr when the checkpoint has no such tensor.
  const TensorInfo* UseIfPresent(const std::string& name);
  // Marks every tensor that `matches` accepts as deliberately unused.
  void Allow(const std::function<bool(const std::string&)>& matches);
  // InvalidArgument listing the tensors that nobody used or allowed.
  absl::Status CheckLeftovers() const;

  // Device memory for a weight, accounted to `cls`. `checkpoint_bytes` is this rank's share of the
  // checkpoint behind it (the sum of its slices, as stored): resident / share is the ratio
  // exported.
  absl::StatusOr<DeviceBuffer> Allocate(int64_t bytes, int64_t checkpoint_bytes,
                                        const WeightClass& cls);
  // The same, filled: `fill` writes all of the bytes on the host, and they are on the device on
  // return. What it does not write is NaN.
  absl::StatusOr<DeviceBuffer> Place(int64_t bytes, int64_t checkpoint_bytes,
                                     const WeightClass& cls,
                                     const std::function<absl::Status(uint8_t*)>& fill);
  // Says that the tensor was placed: drives progress and the weights_to_device counter.
  // A tensor may be placed in parts (experts of a stack).
  void Placed(const TensorInfo& tensor, int64_t checkpoint_bytes);
  // Tensors of which more bytes were placed than they have: weights that are resident twice.
  std::vector<std::string> PlacedTwice() const;
  void SetExpectedBytes(int64_t bytes_total) { progress_state_.bytes_total = bytes_total; }

  // A small tensor (norm weight, A_log, convolution) as stored, the rank's slices of dimension 0
  // concatenated. Rank-3 [C, 1, W] becomes [C, W]. Kept in the stored dtype (F32 or BF16).
  // InvalidArgument names the tensor, its shape and the one expected; non-finite values are
  // DataLoss.
  absl::StatusOr<TensorView> PlaceTensor(const std::string& name,
                                         std::vector<int64_t> expected_shape, const ShardSpec& dim0,
                                         const std::string& module_class);

  struct Bytes {
    int64_t resident = 0;
    int64_t checkpoint = 0;  // the rank's share
  };
  const std::map<WeightClass, Bytes>& bytes_by_class() const { return bytes_; }
  Bytes total() const;
  // XXH3 over what was placed, in placement order (the checkpoint's digest, rank and world, names,
  // dtypes, shapes, bytes of the share): the same shard loaded again has the same digest.
  uint64_t shard_digest() const { return shard_digest_; }

 private:
  ThreadPool pool_;
  const Checkpoint* checkpoint_;
  DeviceType device_;
  int rank_, world_;
  Counters* counters_;
  ProgressFn progress_;
  LoadProgress progress_state_;
  std::set<std::string> used_;  // used or allowed
  std::map<std::string, int64_t> placed_bytes_;
  std::map<WeightClass, Bytes> bytes_;
  std::vector<DeviceBuffer> owned_;  // of PlaceTensor
  uint64_t shard_digest_ = 0;
};

}  // namespace lockstep
