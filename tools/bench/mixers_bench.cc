// mixers_bench: attention, causal convolution and gated delta net on a device, with the shapes of
// the 27B model, as JSON lines: microseconds per call, the bytes that must move (or the floating
// point operations), the time these take at the copy bandwidth measured in the same run, and the
// ratio of the two. Calls are captured in one graph; what they read rotates through more than
// 180 MB. `mixers_bench --arm=cuda`.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/attention/attention.h"
#include "kernels/base/check.h"
#include "kernels/batch/testing/batch_builder.h"
#include "kernels/conv/causal_conv.h"
#include "kernels/delta_net/delta_net.h"
#include "kernels/runtime/device_buffer.h"
#include "kernels/runtime/device_stream.h"
#include "kernels/runtime/launch_status.h"
#include "kernels/runtime/pinned_buffer.h"
#include "kernels/runtime/testing/arm_test.h"
#include "tools/bench/device_copy.h"

namespace lockstep {
namespace {

using testing::ArmContext;
using testing::ArmTensor;
using testing::BatchBuilder;
using testing::Chunk;
using testing::RandomFloats;
using testing::TestDevice;

constexpr int64_t kRotated = int64_t{200} << 20;

// A tensor of random values in +-[0, scale): a megabyte of them, repeated.
class Filled {
 public:
  Filled(DType dtype, Shape shape, float scale = 1.0f) {
    auto buffer = DeviceBuffer::Allocate(TestDevice(), shape.num_elements() * SizeOf(dtype));
    CHECK_OK(buffer.status());
    buffer_ = std::move(buffer).value();
    view_ = buffer_.View(dtype, shape);
    const int64_t first = std::min<int64_t>(shape.num_elements(), 1 << 18);
    const ArmTensor values(dtype, {first}, RandomFloats(first, 1, scale));
    uint8_t* to = static_cast<uint8_t*>(buffer_.data());
    const int64_t piece = values.view().bytes();
    for (int64_t at = 0; at < view_.bytes(); at += piece) {
      CHECK_OK(CopyAsync(TestDevice(), to + at, values.view().data,
                         std::min(piece, view_.bytes() - at), nullptr));
    }
    CHECK_OK(SynchronizeStream(TestDevice(), nullptr));
  }
  TensorView view() const { return view_; }

 private:
  DeviceBuffer buffer_;
  TensorView view_;
};

class Bench {
 public:
  Bench() : context_(1, int64_t{1} << 30) {
    auto stream = DeviceStream::Create(TestDevice());
    CHECK_OK(stream.status());
    stream_ = std::move(stream).value();
    context_.get()->stream = stream_->handle();
    const int64_t bytes = int64_t{512} << 20;
    const Filled from(DType::kF32, {bytes / 4}), to(DType::kF32, {bytes / 4});
    const double us = Microseconds(50, [&](int) {
      return ToStatus("copy", LaunchDeviceCopy(to.view().data, from.view().data, bytes,
                                               context_.get()->stream));
    });
    bytes_per_us_ = 2 * static_cast<double>(bytes) / us;
    std::cout << "{\"name\":\"copy\",\"us\":" << us << ",\"tb_per_s\":" << bytes_per_us_ * 1e-6
              << "}" << std::endl;
  }

  ExecContext* ctx() { return context_.get(); }

  // Microseconds per call of op(i), i ascending, captured in one graph: median of five replays.
  double Microseconds(int calls, const std::function<absl::Status(int)>& op) {
    CHECK_OK(op(0));
    CHECK_OK(stream_->BeginCapture());
    for (int i = 0; i < calls; ++i) CHECK_OK(op(i));
    auto graph = stream_->EndCapture();
    CHECK_OK(graph.status());
    std::vector<double> times;
    for (int round = 0; round < 6; ++round) {
      CHECK_OK(stream_->Synchronize());
      const auto start = std::chrono::steady_clock::now();
      CHECK_OK(stream_->Launch(*graph));
      CHECK_OK(stream_->Synchronize());
      const auto now = std::chrono::steady_clock::now();
      times.push_back(std::chrono::duration<double, std::micro>(now - start).count() / calls);
    }
    std::sort(times.begin() + 1, times.end());
    return times[3];
  }

  void ReportBytes(const std::string& name, double us, double bytes) {
    const double floor = bytes / bytes_per_us_;
    std::cout << "{\"name\":\"" << name << "\",\"us\":" << us << ",\"bytes\":" << bytes
              << ",\"floor_us\":" << floor << ",\"ratio\":" << floor / us << "}" << std::endl;
  }
  void ReportFlops(const std::string& name, double us, double flops) {
    std::cout << "{\"name\":\"" << name << "\",\"us\":" << us << ",\"flops\":" << flops
              << ",\"tflops\":" << flops / us * 1e-6 << "}" << std::endl;
  }

 private:
  ArmContext context_;
  std::unique_ptr<DeviceStream> stream_;
  double bytes_per_us_ = 0;
};

AttentionParams AttentionOf27B() {
  AttentionParams p;
  p.num_q_heads = 24;
  p.num_kv_heads = 4;
  p.head_dim = 256;
  p.rotary_dim = 64;
  p.scale = 1.0f / 16.0f;
  p.output_gate = true;
  p.qk_norm = true;
  p.norm_weight_offset = 1.0f;
  return p;
}

// Sequences of `length` positions with `rows` new ones each, in caches that rotate.
void BenchAttention(Bench* bench, const std::string& name, int32_t sequences, int32_t length,
                    int32_t rows, int calls) {
  const AttentionParams p = AttentionOf27B();
  const int32_t blocks = (length + 63) / 64;
  const int64_t block_bytes = p.num_kv_heads * kGrid * p.head_dim * 2 * 2;
  const int64_t step_bytes = block_bytes * blocks * sequences;
  const int32_t copies = static_cast<int32_t>(kRotated / step_bytes + 2);
  const int64_t num_blocks = int64_t{copies} * sequences * blocks;
  const Shape cache_shape = {num_blocks, p.num_kv_heads, kGrid, p.head_dim};
  const Filled keys(DType::kBF16, cache_shape), values(DType::kBF16, cache_shape);
  std::vector<std::unique_ptr<BatchBuilder>> batches;
  int32_t next = 0;
  for (int32_t copy = 0; copy < copies; ++copy) {
    std::vector<Chunk> chunks;
    for (int32_t b = 0; b < sequences; ++b) {
      Chunk chunk{b, length - rows, rows, {}};
      for (int32_t i = 0; i < blocks; ++i) {
        // Blocks of one sequence are not neighbours.
        chunk.blocks.push_back(static_cast<int32_t>((next++ * int64_t{7919}) % num_blocks));
      }
      chunks.push_back(chunk);
    }
    batches.push_back(std::make_unique<BatchBuilder>(chunks));
  }
  const int64_t tokens = int64_t{sequences} * rows, width = p.num_q_heads * p.head_dim;
  const int64_t kv_width = p.num_kv_heads * p.head_dim;
  const Filled q(DType::kBF16, {tokens, width}), out(DType::kBF16, {tokens, width});
  const Filled q_and_gate(DType::kBF16, {tokens, 2 * width});
  const Filled k(DType::kBF16, {tokens, kv_width}), v(DType::kBF16, {tokens, kv_width});
  const Filled norm(DType::kBF16, {p.head_dim}), inv_freq(DType::kF32, {p.rotary_dim / 2});
  const KvCacheView cache{keys.view(), values.view()};
  const double us = bench->Microseconds(calls, [&](int i) {
    return PagedAttention(bench->ctx(), batches[i % copies]->batch(), p, q.view(),
                          q_and_gate.view(), cache, out.view());
  });
  if (rows == 1) {
    bench->ReportBytes(name, us, static_cast<double>(step_bytes));
  } else {
    const double pairs = double(rows) * (double(length) - 0.5 * double(rows)) * sequences;
    bench->ReportFlops(name, us, 4.0 * pairs * double(p.num_q_heads * p.head_dim));
  }
  const double rope_us = bench->Microseconds(calls, [&](int i) {
    return RopeAndCacheWrite(bench->ctx(), batches[i % copies]->batch(), p, q_and_gate.view(),
                             k.view(), v.view(), norm.view(), norm.view(), inv_freq.view(), cache,
                             out.view());
  });
  bench->ReportBytes(name + "_rope", rope_us, 4.0 * double(tokens) * double(width + 2 * kv_width));
}

struct DeltaNetBench {
  static constexpr int64_t kSlots = 128;
  static constexpr int64_t kMaxTokens = 8192;

  DeltaNetBench()
      : x(DType::kBF16, {kMaxTokens, 10240}),
        y(DType::kBF16, {kMaxTokens, 10240}),
        z(DType::kBF16, {kMaxTokens, 6144}),
        out(DType::kBF16, {kMaxTokens, 6144}),
        b(DType::kBF16, {kMaxTokens, 48}),
        a(DType::kBF16, {kMaxTokens, 48}),
        weight(DType::kBF16, {10240, 4}),
        a_log(DType::kF32, {48}),
        norm(DType::kF32, {128}),
        conv(DType::kBF16, {kSlots, 3, 10240}),
        state(DType::kF32, {kSlots, 48, 128, 128}, 0.1f),
        ring_k(DType::kF32, {kSlots, kGrid, 2048}, 0.1f),
        ring_d(DType::kF32, {kSlots, kGrid, 6144}, 0.1f),
        ring_g(DType::kF32, {kSlots, kGrid, 48}, 0.1f) {
    p.num_k_heads = 16;
    p.num_v_heads = 48;
    p.k_dim = p.v_dim = 128;
  }

  void Run(Bench* bench, const std::string& name, int32_t sequences, int32_t start, int32_t rows,
           int calls) {
    const int64_t copies = kSlots / sequences, tokens = int64_t{sequences} * rows;
    std::vector<std::unique_ptr<BatchBuilder>> batches;
    for (int32_t copy = 0; copy < copies; ++copy) {
      std::vector<Chunk> chunks;
      for (int32_t s = 0; s < sequences; ++s) {
        chunks.push_back({copy * sequences + s, start, rows, {}});
      }
      batches.push_back(std::make_unique<BatchBuilder>(chunks));
    }
    const DeltaNetState net{state.view(), ring_k.view(), ring_d.view(), ring_g.view(), {}};
    const auto rows_of = [&](const Filled& t) { return t.view().Rows(0, tokens); };
    const double us = bench->Microseconds(calls, [&](int i) {
      return GatedDeltaNet(bench->ctx(), batches[i % copies]->batch(), p, rows_of(y), rows_of(z),
                           rows_of(b), rows_of(a), a_log.view(), a_log.view(), norm.view(), net,
                           rows_of(out));
    });
    // The states, read once; rings and activations come on top.
    bench->ReportBytes(name, us, double(sequences) * 48 * 128 * 128 * 4);
    const double conv_us = bench->Microseconds(calls, [&](int i) {
      return CausalConv(bench->ctx(), batches[i % copies]->batch(), rows_of(x), weight.view(), {},
                        {conv.view(), {}}, rows_of(y));
    });
    bench->ReportBytes(name + "_conv", conv_us, (double(tokens) * 2 + sequences * 6.0) * 10240 * 2);
  }

  DeltaNetParams p;
  Filled x, y, z, out, b, a, weight, a_log, norm, conv, state, ring_k, ring_d, ring_g;
};

TEST(MixersBench, All) {
  Bench bench;
  for (int32_t length : {8192, 1024, 32768}) {
    BenchAttention(&bench, "decode_1x" + std::to_string(length), 1, length, 1, 60);
  }
  BenchAttention(&bench, "decode_16x8192", 16, 8192, 1, 50);
  BenchAttention(&bench, "decode_64x2048", 64, 2048, 1, 50);
  BenchAttention(&bench, "decode_16x1024", 16, 1024, 1, 50);
  BenchAttention(&bench, "prefill_2048", 1, 2048, 2048, 20);
  BenchAttention(&bench, "prefill_8192", 1, 8192, 8192, 4);
  DeltaNetBench net;
  for (int32_t sequences : {1, 16, 64}) {
    for (int32_t place : {0, 31, 62, 63}) {
      net.Run(&bench,
              "delta_net_decode_" + std::to_string(sequences) + "_at_" + std::to_string(place),
              sequences, 640 + place, 1, 60);
    }
  }
  net.Run(&bench, "delta_net_prefill_2048", 1, 0, 2048, 10);
  net.Run(&bench, "delta_net_prefill_8192", 1, 0, 8192, 5);
}

}  // namespace
}  // namespace lockstep
