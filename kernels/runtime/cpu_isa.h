// The instruction sets that CPU arms are compiled for, and the one this process uses.
// Chosen once, at first use; every set gives the same bits, so the choice changes speed only.
#pragma once

namespace lockstep {

enum class CpuIsa { kGeneric, kAvx2, kAvx512 };

// The best set that this machine runs, or the one that SetCpuIsa named.
CpuIsa GetCpuIsa();

// For tests: use `isa` from now on. CHECKs that the machine has it.
void SetCpuIsa(CpuIsa isa);
bool HasCpuIsa(CpuIsa isa);

// "generic", "avx2", "avx512".
const char* Name(CpuIsa isa);

// The one of three builds of the same function that this process uses.
template <typename Fn>
Fn* SelectIsa(Fn* generic, Fn* avx2, Fn* avx512) {
  switch (GetCpuIsa()) {
    case CpuIsa::kAvx512:
      return avx512;
    case CpuIsa::kAvx2:
      return avx2;
    case CpuIsa::kGeneric:
      break;
  }
  return generic;
}

}  // namespace lockstep
