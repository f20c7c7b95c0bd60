// Test helper: a checkpoint written on the fly, linears loaded from it for any rank, and a context
// to run them with.
#pragma once

#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/check.h"
#include "kernels/base/float_types.h"
#include "kernels/base/testing/matchers.h"
#include "models/quant/linear_method.h"
#include "models/weights/testing/safetensors_writer.h"

namespace lockstep {
namespace testing {

// The tensors of one linear "m", as stored.
struct StoredLinear {
  LinearScheme scheme;
  int64_t n = 0;
  int64_t k = 0;
  std::vector<float> dequantized;  // [n, k]
  struct Tensor {
    DType dtype;
    std::vector<int64_t> shape;
    std::vector<uint8_t> bytes;
  };
  std::map<std::string, Tensor> tensors;  // by suffix

  void AddFloats(const std::string& suffix, DType dtype, std::vector<int64_t> shape,
                 const std::vector<float>& values) {
    Tensor t{dtype, std::move(shape), {}};
    for (float f : values) {
      const BF16 h = ToBF16(f);
      const uint8_t* p = dtype == DType::kBF16 ? reinterpret_cast<const uint8_t*>(&h)
                                               : reinterpret_cast<const uint8_t*>(&f);
      t.bytes.insert(t.bytes.end(), p, p + SizeOf(dtype));
    }
    tensors[suffix] = std::move(t);
  }

  std::unique_ptr<Checkpoint> Write() const {
    SafetensorsWriter writer;
    for (const auto& item : tensors) {
      writer.AddBytes("m." + item.first, item.second.dtype, item.second.shape, item.second.bytes);
    }
    const std::string path = MakeTempDir() + "/model.safetensors";
    writer.Write(path);
    absl::StatusOr<std::unique_ptr<Checkpoint>> checkpoint = Checkpoint::OpenFile(path);
    CHECK_OK(checkpoint.status());
    return std::move(checkpoint).value();
  }
};

// Random weights in `scheme`'s format with scales of dtype `scale_dtype`.
inline StoredLinear MakeStoredLinear(WeightScheme weight, int64_t n, int64_t k,
                                     DType scale_dtype = DType::kF32) {
  StoredLinear s;
  s.scheme.weight = weight;
  s.n = n;
  s.k = k;
  std::mt19937 rng(static_cast<uint32_t>(n * 7919 + k));
  std::normal_distribution<float> normal;
  const int64_t blocks_n = (n + 127) / 128, blocks_k = (k + 127) / 128;
  std::vector<float> scales;
  const int64_t count = weight == WeightScheme::kFp8Block     ? blocks_n * blocks_k
                        : weight == WeightScheme::kFp8Channel ? n
                                                              : 1;
  for (int64_t i = 0; i < count; ++i) {
    scales.push_back(ToFloat(ToBF16(0.01f + 0.1f * std::fabs(normal(rng)))));
  }
  std::vector<uint8_t> codes, block16;
  std::vector<float> values;
  for (int64_t i = 0; i < n * k; ++i) {
    const int64_t row = i / k, column = i % k;
    if (weight == WeightScheme::kBF16) {
      values.push_back(ToFloat(ToBF16(normal(rng))));
      s.dequantized.push_back(values.back());
    } else if (weight == WeightScheme::kNvfp4) {
      const uint8_t code = static_cast<uint8_t>(rng() & 15);
      if (column % 2 == 0) {
        codes.push_back(code);
      } else {
        codes.back() |= static_cast<uint8_t>(code << 4);
      }
      if (column % 16 == 0) block16.push_back(static_cast<uint8_t>(rng() % 0x7f));
      s.dequantized.push_back(E2M1ToFloat(code) * (E4M3ToFloat(block16.back()) * scales[0]));
    } else {
      codes.push_back(FloatToE4M3(normal(rng)));
      const int64_t at = weight == WeightScheme::kFp8Channel ? row
                         : weight == WeightScheme::kFp8Block ? row / 128 * blocks_k + column / 128
                                                             : 0;
      s.dequantized.push_back(E4M3ToFloat(codes.back()) * scales[at]);
    }
  }
  s.scheme.codes = "weight";
  if (weight == WeightScheme::kBF16) {
    s.AddFloats("weight", DType::kBF16, {n, k}, values);
  } else if (weight == WeightScheme::kNvfp4) {
    s.scheme.scale = "weight_scale";
    s.scheme.global_scale = "weight_scale_2";
    s.tensors["weight"] = {DType::kU8, {n, k / 2}, codes};
    s.tensors["weight_scale"] = {DType::kE4M3, {n, k / 16}, block16};
    s.AddFloats("weight_scale_2", DType::kF32, {}, scales);
  } else {
    s.scheme.scale = weight == WeightScheme::kFp8Block ? "weight_scale_inv" : "weight_scale";
    s.tensors["weight"] = {DType::kE4M3, {n, k}, codes};
    std::vector<int64_t> shape;
    if (weight == WeightScheme::kFp8Channel) shape = {n, 1};
    if (weight == WeightScheme::kFp8Block) shape = {blocks_n, blocks_k};
    s.AddFloats(s.scheme.scale, scale_dtype, shape, scales);
  }
  return s;
}

// The whole of [n, k] on one rank, column-parallel.
inline LinearShard WholeShard(const StoredLinear& s) {
  LinearShard shard;
  shard.module = "m";
  shard.module_class = "mlp";
  shard.n = s.n;
  shard.k = s.k;
  shard.rows = {{0, s.n}};
  shard.columns = {0, s.k};
  shard.virtual_shards = {1, s.k};
  return shard;
}

inline LinearShard RowParallelShard(const StoredLinear& s, int rank, int world) {
  LinearShard shard = WholeShard(s);
  shard.columns = {rank * (s.k / world), s.k / world};
  shard.row_parallel = true;
  shard.virtual_shards = VirtualShardsOf(s.k);
  return shard;
}

// Answers every module with one scheme.
class FakeResolver : public SchemeResolver {
 public:
  explicit FakeResolver(LinearScheme scheme) : scheme_(std::move(scheme)) {}
  absl::StatusOr<LinearScheme> Resolve(const std::string&, int64_t, int64_t) const override {
    return scheme_;
  }
  std::string Summary() const override { return "fake"; }

 private:
  LinearScheme scheme_;
};

// An ExecContext with two threads and a workspace of 4 MiB.
class TestContext {
 public:
  TestContext() {
    CHECK_OK(workspace_.Allocate(DeviceType::kCpu, 4 << 20));
    ctx_.pool = &pool_;
    ctx_.workspace = &workspace_;
    ctx_.counters = &counters_;
  }
  ExecContext* ctx() { return &ctx_; }
  Workspace* workspace() { return &workspace_; }
  Counters* counters() { return &counters_; }

  // Applies `linear` to columns [begin, begin + k) of x [tokens, full_k].
  std::vector<float> Apply(const ResidentLinear& linear, const std::vector<float>& x,
                           int64_t full_k) {
    const int64_t tokens = static_cast<int64_t>(x.size()) / full_k;
    const Range columns = linear.shard().columns;
    std::vector<float> out(tokens * linear.shard().local_n());
    Workspace::Scope scope(&workspace_);
    LinearInput input(TensorView(const_cast<float*>(x.data()), DType::kF32, {tokens, full_k})
                          .Columns(columns.begin, columns.size));
    CHECK_OK(linear.Apply(&ctx_, &input,
                          TensorView(out.data(), DType::kF32, {tokens, linear.shard().local_n()})));
    return out;
  }

 private:
  ThreadPool pool_{2};
  Workspace workspace_;
  Counters counters_;
  ExecContext ctx_;
};

}  // namespace testing
}  // namespace lockstep
