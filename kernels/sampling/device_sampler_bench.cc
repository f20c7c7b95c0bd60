// Times DeviceSampler on the device: one JSON line per case, with the bytes of logits that must be
// read once and the time that this takes at the bandwidth given as the argument (GB/s).
//   device_sampler_bench [4800]
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <vector>

#include "absl/time/clock.h"
#include "kernels/base/check.h"
#include "kernels/base/hash.h"
#include "kernels/runtime/device_buffer.h"
#include "kernels/runtime/device_memory.h"
#include "kernels/sampling/device_sampler.h"

namespace lockstep {
namespace {

struct Case {
  const char* name;
  SamplingParams params;
};

std::vector<Case> Cases() {
  std::vector<Case> cases(6);
  cases[0].name = "greedy";
  cases[0].params.temperature = 0.0f;
  cases[1].name = "temperature";
  cases[2].name = "top_p";
  cases[2].params.top_p = 0.95f;
  cases[3].name = "top_k_top_p";
  cases[3].params.top_k = 50;
  cases[3].params.top_p = 0.9f;
  cases[3].params.temperature = 0.7f;
  cases[4].name = "penalties";
  cases[4].params.presence_penalty = 0.5f;
  cases[4].params.repetition_penalty = 1.1f;
  cases[5].name = "greedy_logprobs_20";
  cases[5].params.temperature = 0.0f;
  cases[5].params.num_logprobs = 20;
  return cases;
}

// A bell of width 2.5, as trained heads give.
std::vector<float> Logits(int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    const uint64_t bits = Mix64(i);
    float sum = 0.0f;
    for (int part = 0; part < 4; ++part) {
      sum += static_cast<float>((bits >> (16 * part)) & 0xffff) - 32767.5f;
    }
    values[i] = sum * (2.5f / 37837.0f);
  }
  return values;
}

void Run(int64_t vocab, int64_t rows, double bandwidth) {
  auto sampler = DeviceSampler::Create({rows, vocab, rows});
  CHECK_OK(sampler.status());
  auto logits = DeviceBuffer::Allocate(DeviceType::kCuda, rows * vocab * 4);
  auto plan = DeviceBuffer::Allocate(DeviceType::kCuda, rows * 16);
  CHECK_OK(logits.status());
  CHECK_OK(plan.status());
  const std::vector<float> values = Logits(rows * vocab);
  CHECK_OK(CopyBytes(DeviceType::kCuda, logits->data(), DeviceType::kCpu, values.data(),
                     logits->bytes()));
  Workspace workspace;
  CHECK_OK(workspace.Allocate(DeviceType::kCuda, rows << 18));
  Counters counters;
  ExecContext ctx;
  ctx.device = DeviceType::kCuda;
  ctx.workspace = &workspace;
  ctx.counters = &counters;
  for (const Case& c : Cases()) {
    (*sampler)->BeginStep();
    std::vector<SampleRow> plan_rows;
    for (int32_t r = 0; r < rows; ++r) {
      CHECK_OK((*sampler)->Reset(&ctx, r, c.params, {1, 2, 3}, {4, 5}));
      plan_rows.push_back((*sampler)->Row(r, r, 100));
    }
    CHECK_OK(CopyBytes(DeviceType::kCuda, plan->data(), DeviceType::kCpu, plan_rows.data(),
                       plan->bytes()));
    const auto launch = [&] {
      CHECK_OK((*sampler)->Launch(&ctx, logits->View(DType::kF32, {1, rows, vocab}),
                                  plan->View(DType::kI64, {rows, 2})));
    };
    constexpr int kRepeats = 200;
    for (int i = 0; i < 20; ++i) launch();
    CHECK_OK(SynchronizeDevice(DeviceType::kCuda));
    const absl::Time start = absl::Now();
    for (int i = 0; i < kRepeats; ++i) launch();
    CHECK_OK(SynchronizeDevice(DeviceType::kCuda));
    const double micros = absl::ToDoubleMicroseconds(absl::Now() - start) / kRepeats;
    const double bytes = static_cast<double>(rows * vocab) * 4;
    const double floor = bytes / bandwidth * 1e-3;
    std::cout << "{\"bench\": \"device_sampler\", \"case\": \"" << c.name
              << "\", \"vocab\": " << vocab << ", \"rows\": " << rows << ", \"micros\": " << micros
              << ", \"bytes\": " << bytes << ", \"floor_micros\": " << floor
              << ", \"ratio\": " << floor / micros << "}" << std::endl;
  }
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  const double bandwidth = argc > 1 ? std::atof(argv[1]) : 4800.0;
  for (int64_t vocab : {151936, 248320}) {
    for (int64_t rows : {1, 64}) lockstep::Run(vocab, rows, bandwidth);
  }
  return 0;
}
