// What the CUDA benchmarks of the matrix product need of a device. Blocking calls; they end the
// process when the device reports an error.
#pragma once

#include <cstdint>
#include <functional>

namespace lockstep {
namespace bench {

enum class Fill {
  kCodes,        // any bytes
  kBlockScales,  // of NVFP4 fragments
  kBf16,         // values in +-[0.5, 2)
};
// Device memory filled with pseudo-random values. Never freed: the process is short.
void* RandomBytes(int64_t bytes, Fill fill, uint64_t seed);

// Microseconds per call of `launch(i, stream)`, i = 0 .. calls - 1 captured in one graph: the
// median of five replays after one that warms up.
double TimeInGraph(int calls, const std::function<void(int i, void* stream)>& launch);

// Reads `bytes` (a multiple of 16) and does next to nothing with them.
void LaunchStreamRead(const void* data, int64_t bytes, int blocks, int threads, void* stream);

}  // namespace bench
}  // namespace lockstep
