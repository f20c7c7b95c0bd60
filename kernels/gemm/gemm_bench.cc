// gemm_bench: multiply-adds per second of Gemm, one thread, for every format and several T. Seconds
// are those that the thread ran, so that other work on the machine does not count.
//
// Usage: gemm_bench [n] [k]
#include <time.h>

#include <cstdlib>
#include <iostream>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/base/check.h"
#include "kernels/gemm/gemm.h"
#include "kernels/runtime/cpu_isa.h"

namespace lockstep {
namespace {

struct Format {
  const char* name;
  WeightFormat format;
  WeightScaling scaling;
  double bytes;  // per weight
  bool act_codes;
};
constexpr Format kFormats[] = {
    {"bf16", WeightFormat::kBF16, WeightScaling::kNone, 2, false},
    {"nvfp4", WeightFormat::kNvfp4, WeightScaling::kTensor, 0.5625, false},
    {"fp8_channel", WeightFormat::kFp8, WeightScaling::kChannel, 1, false},
    {"fp8_block", WeightFormat::kFp8, WeightScaling::kBlock128, 1, false},
    {"fp8_block_w8a8", WeightFormat::kFp8, WeightScaling::kBlock128, 1, true},
};

double ThreadSeconds() {
  timespec t;
  CHECK_EQ(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t), 0);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

double SecondsPerCall(ExecContext* ctx, const GemmWeight& w, int64_t m, bool act_codes) {
  std::vector<float> x(m * w.k, 0.5f);
  std::vector<float> out(m * w.n);
  std::vector<float> scales(m * (w.k / 128), 1.0f);
  const ConstTensorView act(TensorView(scales.data(), DType::kF32, {m, w.k / 128}));
  const TensorView xv(x.data(), act_codes ? DType::kU8 : DType::kF32, {m, w.k});
  const TensorView outv(out.data(), DType::kF32, {m, w.n});
  int calls = 0;
  const double start = ThreadSeconds();
  double spent = 0;
  while (spent < 0.2) {
    CHECK_OK(Gemm(ctx, w, xv, act_codes ? &act : nullptr, outv));
    ++calls;
    spent = ThreadSeconds() - start;
  }
  return spent / calls;
}

void Run(int64_t n, int64_t k) {
  ThreadPool pool(1);
  Workspace workspace;
  CHECK_OK(workspace.Allocate(DeviceType::kCpu, 512 * k * 4 + 4096));
  Counters counters;
  ExecContext ctx;
  ctx.pool = &pool;
  ctx.workspace = &workspace;
  ctx.counters = &counters;
  std::vector<uint8_t> codes(n * k * 2, 0x35);
  std::vector<uint8_t> block16(n * k / 16, 0x38);
  std::vector<float> scales(n * (k / 128), 1.0f);
  std::cout << Name(GetCpuIsa()) << ", n " << n << ", k " << k << ", 1 thread\n";
  for (const Format& f : kFormats) {
    GemmWeight w;
    w.format = f.format;
    w.scaling = f.scaling;
    w.n = n;
    w.k = k;
    w.codes = codes.data();
    w.block16_scales = block16.data();
    w.scales = scales.data();
    w.scale_columns = k / 128;
    w.block_rows = {{0, n, 0, 0}};
    w.segments =
        MakeSegments({0, k, k, f.scaling == WeightScaling::kBlock128, f.act_codes ? 128 : 0});
    for (int64_t m : {1, 2, 4, 8, 16, 64, 256}) {
      const double s = SecondsPerCall(&ctx, w, m, f.act_codes);
      std::cout << absl::StrFormat("%-15s T %4d  %7.1f GMAC/s  %6.2f G weights/s  %6.2f GB/s\n",
                                   f.name, m, 1e-9 * m * n * k / s, 1e-9 * n * k / s,
                                   1e-9 * n * k * f.bytes / s);
    }
  }
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  const int64_t n = argc > 1 ? std::atoll(argv[1]) : 4096;
  const int64_t k = argc > 2 ? std::atoll(argv[2]) : 4096;
  lockstep::Run(n, k);
  return 0;
}
