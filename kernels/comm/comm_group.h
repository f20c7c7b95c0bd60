// CommGroup: the ranks that run collectives together. All transports (in-process fake, sockets
// between CPU processes, NCCL, push over peer memory) implement this interface.
//
// Rules:
// 1. Every rank calls the same collectives in the same order with the same sizes.
// 2. Collectives are called by the executor thread only. Abort may be called by any thread.
// 3. Sums are ours, in tree order over ranks: ((0+1)+(2+3))+((4+5)+(6+7)), in F32, evaluated
//    identically on every rank (numerics N2, N12). A transport only moves bytes.
// 4. BeginStep names the step; frames carry (epoch, step, operation number, digest), and a peer
// that
//    disagrees fails the collective with an error that names both sides. No collective ever hangs:
//    a peer that is gone, an abort, or the time bound ends it with a status.
// 5. After any failure the group is broken: every later call returns the first error. A new group
//    needs a new epoch.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/base/tensor_view.h"
#include "kernels/runtime/exec_context.h"

namespace lockstep {

class CommGroup {
 public:
  virtual ~CommGroup() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;  // a power of two
  virtual uint64_t epoch() const = 0;

  // All collectives until the next call belong to step `step_id` with this batch digest.
  virtual void BeginStep(uint64_t step_id, uint64_t digest) = 0;

  // data F32, contiguous: replaced on every rank by the tree sum over ranks.
  virtual absl::Status AllReduce(ExecContext* ctx, TensorView data) = 0;

  // out [size, shape of local...]: out[r] is rank r's local. Any dtype, contiguous.
  virtual absl::Status AllGather(ExecContext* ctx, ConstTensorView local, TensorView out) = 0;

  // Returns when every rank has called it.
  virtual absl::Status Barrier(ExecContext* ctx) = 0;

  // The first failure of the collectives that have ended. Transports whose collectives return when
  // they have ended have said it already; those that queue them on the device say it here, and the
  // executor asks before it believes a step's results.
  virtual absl::Status Check() { return absl::OkStatus(); }

  // Ends running and later collectives of this rank with Aborted(reason), and tells the peers.
  virtual void Abort(absl::string_view reason) = 0;
};

}  // namespace lockstep
