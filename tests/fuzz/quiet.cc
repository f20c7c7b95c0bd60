// Harmless warnings would be most of what a fuzzer does.
#include "kernels/base/log.h"

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  lockstep::SetLogLevel(lockstep::Severity::kError);
  return 0;
}
