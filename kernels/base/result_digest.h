// The digest of a step's results, on which all ranks must agree: a fold over the sequences of the
// plan, in order, of the digest of each row of logits and then of the sampled id, where one was
// asked for (-1: none could be chosen). One owner, so that a coordinator can check that the results
// it got are the ones that the ranks agreed on.
#pragma once

#include <cstdint>

#include "kernels/base/hash.h"

namespace lockstep {

class ResultDigest {
 public:
  void AddLogits(uint64_t digest) { value_ = Fold64(value_, digest); }
  void AddSampled(int32_t id) { value_ = Fold64(value_, static_cast<uint32_t>(id)); }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0;
};

}  // namespace lockstep
