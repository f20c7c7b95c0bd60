#include "kernels/comm/tree_sum.h"

#include <algorithm>
#include <cstring>

#include "kernels/base/check.h"

namespace lockstep {
namespace {

constexpr int64_t kChunk = 1 << 14;  // elements per shard of work
constexpr int64_t kTile = 512;       // elements whose inner nodes stay in the first-level cache

// The subtree over parts [first, first + count) for `n` <= kTile elements at `offset`.
void Subtree(const float* const* parts, int64_t count, int64_t offset, int64_t n, float* out) {
  if (count == 1) {
    std::memmove(out, parts[0] + offset, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  if (count == 2) {
    const float* a = parts[0] + offset;
    const float* b = parts[1] + offset;
    for (int64_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
    return;
  }
  float left[kTile];
  float right[kTile];
  Subtree(parts, count / 2, offset, n, left);
  Subtree(parts + count / 2, count / 2, offset, n, right);
  for (int64_t i = 0; i < n; ++i) out[i] = left[i] + right[i];
}

}  // namespace

void TreeSum(ThreadPool* pool, const std::vector<const float*>& parts, int64_t n, float* out) {
  const int64_t count = static_cast<int64_t>(parts.size());
  CHECK(count > 0 && (count & (count - 1)) == 0) << count << " parts ";
  const int64_t chunks = (n + kChunk - 1) / kChunk;
  const auto sum_chunk = [&](int64_t chunk) {
    const int64_t end = std::min(n, (chunk + 1) * kChunk);
    for (int64_t i = chunk * kChunk; i < end; i += kTile) {
      Subtree(parts.data(), count, i, std::min(kTile, end - i), out + i);
    }
  };
  if (pool != nullptr) {
    pool->ParallelFor(chunks, sum_chunk);
  } else {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) sum_chunk(chunk);
  }
}

}  // namespace lockstep
