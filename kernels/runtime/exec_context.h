// ExecContext: what every op is given besides its tensors. Borrowed for one call; owned by the step
// executor, whose single thread is the only one that launches ops.
//
// Rules for ops: check shapes and dtypes once, at the host entry, and return a status that names
// the op, what was asked and what was found; take temporaries from `workspace`; never allocate,
// never synchronize, never copy to the host. When `workspace->counting()` an op takes its
// temporaries and returns without computing (that is how the workspace is sized): see dry_run().
#pragma once

#include "kernels/runtime/counters.h"
#include "kernels/runtime/thread_pool.h"
#include "kernels/runtime/workspace.h"

namespace lockstep {

struct ExecContext {
  DeviceType device = DeviceType::kCpu;
  ThreadPool* pool = nullptr;  // CPU arms
  void* stream = nullptr;      // CUDA arms: a cudaStream_t
  Workspace* workspace = nullptr;
  Counters* counters = nullptr;

  bool dry_run() const { return workspace->counting(); }
};

}  // namespace lockstep
