// An index of any bytes beside two sound shards: an error, or all tensors of the shards it names (a
// folder may have other files).
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "models/weights/checkpoint.h"
#include "models/weights/testing/safetensors_writer.h"
#include "tests/fuzz/fuzz_input.h"

namespace lockstep {
namespace fuzz {
namespace {

bool MakeShards(const std::string& folder) {
  testing::SafetensorsWriter a, b;
  a.AddFilled("a0", DType::kF32, {2, 2}).AddFilled("a1", DType::kBF16, {3});
  b.AddFilled("b0", DType::kE4M3, {4});
  a.Write(folder + "/a.safetensors");
  b.Write(folder + "/b.safetensors");
  return true;
}

}  // namespace
}  // namespace fuzz
}  // namespace lockstep

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const lockstep::fuzz::TempFolder temp;
  const std::string& folder = temp.path();
  static const bool made = lockstep::fuzz::MakeShards(folder);
  CHECK(made);
  lockstep::fuzz::WriteFile(folder + "/model.safetensors.index.json",
                            lockstep::fuzz::FuzzInput(data, size).Rest());
  const auto checkpoint = lockstep::Checkpoint::Open(folder);
  if (checkpoint.ok()) {
    const bool a0 = (*checkpoint)->Find("a0") != nullptr;
    const bool b0 = (*checkpoint)->Find("b0") != nullptr;
    CHECK_EQ(a0, (*checkpoint)->Find("a1") != nullptr);
    CHECK(a0 || b0);
    CHECK_EQ((*checkpoint)->tensors().size(), (a0 ? 2u : 0u) + (b0 ? 1u : 0u));
  } else {
    CHECK(absl::IsDataLoss(checkpoint.status())) << checkpoint.status().ToString();
  }
  return 0;
}
