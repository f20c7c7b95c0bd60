#include "kernels/comm/comm_self_test.h"

#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/hash.h"
#include "kernels/base/status_macros.h"
#include "kernels/comm/tree_sum.h"

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
  std::vector<float> sum = patterns[static_cast<size_t>(comm->rank())];
  RETURN_IF_ERROR(comm->AllReduce(ctx, TensorView(sum.data(), DType::kF32, Shape{kElements})));
  ASSIGN_OR_RETURN(const uint64_t sum_digest, Compare("all_reduce", sum, expected));

  std::vector<float> gathered(all.size());
  const std::vector<float>& mine = patterns[static_cast<size_t>(comm->rank())];
  RETURN_IF_ERROR(
      comm->AllGather(ctx, ConstTensorView(mine.data(), DType::kF32, Shape{kElements}),
                      TensorView(gathered.data(), DType::kF32, Shape{comm->size(), kElements})));
  ASSIGN_OR_RETURN(const uint64_t gather_digest, Compare("all_gather", gathered, all));
  RETURN_IF_ERROR(comm->Barrier(ctx));
  return Fold64(sum_digest, gather_digest);
}

}  // namespace lockstep
