// ops_bench: times the ops without matrix products for one token and for a prefill, with the shapes
// of the small Qwen3.5 goldens. One thread. A line per op: microseconds per call for 1 and for 128
// rows, of those that the thread ran, so that other work on the machine does not count.
#include <time.h>

#include <functional>
#include <iostream>

#include "kernels/attention/attention.h"
#include "kernels/base/check.h"
#include "kernels/batch/testing/batch_builder.h"
#include "kernels/conv/causal_conv.h"
#include "kernels/delta_net/delta_net.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/pointwise/pointwise.h"
#include "kernels/runtime/cpu_isa.h"
#include "kernels/runtime/testing/arm_test.h"
#include "kernels/sampling/sampling.h"

namespace lockstep {
namespace {

using testing::ArmContext;
using testing::ArmTensor;
using testing::BatchBuilder;
using testing::RandomFloats;

double ThreadMicroseconds() {
  timespec t;
  CHECK_EQ(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t), 0);
  return 1e6 * static_cast<double>(t.tv_sec) + 1e-3 * static_cast<double>(t.tv_nsec);
}

double Microseconds(const std::function<absl::Status()>& op) {
  CHECK_OK(op());
  int64_t calls = 0;
  const double start = ThreadMicroseconds();
  double passed = 0;
  while (passed < 2e4) {
    for (int i = 0; i < 8; ++i) CHECK_OK(op());
    calls += 8;
    passed = ThreadMicroseconds() - start;
  }
  return passed / static_cast<double>(calls);
}

void Report(const char* name, const std::function<absl::Status()>& one,
            const std::function<absl::Status()>& many) {
  std::cout << name << "\t" << Microseconds(one) << "\t" << Microseconds(many) << std::endl;
}

ArmTensor Random(Shape shape) {
  return ArmTensor(DType::kF32, shape, RandomFloats(shape.num_elements(), 1));
}

// Decoding: one row at position 100; prefill: 128 rows from 0.
constexpr int64_t kRows = 128;

void BenchRows(ArmContext* context) {
  ArmTensor x = Random({kRows, 256}), y = Random({kRows, 256}), w = Random({256});
  ArmTensor gate = Random({kRows, 768}), up = Random({kRows, 768}), out = Random({kRows, 768});
  const auto norm = [&](int64_t rows) {
    return AddRmsNorm(context->get(), x.view().Rows(0, rows), y.view().Rows(0, rows), w.view(), {},
                      out.view().Columns(0, 256).Rows(0, rows));
  };
  Report(
      "add_rms_norm", [&] { return norm(1); }, [&] { return norm(kRows); });
  const auto swiglu = [&](int64_t rows) {
    return SwiGlu(context->get(), gate.view().Rows(0, rows), up.view().Rows(0, rows),
                  out.view().Rows(0, rows));
  };
  Report(
      "swiglu", [&] { return swiglu(1); }, [&] { return swiglu(kRows); });
}

void BenchAttention(ArmContext* context) {
  AttentionParams p;
  p.num_q_heads = 8;
  p.num_kv_heads = 2;
  p.head_dim = 64;
  p.rotary_dim = 16;
  p.scale = 0.125f;
  p.output_gate = p.qk_norm = true;
  ArmTensor keys = Random({16, 2, kGrid, 64}), values = Random({16, 2, kGrid, 64});
  const KvCacheView cache{keys.view(), values.view()};
  ArmTensor q = Random({kRows, 1024}), kv = Random({kRows, 128}), norm = Random({64});
  ArmTensor freq = Random({8}), q_out = Random({kRows, 512}), out = Random({kRows, 512});
  std::vector<int32_t> blocks;
  for (int32_t i = 0; i < 16; ++i) blocks.push_back(i);
  const BatchBuilder decode({{0, 100, 1, blocks}}), prefill({{0, 0, kRows, blocks}});
  const BatchBuilder long_decode({{0, 1000, 1, blocks}});
  const auto write = [&](const BatchBuilder& b) {
    const int64_t rows = b.batch().num_tokens;
    return RopeAndCacheWrite(context->get(), b.batch(), p, q.view().Rows(0, rows),
                             kv.view().Rows(0, rows), kv.view().Rows(0, rows), norm.view(),
                             norm.view(), freq.view(), cache, q_out.view().Rows(0, rows));
  };
  Report(
      "rope_and_cache_write", [&] { return write(decode); }, [&] { return write(prefill); });
  const auto attend = [&](const BatchBuilder& b) {
    const int64_t rows = b.batch().num_tokens;
    return PagedAttention(context->get(), b.batch(), p, q_out.view().Rows(0, rows),
                          q.view().Rows(0, rows), cache, out.view().Rows(0, rows));
  };
  Report(
      "paged_attention", [&] { return attend(decode); }, [&] { return attend(prefill); });
  std::cout << "paged_attention at position 1000\t"
            << Microseconds([&] { return attend(long_decode); }) << std::endl;
}

void BenchDeltaNet(ArmContext* context) {
  DeltaNetParams p;
  p.num_k_heads = 4;
  p.num_v_heads = 8;
  p.k_dim = p.v_dim = 32;
  const int64_t channels = p.conv_channels();
  ArmTensor conv(DType::kF32, {1, 3, channels}), state(DType::kF32, {1, 8, 32, 32});
  ArmTensor ring_k(DType::kF32, {1, kGrid, 128}), ring_d(DType::kF32, {1, kGrid, 256});
  ArmTensor ring_g(DType::kF32, {1, kGrid, 8});
  DeltaNetState s;
  s.state = state.view();
  s.ring_k = ring_k.view();
  s.ring_d = ring_d.view();
  s.ring_g = ring_g.view();
  ArmTensor x = Random({kRows, channels}), y = Random({kRows, channels}), w = Random({channels, 4});
  ArmTensor z = Random({kRows, 256}), b = Random({kRows, 8}), h = Random({8}), n = Random({32});
  ArmTensor out = Random({kRows, 256});
  const BatchBuilder decode({{0, 100, 1, {}}}), prefill({{0, 0, kRows, {}}});
  const auto convolve = [&](const BatchBuilder& batch) {
    const int64_t rows = batch.batch().num_tokens;
    return CausalConv(context->get(), batch.batch(), x.view().Rows(0, rows), w.view(), {},
                      {conv.view(), {}}, y.view().Rows(0, rows));
  };
  Report(
      "causal_conv", [&] { return convolve(decode); }, [&] { return convolve(prefill); });
  const auto run = [&](const BatchBuilder& batch) {
    const int64_t rows = batch.batch().num_tokens;
    return GatedDeltaNet(context->get(), batch.batch(), p, y.view().Rows(0, rows),
                         z.view().Rows(0, rows), b.view().Rows(0, rows), b.view().Rows(0, rows),
                         h.view(), h.view(), n.view(), s, out.view().Rows(0, rows));
  };
  CHECK_OK(run(prefill));
  Report(
      "gated_delta_net", [&] { return run(decode); }, [&] { return run(prefill); });
}

void BenchSampling(ArmContext* context) {
  const int64_t vocab = 4096;
  ArmTensor logits = Random({1, vocab});
  std::vector<SampleResult> results;
  std::vector<SamplingParams> all(4);
  all[0].temperature = 0.0f;
  all[2].top_k = 20;
  all[2].top_p = 0.95f;
  all[3].temperature = 0.0f;
  all[3].num_logprobs = 5;
  const char* names[] = {"greedy", "temperature", "top-k and top-p", "greedy with logprobs"};
  for (size_t i = 0; i < all.size(); ++i) {
    SamplingState state;
    state.Reset(all[i], vocab, {}, {});
    std::cout << "sample, " << names[i] << "\t" << Microseconds([&] {
      return Sample(context->get(), logits.view(), vocab, {&state}, {0}, &results);
    }) << std::endl;
  }
}

}  // namespace

void BenchAll() {
  ArmContext context(1);
  std::cout << "instruction set " << Name(GetCpuIsa()) << "; us for 1 row, for " << kRows
            << " rows\n";
  BenchRows(&context);
  BenchAttention(&context);
  BenchDeltaNet(&context);
  BenchSampling(&context);
}

}  // namespace lockstep

#include "gtest/gtest.h"

TEST(OpsBench, Report) { lockstep::BenchAll(); }
