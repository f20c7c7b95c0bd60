// An index of any bytes beside two sound shards: an error, or the three tensors that there are.
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "models/weights/checkpoint.h"
#include "models/weights/testing/safetensors_writer.h"
#include "tests/fuzz/fuzz_input.h"

namespace lockstep {
namespace fuzz {
namespace {

std::string MakeShards() {
  const std::string folder = NewFolder();
  testing::SafetensorsWriter a, b;
  a.AddFilled("a0", DType::kF32, {2, 2}).AddFilled("a1", DType::kBF16, {3});
  b.AddFilled("b0", DType::kE4M3, {4});
  a.Write(folder + "/a.safetensors");
  b.Write(folder + "/b.safetensors");
  return folder;
}

}  // namespace
}  // namespace fuzz
}  // namespace lockstep

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string folder = lockstep::fuzz::MakeShards();
  lockstep::fuzz::WriteFile(folder + "/model.safetensors.index.json",
                            lockstep::fuzz::FuzzInput(data, size).Rest());
  const auto checkpoint = lockstep::Checkpoint::Open(folder);
  if (checkpoint.ok()) {
    CHECK_EQ((*checkpoint)->tensors().size(), 3u);
  } else {
    CHECK(absl::IsDataLoss(checkpoint.status())) << checkpoint.status().ToString();
  }
  return 0;
}
