// config.json and, after a zero byte, hf_quant_config.json of any bytes beside sound tensors: what
// a worker asks of them before it loads anything.
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "kernels/base/check.h"
#include "models/model_config.h"
#include "models/quant/scheme.h"
#include "models/weights/checkpoint.h"
#include "models/weights/testing/safetensors_writer.h"
#include "tests/fuzz/fuzz_input.h"

namespace lockstep {
namespace fuzz {
namespace {

// One module of every way to store one.
std::unique_ptr<Checkpoint> MakeModel(const std::string& folder) {
  testing::SafetensorsWriter writer;
  const std::string layer = "model.layers.0.";
  writer.AddFilled(layer + "self_attn.q_proj.weight", DType::kBF16, {32, 32});
  writer.AddFilled(layer + "mlp.gate_proj.weight_packed", DType::kU8, {32, 16});
  writer.AddFilled(layer + "mlp.gate_proj.weight_scale", DType::kE4M3, {32, 2}, 0x38);
  writer.AddF32(layer + "mlp.gate_proj.weight_global_scale", {1}, {2.0f});
  writer.AddFilled(layer + "mlp.up_proj.weight", DType::kU8, {32, 16});
  writer.AddFilled(layer + "mlp.up_proj.weight_scale", DType::kE4M3, {32, 2}, 0x38);
  writer.AddF32(layer + "mlp.up_proj.weight_scale_2", {}, {0.5f});
  writer.AddFilled(layer + "mlp.down_proj.weight", DType::kE4M3, {32, 32});
  writer.AddFilled(layer + "mlp.down_proj.weight_scale", DType::kBF16, {32, 1});
  writer.AddFilled(layer + "self_attn.o_proj.weight", DType::kE4M3, {32, 32});
  writer.AddF32(layer + "self_attn.o_proj.weight_scale_inv", {1, 1}, {1.0f});
  writer.AddFilled(layer + "self_attn.k_proj.weight", DType::kE4M3, {32, 32});
  writer.AddF32(layer + "self_attn.k_proj.weight_scale", {}, {1.0f});
  writer.AddF32(layer + "self_attn.k_proj.input_scale", {}, {1.0f});
  writer.Write(folder + "/model.safetensors");
  auto checkpoint = Checkpoint::Open(folder);
  CHECK_OK(checkpoint.status());
  return *std::move(checkpoint);
}

void Run(const std::string& folder, const Checkpoint& checkpoint) {
  const auto config = LoadModelConfig(folder);
  if (!config.ok()) return;
  const auto resolver = SchemeResolver::Create(config->root, checkpoint);
  if (!resolver.ok()) return;
  CHECK(!(*resolver)->Summary().empty());
  for (const char* module : {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                             "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}) {
    (void)(*resolver)->Resolve(std::string("model.layers.0.") + module, 32, 32);
  }
}

}  // namespace
}  // namespace fuzz
}  // namespace lockstep

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;  // NOLINT: an entry point outside of it
  static const fuzz::TempFolder temp;
  const std::string& folder = temp.path();
  static const auto checkpoint = fuzz::MakeModel(folder);
  const absl::string_view input = fuzz::FuzzInput(data, size).Rest();
  const size_t zero = input.find('\0');
  fuzz::WriteFile(folder + "/config.json", input.substr(0, zero));
  const std::string quantization = folder + "/hf_quant_config.json";
  if (zero == absl::string_view::npos) {
    std::remove(quantization.c_str());
  } else {
    fuzz::WriteFile(quantization, input.substr(zero + 1));
  }
  fuzz::Run(folder, *checkpoint);
  return 0;
}
