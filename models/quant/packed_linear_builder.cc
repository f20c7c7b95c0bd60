// Validation of shards and PackedLinearBuilder: slices of the checkpoint, checked and packed.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/float_types.h"
#include "kernels/base/status_macros.h"
#include "kernels/gemm/pack.h"
#include "kernels/gemm/pack_fragments.h"
#include "models/quant/packed_linear.h"

namespace lockstep {
namespace {

constexpr int64_t kBlock = 128;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

absl::Status BadShape(const TensorInfo& tensor, const std::string& expected) {
  return absl::InvalidArgumentError(absl::StrCat("tensor ", tensor.name, " in ", tensor.file,
                                                 " is ", tensor.ToString(), ", expected ",
                                                 expected));
}

absl::Status BadValue(const TensorInfo& tensor, int64_t index, const std::string& what) {
  return absl::DataLossError(absl::StrCat("tensor ", tensor.name, " in ", tensor.file, ": index ",
                                          index, " is ", what,
                                          "; the file is corrupt, get it again"));
}

// Element `index` of a tensor of F32 or BF16, which may be unaligned.
float ValueAt(const TensorInfo& tensor, int64_t index) {
  if (tensor.dtype == DType::kBF16) {
    BF16 h;
    std::memcpy(&h, tensor.data + index * 2, 2);
    return ToFloat(h);
  }
  float f;
  std::memcpy(&f, tensor.data + index * 4, 4);
  return f;
}

bool IsFloat(const TensorInfo& tensor) {
  return tensor.dtype == DType::kF32 || tensor.dtype == DType::kBF16;
}

// A zero scale (`index` of `scales`) goes with zeros only: columns [begin, end) of row `row` of the
// FP8 codes [n, k].
absl::Status CheckZeroScale(const TensorInfo& scales, int64_t index, const TensorInfo& codes,
                            int64_t row, int64_t begin, int64_t end) {
  if (ValueAt(scales, index) != 0.0f) return absl::OkStatus();
  const uint8_t* data = codes.data + row * codes.shape.back();
  const bool zeros =
      std::all_of(data + begin, data + end, [](uint8_t code) { return (code & 0x7f) == 0; });
  if (zeros) return absl::OkStatus();
  return BadValue(
      scales, index,
      absl::StrCat("the zero scale of row ", row, " of ", codes.name, ", which is not zero"));
}

// Scales are finite and not negative (a negative zero is a zero).
absl::Status CheckScale(const TensorInfo& tensor, int64_t index) {
  const float f = ValueAt(tensor, index);
  if (std::isfinite(f) && f >= 0.0f) return absl::OkStatus();
  return BadValue(tensor, index, absl::StrCat("the scale ", f));
}

}  // namespace

absl::Status ValidateShard(const LinearShard& shard, int64_t k_multiple) {
  const auto bad = [&](const std::string& why) {
    return absl::InvalidArgumentError(
        absl::StrCat(shard.module, " [", shard.n, ", ", shard.k, "]: ", why));
  };
  for (const Range& r : shard.rows) {
    if (r.begin < 0 || r.size < 0 || r.begin + r.size > shard.n) {
      return bad(absl::StrCat("rows ", r.begin, "+", r.size, " are out of range"));
    }
  }
  const Range& c = shard.columns;
  if (!shard.row_parallel) {
    if (c.begin != 0 || c.size != shard.k) return bad("a column-parallel part has all columns");
    if (shard.k % k_multiple == 0) return absl::OkStatus();
    return bad(absl::StrCat("the format needs K in multiples of ", k_multiple));
  }
  const int64_t size = shard.virtual_shards.size;
  if (size <= 0 || shard.virtual_shards.count * size != shard.k) {
    return bad(
        absl::StrCat(shard.virtual_shards.count, " virtual shards of ", size, " do not cut K"));
  }
  if (size % k_multiple != 0) {
    return bad(absl::StrCat("a virtual shard has ", size,
                            " columns; the format needs multiples of ", k_multiple));
  }
  if (c.begin < 0 || c.size <= 0 || c.begin + c.size > shard.k || c.begin % size != 0 ||
      c.size % size != 0) {
    return bad(
        absl::StrCat("columns ", c.begin, "+", c.size, " are no whole virtual shards of ", size));
  }
  const int64_t local = c.size / size;
  if (local > kMaxShards || (local & (local - 1)) != 0) {
    return bad(absl::StrCat(local, " virtual shards on one rank; a power of two up to ", kMaxShards,
                            " is needed"));
  }
  return absl::OkStatus();
}

absl::StatusOr<PackedLinearBuilder> PackedLinearBuilder::Create(const LinearScheme& scheme,
                                                                const LinearShard& shard,
                                                                ActivationQuant activation_quant,
                                                                WeightStore* store) {
  PackedLinearBuilder b;
  b.scheme_ = scheme;
  b.shard_ = shard;
  b.store_ = store;
  b.weight_.device = store->device();
  b.weight_.n = shard.local_n();
  b.weight_.k = shard.columns.size;
  b.weight_.shards = shard.local_shards();
  if (!shard.row_parallel) b.weight_.splits = SplitsOf(store->device(), shard.k);
  RETURN_IF_ERROR(b.PlanActivation(activation_quant));
  return b;
}

absl::Status PackedLinearBuilder::PlanActivation(ActivationQuant activation_quant) {
  const int64_t shard_size = shard_.row_parallel ? shard_.virtual_shards.size : shard_.k;
  // Block-scaled NVFP4 and unquantized weights take their input as it is.
  const bool fp8 = scheme_.weight != WeightScheme::kBF16 && scheme_.weight != WeightScheme::kNvfp4;
  if (fp8 && activation_quant == ActivationQuant::kCheckpoint) {
    activation_.scheme = scheme_.activation;
  }
  activation_.groups.shard_size = shard_size;
  activation_.groups.group =
      activation_.scheme == ActivationScheme::kFp8Block128 ? kBlock : shard_size;
  if (activation_.scheme == ActivationScheme::kFp8Static) {
    ASSIGN_OR_RETURN(const TensorInfo* tensor, Use(scheme_.input_scale));
    ASSIGN_OR_RETURN(activation_.static_scale, PlaceScalar(*tensor));
    if (activation_.static_scale == 0.0f) return BadValue(*tensor, 0, "a zero activation scale");
  } else {
    Ignore("input_scale");
    Ignore("input_global_scale");
  }
  return absl::OkStatus();
}

absl::StatusOr<const TensorInfo*> PackedLinearBuilder::Use(const std::string& suffix) {
  if (shard_.stack.count > 0) return store_->Use(shard_.stack.tensor);
  return store_->Use(absl::StrCat(shard_.module, ".", suffix));
}

void PackedLinearBuilder::Ignore(const std::string& suffix) {
  store_->UseIfPresent(absl::StrCat(shard_.module, ".", suffix));
}

absl::StatusOr<const void*> PackedLinearBuilder::Place(const TensorInfo& tensor, int64_t bytes,
                                                       int64_t checkpoint_bytes,
                                                       const std::function<void(uint8_t*)>& fill) {
  const WeightClass cls{Name(scheme_.weight), shard_.module_class};
  ASSIGN_OR_RETURN(DeviceBuffer buffer,
                   store_->Place(bytes, checkpoint_bytes, cls, [&](uint8_t* out) {
                     fill(out);
                     return absl::OkStatus();
                   }));
  buffers_.push_back(std::move(buffer));
  store_->Placed(tensor, checkpoint_bytes);
  return buffers_.back().data();
}

absl::StatusOr<std::vector<const uint8_t*>> PackedLinearBuilder::RowsOf(
    const TensorInfo& tensor, int64_t k_per_unit, bool (*is_bad)(const uint8_t*),
    const char* bad_text) const {
  const int64_t unit_bytes = SizeOf(tensor.dtype);
  const int64_t row_units = shard_.k / k_per_unit;
  const LinearStack& stack = shard_.stack;
  if (stack.count > 0) {
    if (tensor.shape != std::vector<int64_t>{stack.count, shard_.n, row_units}) {
      return BadShape(tensor, absl::StrCat("[", stack.count, ", ", shard_.n, ", ", row_units, "]"));
    }
  } else if (tensor.shape != std::vector<int64_t>{shard_.n, row_units}) {
    return BadShape(tensor, absl::StrCat("[", shard_.n, ", ", row_units, "]"));
  }
  // Units before the first one of row 0 that is wanted.
  const int64_t first = stack.index * shard_.n * row_units + shard_.columns.begin / k_per_unit;
  const int64_t units = shard_.columns.size / k_per_unit;
  std::vector<const uint8_t*> rows;
  for (const Range& range : shard_.rows) {
    for (int64_t r = range.begin; r < range.begin + range.size; ++r) {
      rows.push_back(tensor.data + (r * row_units + first) * unit_bytes);
    }
  }
  // The first row with a bad unit, if any.
  std::atomic<int64_t> bad_row{static_cast<int64_t>(rows.size())};
  store_->pool()->ParallelFor(static_cast<int64_t>(rows.size()), [&](int64_t i) {
    const uint8_t* row = rows[static_cast<size_t>(i)];
    bool any = false;
    for (int64_t u = 0; u < units; ++u) any |= is_bad(row + u * unit_bytes);
    int64_t seen = bad_row.load();
    while (any && i < seen && !bad_row.compare_exchange_weak(seen, i)) {
    }
  });
  if (bad_row == static_cast<int64_t>(rows.size())) return rows;
  const uint8_t* row = rows[static_cast<size_t>(bad_row.load())];
  int64_t unit = (row - tensor.data) / unit_bytes;
  while (!is_bad(tensor.data + unit * unit_bytes)) ++unit;
  return BadValue(tensor, unit, bad_text);
}

absl::Status PackedLinearBuilder::CheckFragments() const {
  const auto bad = [&](const std::string& why) {
    return absl::FailedPreconditionError(
        absl::StrCat(shard_.module, " [", shard_.n, ", ", shard_.k, "]: on cuda ", why));
  };
  if (weight_.format == WeightFormat::kF32) {
    return bad("weights are BF16, FP8 or NVFP4, these are F32: convert the checkpoint");
  }
  const int64_t shard_size = weight_.k / weight_.shards;
  if (shard_size % 16 == 0) return absl::OkStatus();
  return bad(absl::StrCat("columns come in multiples of 16, a virtual shard has ", shard_size));
}

absl::StatusOr<const void*> PackedLinearBuilder::PlaceCodes(const TensorInfo& tensor,
                                                            bool (*is_bad)(const uint8_t*),
                                                            const char* bad_text) {
  ASSIGN_OR_RETURN(const std::vector<const uint8_t*> rows, RowsOf(tensor, 1, is_bad, bad_text));
  const int64_t unit_bytes = SizeOf(tensor.dtype);
  const int64_t bytes = weight_.n * weight_.k * unit_bytes;
  if (store_->device() == DeviceType::kCpu) {
    return Place(tensor, bytes, bytes, [&](uint8_t* out) {
      PackRows(rows, weight_.k, static_cast<int>(unit_bytes), out);
    });
  }
  RETURN_IF_ERROR(CheckFragments());
  return Place(tensor, FragmentCodeBytes(weight_.format, weight_.n, weight_.k), bytes,
               [&](uint8_t* out) {
                 PackFragments(store_->pool(), weight_.format, rows, weight_.k, leaves(), out);
               });
}

absl::Status PackedLinearBuilder::PlaceNvfp4(const TensorInfo& codes, const TensorInfo& scales,
                                             bool (*is_bad_scale)(const uint8_t*),
                                             const char* bad_text) {
  constexpr int64_t kScaleBlock = 16;
  const auto never = [](const uint8_t*) { return false; };
  ASSIGN_OR_RETURN(const std::vector<const uint8_t*> rows, RowsOf(codes, 2, never, ""));
  ASSIGN_OR_RETURN(const std::vector<const uint8_t*> scale_rows,
                   RowsOf(scales, kScaleBlock, is_bad_scale, bad_text));
  const int64_t n = weight_.n, k = weight_.k;
  const int64_t code_bytes = n * k / 2, scale_bytes = n * k / kScaleBlock;
  if (store_->device() == DeviceType::kCpu) {
    ASSIGN_OR_RETURN(weight_.codes, Place(codes, code_bytes, code_bytes,
                                          [&](uint8_t* out) { PackRows(rows, k / 2, 1, out); }));
    ASSIGN_OR_RETURN(weight_.block16_scales,
                     Place(scales, scale_bytes, scale_bytes,
                           [&](uint8_t* out) { PackRows(scale_rows, k / kScaleBlock, 1, out); }));
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(CheckFragments());
  std::vector<uint8_t> packed_scales(static_cast<size_t>(FragmentScaleBytes(n, k)));
  ASSIGN_OR_RETURN(weight_.codes, Place(codes, FragmentCodeBytes(WeightFormat::kNvfp4, n, k),
                                        code_bytes, [&](uint8_t* out) {
                                          PackNvfp4Fragments(store_->pool(), rows, scale_rows, k,
                                                             leaves(), out, packed_scales.data());
                                        }));
  ASSIGN_OR_RETURN(
      weight_.block16_scales,
      Place(scales, static_cast<int64_t>(packed_scales.size()), scale_bytes,
            [&](uint8_t* out) { std::copy(packed_scales.begin(), packed_scales.end(), out); }));
  return absl::OkStatus();
}

absl::Status PackedLinearBuilder::PlaceChannelScales(const TensorInfo& tensor,
                                                     const TensorInfo& codes) {
  const std::vector<int64_t>& shape = tensor.shape;
  if (!IsFloat(tensor) || shape.empty() || shape.size() > 2 || shape[0] != shard_.n ||
      tensor.num_elements() != shard_.n) {
    return BadShape(tensor, absl::StrCat("[", shard_.n, "] or [", shard_.n, ", 1] of F32 or BF16"));
  }
  const int64_t size = SizeOf(tensor.dtype);
  for (const Range& r : shard_.rows) {
    for (int64_t i = r.begin; i < r.begin + r.size; ++i) {
      RETURN_IF_ERROR(CheckScale(tensor, i));
      RETURN_IF_ERROR(CheckZeroScale(tensor, i, codes, i, shard_.columns.begin,
                                     shard_.columns.begin + shard_.columns.size));
    }
  }
  const int64_t bytes = shard_.local_n() * size;
  weight_.scaling = WeightScaling::kChannel;
  weight_.scale_dtype = tensor.dtype;
  ASSIGN_OR_RETURN(weight_.scales, Place(tensor, bytes, bytes, [&](uint8_t* out) {
                     for (const Range& r : shard_.rows) {
                       std::memcpy(out, tensor.data + r.begin * size,
                                   static_cast<size_t>(r.size * size));
                       out += r.size * size;
                     }
                   }));
  return absl::OkStatus();
}

absl::Status PackedLinearBuilder::PlaceBlockScales(const TensorInfo& tensor,
                                                   const TensorInfo& codes) {
  const int64_t all_rows = CeilDiv(shard_.n, kBlock);
  const int64_t all_columns = CeilDiv(shard_.k, kBlock);
  if (!IsFloat(tensor) || (tensor.shape != std::vector<int64_t>{all_rows, all_columns} &&
                           tensor.shape != std::vector<int64_t>{all_rows, 1, all_columns, 1})) {
    return BadShape(tensor, absl::StrCat("[", all_rows, ", ", all_columns, "] or [", all_rows,
                                         ", 1, ", all_columns, ", 1] of F32 or BF16"));
  }
  // The rows of scales that cover the shard's rows; neighbouring ranges may share one.
  std::vector<int64_t> held;
  int64_t local = 0;
  for (const Range& r : shard_.rows) {
    if (r.size == 0) continue;
    const int64_t last = (r.begin + r.size - 1) / kBlock;
    int64_t row = r.begin / kBlock;
    const bool shared = !held.empty() && held.back() == row;
    weight_.block_rows.push_back({local, local + r.size, r.begin % kBlock,
                                  static_cast<int64_t>(held.size()) - (shared ? 1 : 0)});
    for (row += shared ? 1 : 0; row <= last; ++row) held.push_back(row);
    local += r.size;
  }
  const Range& c = shard_.columns;
  const int64_t first = c.begin / kBlock;
  const int64_t columns = (c.begin + c.size - 1) / kBlock - first + 1;
  for (int64_t row : held) {
    for (int64_t i = 0; i < columns; ++i) {
      RETURN_IF_ERROR(CheckScale(tensor, row * all_columns + first + i));
    }
  }
  for (const Range& r : shard_.rows) {
    for (int64_t row = r.begin; row < r.begin + r.size; ++row) {
      for (int64_t b = first; b < first + columns; ++b) {
        RETURN_IF_ERROR(CheckZeroScale(tensor, row / kBlock * all_columns + b, codes, row,
                                       std::max(c.begin, b * kBlock),
                                       std::min(c.begin + c.size, (b + 1) * kBlock)));
      }
    }
  }
  const int64_t size = SizeOf(tensor.dtype);
  const int64_t row_bytes = columns * size;
  const int64_t bytes = static_cast<int64_t>(held.size()) * row_bytes;
  weight_.scaling = WeightScaling::kBlock128;
  weight_.scale_dtype = tensor.dtype;
  weight_.scale_columns = columns;
  ASSIGN_OR_RETURN(weight_.scales, Place(tensor, bytes, bytes, [&](uint8_t* out) {
                     for (int64_t row : held) {
                       std::memcpy(out, tensor.data + (row * all_columns + first) * size,
                                   static_cast<size_t>(row_bytes));
                       out += row_bytes;
                     }
                   }));
  return absl::OkStatus();
}

absl::StatusOr<float> PackedLinearBuilder::PlaceScalar(const TensorInfo& tensor) {
  if (!IsFloat(tensor) || tensor.shape.size() > 1 || tensor.num_elements() != 1) {
    return BadShape(tensor, "[] or [1] of F32 or BF16");
  }
  RETURN_IF_ERROR(CheckScale(tensor, 0));
  RETURN_IF_ERROR(Place(tensor, tensor.bytes, tensor.bytes, [&](uint8_t* out) {
                    std::memcpy(out, tensor.data, static_cast<size_t>(tensor.bytes));
                  }).status());
  return ValueAt(tensor, 0);
}

absl::StatusOr<std::unique_ptr<ResidentLinear>> PackedLinearBuilder::Finish() {
  KLayout layout;
  layout.begin = shard_.columns.begin;
  layout.k = shard_.columns.size;
  layout.shard_size = activation_.groups.shard_size;
  layout.weight_blocks = weight_.scaling == WeightScaling::kBlock128;
  layout.act_group = activation_.scheme == ActivationScheme::kNone ? 0 : activation_.groups.group;
  weight_.segments = MakeSegments(layout);
  weight_.layout = layout;
  return std::unique_ptr<ResidentLinear>(new PackedLinear(
      std::move(shard_), std::move(scheme_), std::move(weight_), activation_, std::move(buffers_)));
}

}  // namespace lockstep
