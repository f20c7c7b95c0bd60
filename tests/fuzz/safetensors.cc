// A safetensors file of any bytes: an error, or tensors that are inside the file.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "models/weights/checkpoint.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using lockstep::Checkpoint;
  static const int fd = memfd_create("safetensors", MFD_CLOEXEC);
  CHECK(fd >= 0);
  CHECK_EQ(ftruncate(fd, 0), 0);
  CHECK_EQ(pwrite(fd, data, size, 0), static_cast<ssize_t>(size));
  const auto checkpoint = Checkpoint::OpenFile(absl::StrCat("/proc/self/fd/", fd));
  if (!checkpoint.ok()) {
    CHECK(absl::IsDataLoss(checkpoint.status())) << checkpoint.status().ToString();
    return 0;
  }
  CHECK((*checkpoint)->total_bytes() <= static_cast<int64_t>(size));
  uint64_t sum = 0;
  for (const auto& item : (*checkpoint)->tensors()) {
    const lockstep::TensorInfo& tensor = item.second;
    CHECK_EQ(tensor.bytes, tensor.num_elements() * lockstep::SizeOf(tensor.dtype));
    for (int64_t i = 0; i < tensor.bytes; ++i) sum += tensor.data[i];
  }
  return sum == 1 && size == 0 ? 1 : 0;  // so that the bytes are read
}
