// Implementation of WeightStore.
#include "models/weights/weight_store.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/check.h"
#include "kernels/base/hash.h"
#include "kernels/base/status_macros.h"
#include "kernels/runtime/device_memory.h"

namespace lockstep {
namespace {

// A byte that nobody wrote is a NaN in every format of values and scales, and is seen: zeros would
// pass for weights.
constexpr uint8_t kUnwritten = 0xff;

constexpr size_t kListedLeftovers = 20;

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

// [C, 1, W] as [C, W]; a scalar as [1]; others unchanged.
std::vector<int64_t> Normalized(const std::vector<int64_t>& shape) {
  if (shape.empty()) return {1};
  if (shape.size() == 3 && shape[1] == 1) return {shape[0], shape[2]};
  return shape;
}

// Index of the first value of `count` (F32 or BF16, unaligned) that is not finite, or -1.
int64_t FirstNonFinite(const uint8_t* data, DType dtype, int64_t count) {
  const int64_t size = SizeOf(dtype);
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits = 0;
    if (dtype == DType::kF32) {
      std::memcpy(&bits, data + i * size, sizeof bits);
    } else {
      uint16_t half = 0;
      std::memcpy(&half, data + i * size, sizeof half);
      bits = static_cast<uint32_t>(half) << 16;
    }
    if ((bits & 0x7f800000u) == 0x7f800000u) return i;
  }
  return -1;
}

}  // namespace

WeightStore::WeightStore(const Checkpoint* checkpoint, DeviceType device, int rank, int world,
                         Counters* counters, ProgressFn progress)
    : pool_(
          std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / std::max(1, world))),
      checkpoint_(checkpoint),
      device_(device),
      rank_(rank),
      world_(world),
      counters_(counters),
      progress_(std::move(progress)) {
  CHECK(checkpoint != nullptr);
  CHECK(world >= 1 && rank >= 0 && rank < world) << "rank " << rank << " of " << world << " ";
  shard_digest_ = Fold64(Fold64(Fold64(0, checkpoint->digest()), static_cast<uint64_t>(world)),
                         static_cast<uint64_t>(rank));
}

absl::StatusOr<const TensorInfo*> WeightStore::Use(const std::string& name) {
  ASSIGN_OR_RETURN(const TensorInfo* tensor, checkpoint_->Get(name));
  used_.insert(name);
  return tensor;
}

const TensorInfo* WeightStore::UseIfPresent(const std::string& name) {
  const TensorInfo* tensor = checkpoint_->Find(name);
  if (tensor != nullptr) used_.insert(name);
  return tensor;
}

void WeightStore::Allow(const std::function<bool(const std::string&)>& matches) {
  for (const auto& item : checkpoint_->tensors()) {
    if (matches(item.first)) used_.insert(item.first);
  }
}

absl::Status WeightStore::CheckLeftovers() const {
  std::vector<std::string> names;
  for (const auto& item : checkpoint_->tensors()) {
    if (used_.count(item.first) == 0) names.push_back(item.first);
  }
  if (names.empty()) return absl::OkStatus();
  const size_t listed = std::min(names.size(), kListedLeftovers);
  return absl::InvalidArgumentError(absl::StrCat(
      names.size(), " tensors of ", checkpoint_->directory(), " are not part of this model: ",
      absl::StrJoin(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(listed), ", "),
      listed < names.size() ? absl::StrCat(" and ", names.size() - listed, " more") : "",
      "; does config.json belong to these weights?"));
}

absl::StatusOr<DeviceBuffer> WeightStore::Allocate(int64_t bytes, int64_t checkpoint_bytes,
                                                   const WeightClass& cls) {
  ASSIGN_OR_RETURN(DeviceBuffer buffer, DeviceBuffer::Allocate(device_, bytes));
  Bytes& entry = bytes_[cls];
  entry.resident += bytes;
  entry.checkpoint += checkpoint_bytes;
  return buffer;
}

absl::StatusOr<DeviceBuffer> WeightStore::Place(int64_t bytes, int64_t checkpoint_bytes,
                                                const WeightClass& cls,
                                                const std::function<absl::Status(uint8_t*)>& fill) {
  ASSIGN_OR_RETURN(DeviceBuffer buffer, Allocate(bytes, checkpoint_bytes, cls));
  if (device_ == DeviceType::kCpu) {
    if (bytes > 0) std::memset(buffer.data(), kUnwritten, static_cast<size_t>(bytes));
    RETURN_IF_ERROR(fill(static_cast<uint8_t*>(buffer.data())));
    return buffer;
  }
  std::vector<uint8_t> staging(static_cast<size_t>(bytes), kUnwritten);
  RETURN_IF_ERROR(fill(staging.data()));
  RETURN_IF_ERROR(CopyBytes(device_, buffer.data(), DeviceType::kCpu, staging.data(), bytes));
  return buffer;
}

void WeightStore::Placed(const TensorInfo& tensor, int64_t checkpoint_bytes) {
  CHECK(checkpoint_bytes >= 0 && checkpoint_bytes <= tensor.bytes)
      << checkpoint_bytes << " bytes of " << tensor.name << " " << tensor.ToString() << " ";
  used_.insert(tensor.name);
  const auto inserted = placed_bytes_.emplace(tensor.name, 0);
  inserted.first->second += checkpoint_bytes;
  shard_digest_ =
      Fold64(shard_digest_,
             HashBytes(absl::StrCat(tensor.name, " ", tensor.ToString(), " ", checkpoint_bytes)));
  if (counters_ != nullptr) counters_->Add(Traffic::kWeightsToDevice, checkpoint_bytes);
  progress_state_.bytes_done += checkpoint_bytes;
  if (inserted.second) ++progress_state_.tensors_done;
  progress_state_.current = tensor.name;
  if (progress_) progress_(progress_state_);
}

std::vector<std::string> WeightStore::PlacedTwice() const {
  std::vector<std::string> names;
  for (const auto& item : placed_bytes_) {
    const TensorInfo* tensor = checkpoint_->Find(item.first);
    if (tensor != nullptr && item.second > tensor->bytes) names.push_back(item.first);
  }
  return names;
}

absl::StatusOr<TensorView> WeightStore::PlaceTensor(const std::string& name,
                                                    std::vector<int64_t> expected_shape,
                                                    const ShardSpec& dim0,
                                                    const std::string& module_class) {
  ASSIGN_OR_RETURN(const TensorInfo* tensor, Use(name));
  const std::vector<int64_t> shape = Normalized(tensor->shape);
  if (shape != Normalized(expected_shape)) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", name, " is ", tensor->ToString(),
                                                   "; the model expects ",
                                                   ShapeText(expected_shape)));
  }
  if (tensor->dtype != DType::kF32 && tensor->dtype != DType::kBF16) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", name, " is ", tensor->ToString(),
                     "; F32 or BF16 is expected here: convert the checkpoint"));
  }
  CHECK(shape.size() <= 4) << name << " has rank " << shape.size() << " ";
  CHECK_EQ(dim0.full_size(), shape[0]) << name << " ";
  const absl::Status valid = dim0.Validate(world_);
  if (!valid.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", name, ": ", valid.message()));
  }
  int64_t row_elements = 1;
  Shape local;
  local.push_back(dim0.LocalSize(rank_, world_));
  for (size_t i = 1; i < shape.size(); ++i) {
    row_elements *= shape[i];
    local.push_back(shape[i]);
  }
  const int64_t row_bytes = row_elements * SizeOf(tensor->dtype);
  const int64_t bytes = local[0] * row_bytes;
  const WeightClass cls{absl::AsciiStrToLower(Name(tensor->dtype)), module_class};
  const auto fill = [&](uint8_t* out) -> absl::Status {
    for (const Range& slice : dim0.Slices(rank_, world_)) {
      const uint8_t* source = tensor->data + slice.begin * row_bytes;
      const int64_t bad = FirstNonFinite(source, tensor->dtype, slice.size * row_elements);
      if (bad >= 0) {
        return absl::DataLossError(
            absl::StrCat("tensor ", name, " in ", tensor->file, ": value at index ",
                         slice.begin * row_elements + bad, " is not finite"));
      }
      if (row_bytes > 0) std::memcpy(out, source, static_cast<size_t>(slice.size * row_bytes));
      out += slice.size * row_bytes;
    }
    return absl::OkStatus();
  };
  ASSIGN_OR_RETURN(DeviceBuffer buffer, Place(bytes, bytes, cls, fill));
  const TensorView view = buffer.View(tensor->dtype, local);
  owned_.push_back(std::move(buffer));
  Placed(*tensor, bytes);
  return view;
}

WeightStore::Bytes WeightStore::total() const {
  Bytes sum;
  for (const auto& item : bytes_) {
    sum.resident += item.second.resident;
    sum.checkpoint += item.second.checkpoint;
  }
  return sum;
}

}  // namespace lockstep
