#include "kernels/runtime/cpu_isa.h"

#include <atomic>

#include "kernels/base/check.h"

namespace lockstep {
namespace {

CpuIsa Best() {
  if (HasCpuIsa(CpuIsa::kAvx512)) return CpuIsa::kAvx512;
  if (HasCpuIsa(CpuIsa::kAvx2)) return CpuIsa::kAvx2;
  return CpuIsa::kGeneric;
}

std::atomic<CpuIsa>& Current() {
  static std::atomic<CpuIsa> current{Best()};
  return current;
}

}  // namespace

bool HasCpuIsa(CpuIsa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  switch (isa) {
    case CpuIsa::kGeneric:
      return true;
    case CpuIsa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case CpuIsa::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("fma");
  }
  return false;
#else
  return isa == CpuIsa::kGeneric;
#endif
}

CpuIsa GetCpuIsa() { return Current().load(); }

void SetCpuIsa(CpuIsa isa) {
  CHECK(HasCpuIsa(isa)) << "this machine has no " << Name(isa) << " ";
  Current().store(isa);
}

const char* Name(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kGeneric:
      return "generic";
    case CpuIsa::kAvx2:
      return "avx2";
    case CpuIsa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

}  // namespace lockstep
