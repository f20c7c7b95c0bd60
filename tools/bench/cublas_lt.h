// The cuBLASLt product of BF16 matrices, as a peer of our own: loaded at run time, so that nothing
// depends on it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace lockstep {
namespace bench {

class CublasLt {
 public:
  // nullptr when the library cannot be loaded.
  static std::unique_ptr<CublasLt> Open();
  ~CublasLt();

  // The heuristics' algorithms for out[m, n] F32 = x[m, k] w[n, k]^T, best first; each enqueues the
  // product on a stream.
  using Run = std::function<void(const void* w, const void* x, void* out, void* stream)>;
  std::vector<Run> Algorithms(int64_t n, int64_t k, int64_t m, void* workspace,
                              int64_t workspace_bytes);

 private:
  struct Impl;
  explicit CublasLt(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace bench
}  // namespace lockstep
