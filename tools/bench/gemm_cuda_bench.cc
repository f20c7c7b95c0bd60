// gemm_cuda_bench: the matrix product on CUDA, as JSON lines. Weights rotate through more than
// 180 MB, calls are captured in one graph; the denominator of decode is a read of as many bytes by
// a kernel that does nothing else, the peer is cuBLASLt in BF16, both in the same run.
//
// Usage: gemm_cuda_bench [--m=1,16] [--shape=gate_up] [--format=nvfp4] [--sweep] [--no-peer]
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "kernels/base/check.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_cuda_problem.h"
#include "kernels/gemm/pack_fragments.h"
#include "tools/bench/cublas_lt.h"
#include "tools/bench/gemm_cuda_device.h"

namespace lockstep {
namespace bench {
namespace {

constexpr int64_t kRotated = 200 << 20;
constexpr int64_t kWorkspace = 64 << 20;

struct Shape2 {
  const char* name;
  int64_t n, k;
  int64_t shards;  // of the rank; 1: column-parallel
  int64_t full_k;
};
constexpr Shape2 kShapes[] = {
    {"gate_up", 34816, 5120, 1, 5120},  {"down", 5120, 17408, 8, 17408},
    {"out", 5120, 6144, 8, 6144},       {"gate_up_tp2", 17408, 5120, 1, 5120},
    {"down_tp2", 5120, 8704, 4, 17408}, {"out_tp2", 5120, 3072, 4, 6144},
    {"qkv", 14336, 5120, 1, 5120},
};

struct Format {
  const char* name;
  WeightFormat format;
  WeightScaling scaling;
  bool act_codes;
};
constexpr Format kFormats[] = {
    {"nvfp4", WeightFormat::kNvfp4, WeightScaling::kTensor, false},
    {"fp8_channel", WeightFormat::kFp8, WeightScaling::kChannel, false},
    {"fp8_block", WeightFormat::kFp8, WeightScaling::kBlock128, false},
    {"fp8_channel_w8a8", WeightFormat::kFp8, WeightScaling::kChannel, true},
    {"bf16", WeightFormat::kBF16, WeightScaling::kNone, false},
};

struct Options {
  std::vector<int64_t> m = {1, 16, 64};
  std::string shape, format;
  bool sweep = false;
  bool peer = true;
};

double StreamReadUs(int64_t bytes) {
  static std::map<int64_t, double> known;
  double& best = known[bytes];
  if (best != 0) return best;
  const int copies = static_cast<int>(kRotated / bytes + 2);
  static void* data = RandomBytes(int64_t{600} << 20, Fill::kCodes, 1);
  const int64_t stride = bytes / 256 * 256;
  const int usable = static_cast<int>(std::min<int64_t>(copies, (int64_t{600} << 20) / stride));
  best = 1e30;
  for (int blocks : {132, 264, 528, 1056}) {
    for (int threads : {256, 512, 1024}) {
      best = std::min(best, TimeInGraph(60, [&](int i, void* stream) {
                        LaunchStreamRead(static_cast<char*>(data) + i % usable * stride, bytes,
                                         blocks, threads, stream);
                      }));
    }
  }
  return best;
}

struct Weights {
  std::vector<GemmWeight> copies;
  int64_t bytes = 0;
};

Weights MakeWeights(const Shape2& s, const Format& f) {
  Weights w;
  GemmWeight weight;
  weight.format = f.format;
  weight.scaling = f.scaling;
  weight.device = DeviceType::kCuda;
  weight.n = s.n;
  weight.k = s.k;
  weight.tensor_scale = 0.01f;
  weight.shards = s.shards;
  weight.splits = s.shards == 1 ? SplitsOf(DeviceType::kCuda, s.full_k) : 1;
  const int64_t shard_k = s.k / s.shards;
  weight.layout = {0, s.k, shard_k, f.scaling == WeightScaling::kBlock128,
                   f.act_codes ? shard_k : 0};
  weight.segments = MakeSegments(weight.layout);
  weight.block_rows = {{0, s.n, 0, 0}};
  weight.scale_columns = (s.k + 127) / 128;
  weight.scales = RandomBytes(s.n * weight.scale_columns * 2, Fill::kBf16, 5);
  weight.scale_dtype = DType::kBF16;
  const int64_t codes = FragmentCodeBytes(f.format, s.n, s.k);
  const int64_t scales = f.format == WeightFormat::kNvfp4 ? FragmentScaleBytes(s.n, s.k) : 0;
  w.bytes = codes + scales;
  for (uint64_t i = 0; i < static_cast<uint64_t>(kRotated / w.bytes + 2); ++i) {
    weight.codes =
        RandomBytes(codes, f.format == WeightFormat::kBF16 ? Fill::kBf16 : Fill::kCodes, i);
    if (scales > 0) weight.block16_scales = RandomBytes(scales, Fill::kBlockScales, i);
    w.copies.push_back(weight);
  }
  return w;
}

double PeerUs(CublasLt* lt, const Shape2& s, int64_t m) {
  static std::map<std::string, double> known;
  double& best = known[absl::StrCat(s.name, m)];
  if (best != 0) return best;
  static std::map<std::string, std::vector<void*>> weights;
  std::vector<void*>& w = weights[s.name];
  const int64_t bytes = s.n * s.k * 2;
  while (static_cast<int64_t>(w.size()) < kRotated / bytes + 2) {
    w.push_back(RandomBytes(bytes, Fill::kBf16, w.size()));
  }
  static void* workspace = RandomBytes(kWorkspace, Fill::kCodes, 3);
  void* x = RandomBytes(m * s.k * 2, Fill::kBf16, 7);
  void* out = RandomBytes(m * s.n * 4, Fill::kCodes, 8);
  best = 1e30;
  for (const CublasLt::Run& run : lt->Algorithms(s.n, s.k, m, workspace, kWorkspace)) {
    best = std::min(best, TimeInGraph(m > 1024 ? 10 : 50, [&](int i, void* stream) {
                      run(w[static_cast<size_t>(i) % w.size()], x, out, stream);
                    }));
  }
  return best;
}

std::string TileText(const GemmTile& t) {
  return absl::StrCat(t.token_blocks, "x", t.warps, "x", t.groups, "s", t.stages, "/",
                      t.phase_steps);
}

double WgmmaUs(const Weights& w, int64_t m, int calls, GemmKernel kernel,
               const std::function<GemmCudaProblem(int)>& problem) {
  static void* scratch = RandomBytes(int64_t{kGemmWgmmaCtas} * 2 * 256 * 128 * 4, Fill::kCodes, 1);
  static std::map<int64_t, void*> buffers;
  void*& expanded = buffers[m * w.copies[0].k];
  if (expanded == nullptr) expanded = RandomBytes(m * w.copies[0].k * 2, Fill::kCodes, 2);
  return TimeInGraph(calls, [&](int i, void* stream) {
    CHECK(LaunchGemmWgmma(problem(i), kernel, expanded, static_cast<float*>(scratch), stream) ==
          LaunchStatus::kOk);
  });
}

// By that kernel, if of few tokens with the tile given or that of Gemm: `used` says which.
double OursUs(const Weights& w, const Format& f, int64_t m, GemmKernel kernel, const GemmTile* tile,
              std::string* used) {
  const GemmWeight& first = w.copies[0];
  static std::map<int64_t, void*> inputs, outputs;
  void*& x = inputs[m * first.k];
  if (x == nullptr) x = RandomBytes(m * first.k * 2, Fill::kBf16, 7);
  void*& out = outputs[m * first.n];
  if (out == nullptr) out = RandomBytes(m * first.n * 4, Fill::kCodes, 8);
  static void* act = RandomBytes(8192 * 8 * 4, Fill::kBf16, 9);
  const TensorView xv(x, f.act_codes ? DType::kU8 : DType::kBF16, {m, first.k});
  const ConstTensorView scales(TensorView(act, DType::kF32, {m, first.shards}));
  const TensorView ov(out, DType::kF32, {m, first.n});
  const int calls = m > 1024 ? 10 : 60;
  const auto problem = [&](int i) {
    return MakeGemmCudaProblem(w.copies[static_cast<size_t>(i) % w.copies.size()], xv,
                               f.act_codes ? &scales : nullptr, ov);
  };
  const GemmShape shape = ShapeOf(problem(0));
  if (tile == nullptr && kernel != GemmKernel::kFewTokens && CanRunGemmWgmma(problem(0))) {
    *used = kernel == GemmKernel::kSomeTokens ? "some" : "many";
    return WgmmaUs(w, m, calls, kernel, problem);
  }
  const GemmTile t = tile != nullptr ? *tile : ChooseGemmTile(shape);
  *used = TileText(t);
  return TimeInGraph(calls, [&](int i, void* stream) {
    CHECK(LaunchGemm(problem(i), t, stream) == LaunchStatus::kOk);
  });
}

void Bench(const Options& o, const Shape2& s, const Format& f, CublasLt* lt) {
  const Weights w = MakeWeights(s, f);
  const double read = StreamReadUs(w.bytes / 16 * 16);
  for (int64_t m : o.m) {
    std::string tile_text;
    const int leaves = static_cast<int>(w.copies[0].shards * w.copies[0].splits);
    const GemmShape shape = {f.format, s.n, m, leaves, s.k / leaves / 16};
    const double us = OursUs(w, f, m, ChooseGemmKernel(shape), nullptr, &tile_text);
    const double peer = lt == nullptr ? 0 : PeerUs(lt, s, m);
    std::cout << absl::StrFormat(
                     R"({"op":"%s","format":"%s","n":%d,"k":%d,"m":%d,"us":%.2f,"bytes":%d,)"
                     R"("read_us":%.2f,"read_ratio":%.3f,"tflops":%.1f,"cublaslt_us":%.2f,)"
                     R"("cublaslt_over_ours":%.3f,"tile":"%s"})",
                     s.name, f.name, s.n, s.k, m, us, w.bytes, read, read / us,
                     2e-6 * static_cast<double>(s.n * s.k * m) / us, peer, peer / us, tile_text)
              << std::endl;
    if (!o.sweep) continue;
    std::vector<std::pair<double, std::string>> results;
    const GemmTile tile = ChooseGemmTile(shape);
    for (const GemmKernel kernel : {GemmKernel::kSomeTokens, GemmKernel::kManyTokens}) {
      std::string used;
      if (m < 8) continue;
      const double kernel_us = OursUs(w, f, m, kernel, nullptr, &used);
      results.emplace_back(kernel_us, used);
    }
    for (int warps : {4, 8}) {
      for (int groups : {1, 2, 3, 4, 5, 6, 8}) {
        for (int stages : {2, 3, 4}) {
          GemmTile t = tile;
          t.warps = warps;
          t.groups = groups;
          t.stages = stages;
          if (GemmSharedBytes(t, m) > 220 << 10) continue;
          std::string used;
          const double tile_us = OursUs(w, f, m, GemmKernel::kFewTokens, &t, &used);
          results.emplace_back(tile_us, used);
        }
      }
    }
    std::sort(results.begin(), results.end());
    std::cout << "  sweep:";
    for (size_t i = 0; i < std::min<size_t>(results.size(), 8); ++i) {
      std::cout << " " << results[i].second << "=" << absl::StrFormat("%.2f", results[i].first);
    }
    std::cout << std::endl;
  }
}

int Main(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string a = argv[i];
    if (absl::StartsWith(a, "--m=")) {
      o.m.clear();
      for (const auto& part : absl::StrSplit(a.substr(4), ',')) {
        o.m.push_back(std::atoll(std::string(part).c_str()));
      }
    } else if (absl::StartsWith(a, "--shape=")) {
      o.shape = a.substr(8);
    } else if (absl::StartsWith(a, "--format=")) {
      o.format = a.substr(9);
    } else if (a == "--sweep") {
      o.sweep = true;
    } else if (a == "--no-peer") {
      o.peer = false;
    } else {
      std::cerr << "unknown argument " << a << "\n";
      return 2;
    }
  }
  std::unique_ptr<CublasLt> lt;
  if (o.peer) lt = CublasLt::Open();
  for (const Shape2& s : kShapes) {
    if (!o.shape.empty() && o.shape != s.name) continue;
    for (const Format& f : kFormats) {
      if (o.format.empty() || o.format == f.name) Bench(o, s, f, lt.get());
    }
  }
  return 0;
}

}  // namespace
}  // namespace bench
}  // namespace lockstep

int main(int argc, char** argv) { return lockstep::bench::Main(argc, argv); }
