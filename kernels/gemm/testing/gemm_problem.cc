#include "kernels/gemm/testing/gemm_problem.h"

#include <cmath>
#include <cstring>

#include "kernels/base/check.h"
#include "kernels/base/float_types.h"
#include "kernels/base/hash.h"
#include "kernels/gemm/pack.h"
#include "kernels/gemm/pack_fragments.h"

namespace lockstep {
namespace testing {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t UnitBytes(WeightFormat format) { return format == WeightFormat::kBF16 ? 2 : 1; }

uint64_t Random(uint64_t seed, int64_t i) { return Mix64(Mix64(seed) + static_cast<uint64_t>(i)); }

std::vector<uint8_t> BytesOf(const std::vector<float>& values, bool bf16) {
  std::vector<uint8_t> bytes;
  for (float f : values) {
    const BF16 h = ToBF16(f);
    const auto* p =
        bf16 ? reinterpret_cast<const uint8_t*>(&h) : reinterpret_cast<const uint8_t*>(&f);
    bytes.insert(bytes.end(), p, p + (bf16 ? 2 : 4));
  }
  return bytes;
}

}  // namespace

std::vector<GemmCase> GemmCases() {
  using F = WeightFormat;
  using S = WeightScaling;
  return {
      {"bf16", F::kBF16, S::kNone, 68, 80, 1, 0},
      {"bf16_splits", F::kBF16, S::kNone, 36, 2048, 1, 0},
      {"bf16_rows", F::kBF16, S::kNone, 20, 384, 8, 0},
      {"nvfp4_48", F::kNvfp4, S::kTensor, 4, 48, 1, 0},
      {"nvfp4", F::kNvfp4, S::kTensor, 150, 272, 1, 0},
      {"nvfp4_splits", F::kNvfp4, S::kTensor, 84, 2304, 1, 0},
      {"nvfp4_rows", F::kNvfp4, S::kTensor, 40, 8 * 272, 8, 0},
      {"nvfp4_rows_4", F::kNvfp4, S::kTensor, 40, 4 * 1040, 4, 0},
      {"fp8_tensor", F::kFp8, S::kTensor, 36, 1152, 1, 0},
      {"fp8_channel", F::kFp8, S::kChannel, 150, 208, 1, 0, true},
      {"fp8_channel_rows", F::kFp8, S::kChannel, 20, 8 * 80, 8, 0},
      {"fp8_channel_w8a8", F::kFp8, S::kChannel, 68, 2048, 1, 2048, true},
      {"fp8_channel_w8a8_rows", F::kFp8, S::kChannel, 36, 8 * 48, 8, 48},
      {"fp8_block", F::kFp8, S::kBlock128, 300, 2304, 1, 0, true},
      {"fp8_block_rows", F::kFp8, S::kBlock128, 150, 8 * 48, 8, 0},
      {"fp8_block_w8a8", F::kFp8, S::kBlock128, 150, 400, 1, 128, true},
      {"fp8_block_w8a8_rows_384", F::kFp8, S::kBlock128, 280, 8 * 384, 8, 128},
      // Shards of 160: activation groups 128 + 32, weight blocks cut elsewhere.
      {"fp8_block_w8a8_rows", F::kFp8, S::kBlock128, 40, 1280, 8, 128},
      // Splits of 576 cut both kinds of blocks.
      {"fp8_block_w8a8_splits", F::kFp8, S::kBlock128, 20, 1152, 1, 128},
  };
}

TestWeight::TestWeight(const GemmCase& c) : c_(c) {
  const uint64_t seed = static_cast<uint64_t>(c.n * 100003 + c.k * 7);
  const int64_t count = c.n * c.k;
  const std::vector<float> values = RandomFloats(count, seed + 1, 2.0f);
  if (c.format == WeightFormat::kNvfp4) {
    for (int64_t i = 0; i < count / 2; ++i) {
      codes.push_back(static_cast<uint8_t>(Random(seed, i) >> 20));
    }
    for (int64_t i = 0; i < count / 16; ++i) {
      // Every scale occurs, zeros and subnormals too.
      block16.push_back(static_cast<uint8_t>(Random(seed + 2, i) % 0x7f));
    }
    tensor_scale = 0.0037f;
  } else if (c.format == WeightFormat::kFp8) {
    for (float f : values) codes.push_back(FloatToE4M3(f * f * f));
    tensor_scale = 0.37f;
  } else {
    codes = BytesOf(values, true);
  }
  const int64_t num_scales =
      c.scaling == WeightScaling::kBlock128 ? CeilDiv(c.n, 128) * CeilDiv(c.k, 128) : c.n;
  for (float f : RandomFloats(num_scales, seed + 3)) {
    scales.push_back(ToFloat(ToBF16(0.01f + std::fabs(f))));
  }
}

double TestWeight::Value(int64_t n, int64_t k) const {
  const int64_t i = n * c_.k + k;
  if (c_.format == WeightFormat::kFp8) return E4M3ToFloat(codes[i]);
  if (c_.format == WeightFormat::kNvfp4) {
    return double{E2M1ToFloat((codes[i / 2] >> (4 * (k % 2))) & 15)} * E4M3ToFloat(block16[i / 16]);
  }
  BF16 h;
  std::memcpy(&h, &codes[i * 2], 2);
  return ToFloat(h);
}

float TestWeight::Scale(int64_t n, int64_t k) const {
  switch (c_.scaling) {
    case WeightScaling::kNone:
      return 1.0f;
    case WeightScaling::kTensor:
      return tensor_scale;
    case WeightScaling::kChannel:
      return scales[n];
    case WeightScaling::kBlock128:
      return scales[n / 128 * CeilDiv(c_.k, 128) + k / 128];
  }
  return 1.0f;
}

const void* PackedPart::Place(const std::vector<uint8_t>& bytes) {
  tensors_.push_back(
      std::make_unique<ArmTensor>(DType::kU8, Shape{static_cast<int64_t>(bytes.size())}));
  tensors_.back()->SetBytes(bytes);
  return tensors_.back()->view().data;
}

PackedPart::PackedPart(const TestWeight& w, int64_t row_begin, int64_t rows, int rank, int world) {
  const GemmCase& c = w.c();
  const int64_t k = c.k / world, begin = rank * k;
  const bool cuda = TestDevice() == DeviceType::kCuda;
  const bool nvfp4 = c.format == WeightFormat::kNvfp4;
  weight_.format = c.format;
  weight_.scaling = c.scaling;
  weight_.device = TestDevice();
  weight_.n = rows;
  weight_.k = k;
  weight_.tensor_scale = w.tensor_scale;
  weight_.shards = c.shards / world;
  weight_.splits = c.shards == 1 ? SplitsOf(TestDevice(), c.k) : 1;
  weight_.layout = {begin, k, w.shard_size(), c.scaling == WeightScaling::kBlock128, c.act_group};
  weight_.segments = MakeSegments(weight_.layout);

  std::vector<const uint8_t*> code_rows, scale_rows;
  const int64_t per_unit = nvfp4 ? 2 : 1;
  const int64_t unit_bytes = UnitBytes(c.format);
  for (int64_t n = row_begin; n < row_begin + rows; ++n) {
    code_rows.push_back(w.codes.data() + (n * c.k + begin) / per_unit * unit_bytes);
    scale_rows.push_back(w.block16.data() + (n * c.k + begin) / 16);
  }
  const int leaves = static_cast<int>(weight_.shards * weight_.splits);
  std::vector<uint8_t> codes(cuda ? FragmentCodeBytes(c.format, rows, k)
                                  : rows * k / per_unit * unit_bytes);
  std::vector<uint8_t> block16(!nvfp4 ? 0 : cuda ? FragmentScaleBytes(rows, k) : rows * k / 16);
  if (!cuda) {
    PackRows(code_rows, k / per_unit, static_cast<int>(unit_bytes), codes.data());
    if (nvfp4) PackRows(scale_rows, k / 16, 1, block16.data());
  } else if (nvfp4) {
    PackNvfp4Fragments(nullptr, code_rows, scale_rows, k, leaves, codes.data(), block16.data());
  } else {
    PackFragments(nullptr, c.format, code_rows, k, leaves, codes.data());
  }
  weight_.codes = Place(codes);
  if (nvfp4) weight_.block16_scales = Place(block16);
  if (c.scaling == WeightScaling::kNone || c.scaling == WeightScaling::kTensor) return;

  std::vector<float> held;
  if (c.scaling == WeightScaling::kChannel) {
    held.assign(w.scales.begin() + row_begin, w.scales.begin() + row_begin + rows);
  } else {
    const int64_t columns = CeilDiv(c.k, 128);
    const int64_t first = begin / 128, last = (begin + k - 1) / 128;
    for (int64_t r = row_begin / 128; r <= (row_begin + rows - 1) / 128; ++r) {
      for (int64_t i = first; i <= last; ++i) held.push_back(w.scales[r * columns + i]);
    }
    weight_.scale_columns = last - first + 1;
    // Two ranges, as if they were neighbours by chance.
    const int64_t cut = rows / 3;
    const int64_t offset = row_begin % 128;
    weight_.block_rows = {{0, cut, offset, 0},
                          {cut, rows, (offset + cut) % 128, (offset + cut) / 128}};
  }
  weight_.scale_dtype = c.bf16_scales ? DType::kBF16 : DType::kF32;
  weight_.scales = Place(BytesOf(held, c.bf16_scales));
}

TestInput::TestInput(const GemmCase& c, int64_t tokens) : c_(c) {
  const uint64_t seed = 77 + static_cast<uint64_t>(c.k);
  const std::vector<float> values = RandomFloats(tokens * c.k, seed, 3.0f);
  if (c.act_group == 0) {
    bytes_ = BytesOf(values, true);
    return;
  }
  for (float f : values) bytes_.push_back(FloatToE4M3(f * f * f * 10.0f));
  scales_per_token_ = ActScalesPerToken(c.k, c.k / c.shards, c.act_group);
  for (float f : RandomFloats(tokens * scales_per_token_, seed + 1)) {
    scales_.push_back(0.003f + 0.01f * std::fabs(f));
  }
}

double TestInput::Value(int64_t t, int64_t k) const {
  const int64_t i = t * c_.k + k;
  if (c_.act_group != 0) return E4M3ToFloat(bytes_[i]);
  BF16 h;
  std::memcpy(&h, &bytes_[i * 2], 2);
  return ToFloat(h);
}

float TestInput::Scale(int64_t t, int64_t k) const {
  if (c_.act_group == 0) return 1.0f;
  const int64_t shard_size = c_.k / c_.shards;
  const int64_t group =
      k / shard_size * CeilDiv(shard_size, c_.act_group) + k % shard_size / c_.act_group;
  return scales_[t * scales_per_token_ + group];
}

TestInput::Part TestInput::Rows(int64_t begin, int64_t count, int rank, int world,
                                int64_t padding) const {
  const int64_t unit = c_.act_group == 0 ? 2 : 1;
  const int64_t k = c_.k / world;
  std::vector<uint8_t> bytes(count * (k + padding) * unit);
  for (int64_t t = 0; t < count; ++t) {
    std::memcpy(&bytes[t * (k + padding) * unit], &bytes_[((begin + t) * c_.k + rank * k) * unit],
                static_cast<size_t>(k * unit));
  }
  Part part;
  part.x =
      std::make_unique<ArmTensor>(unit == 2 ? DType::kBF16 : DType::kU8, Shape{count, k + padding});
  part.x->SetBytes(bytes);
  part.view = part.x->view().Columns(0, k);
  if (c_.act_group != 0) {
    const int64_t local = scales_per_token_ / world;
    std::vector<float> scales;
    for (int64_t t = begin; t < begin + count; ++t) {
      const auto first = scales_.begin() + t * scales_per_token_ + rank * local;
      scales.insert(scales.end(), first, first + local);
    }
    part.scales = std::make_unique<ArmTensor>(DType::kF32, Shape{count, local}, scales);
  }
  return part;
}

std::vector<float> RunGemm(const PackedPart& part, const TestInput::Part& input) {
  ArmContext context;
  ArmTensor out(DType::kF32, {input.view.rows(), part.weight().n});
  ConstTensorView scales;
  if (input.scales != nullptr) scales = input.scales->view();
  CHECK_OK(Gemm(context.get(), part.weight(), input.view,
                input.scales == nullptr ? nullptr : &scales, out.view()));
  return out.Get();
}

Exact ExactElement(const TestWeight& w, const TestInput& x, int64_t t, int64_t n) {
  Exact e = {0.0, 0.0};
  for (int64_t k = 0; k < w.c().k; ++k) {
    const double term = w.Value(n, k) * x.Value(t, k) * w.Scale(n, k) * x.Scale(t, k);
    e.value += term;
    e.magnitude += std::fabs(term);
  }
  return e;
}

}  // namespace testing
}  // namespace lockstep
