#include "kernels/comm/comm_self_test.h"

#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/hash.h"
#include "kernels/base/status_macros.h"
#include "kernels/comm/tree_sum.h"
#include "kernels/runtime/device_memory.h"
#include "kernels/runtime/device_stream.h"

namespace lockstep {
namespace {

constexpr int64_t kElements = 1000;

// Magnitudes over 16 binades, both signs: the order of additions is visible in the sum.
float Pattern(int rank, int64_t i) {
  const uint64_t h = Mix64(static_cast<uint64_t>(rank) << 32 | static_cast<uint64_t>(i));
  const float magnitude = static_cast<float>((h >> 8) & 0xffffff) * (1.0f / 16777216.0f) *
                          static_cast<float>(1 << ((h >> 40) & 15));
  return (h & 1) != 0 ? -magnitude : magnitude;
}

absl::StatusOr<uint64_t> Compare(const char* what, const std::vector<float>& found,
                                 const std::vector<float>& expected) {
  const size_t bytes = found.size() * sizeof(float);
  for (size_t i = 0; i < found.size(); ++i) {
    if (std::memcmp(&found[i], &expected[i], sizeof(float)) == 0) continue;
    return absl::DataLossError(absl::StrCat("self-test: ", what, " element ", i, " is ", found[i],
                                            ", expected ", expected[i]));
  }
  return HashBytes(absl::string_view(reinterpret_cast<const char*>(found.data()), bytes));
}

// What the device holds once the work queued so far has ended.
absl::StatusOr<std::vector<float>> ReadBack(ExecContext* ctx, ConstTensorView view) {
  std::vector<float> values(static_cast<size_t>(view.shape.num_elements()));
  RETURN_IF_ERROR(SynchronizeStream(ctx->device, ctx->stream));
  RETURN_IF_ERROR(CopyBytes(DeviceType::kCpu, values.data(), ctx->device, view.data, view.bytes()));
  return values;
}

}  // namespace

absl::StatusOr<uint64_t> RunCommSelfTest(ExecContext* ctx, CommGroup* comm) {
  std::vector<std::vector<float>> patterns(static_cast<size_t>(comm->size()));
  std::vector<const float*> parts;
  std::vector<float> all;
  for (int r = 0; r < comm->size(); ++r) {
    for (int64_t i = 0; i < kElements; ++i) {
      patterns[static_cast<size_t>(r)].push_back(Pattern(r, i));
    }
    const std::vector<float>& pattern = patterns[static_cast<size_t>(r)];
    parts.push_back(pattern.data());
    all.insert(all.end(), pattern.begin(), pattern.end());
  }
  std::vector<float> expected(kElements);
  TreeSum(nullptr, parts, kElements, expected.data());

  comm->BeginStep(0, comm->epoch());
  const std::vector<float>& mine = patterns[static_cast<size_t>(comm->rank())];
  Workspace::Scope scope(ctx->workspace);
  TensorView data = ctx->workspace->Take(DType::kF32, Shape{kElements});
  RETURN_IF_ERROR(CopyBytes(ctx->device, data.data, DeviceType::kCpu, mine.data(), data.bytes()));
  RETURN_IF_ERROR(comm->AllReduce(ctx, data));
  ASSIGN_OR_RETURN(const std::vector<float> sum, ReadBack(ctx, data));
  ASSIGN_OR_RETURN(const uint64_t sum_digest, Compare("all_reduce", sum, expected));

  RETURN_IF_ERROR(CopyBytes(ctx->device, data.data, DeviceType::kCpu, mine.data(), data.bytes()));
  TensorView out = ctx->workspace->Take(DType::kF32, Shape{comm->size(), kElements});
  RETURN_IF_ERROR(comm->AllGather(ctx, data, out));
  ASSIGN_OR_RETURN(const std::vector<float> gathered, ReadBack(ctx, out));
  ASSIGN_OR_RETURN(const uint64_t gather_digest, Compare("all_gather", gathered, all));
  RETURN_IF_ERROR(comm->Barrier(ctx));
  return Fold64(sum_digest, gather_digest);
}

}  // namespace lockstep
