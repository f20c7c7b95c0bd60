// The vector loops over one row of logits, one set of functions per instruction set; all sets give
// the same bits.
#pragma once

#include <cstdint>

namespace lockstep {

struct RowScan {
  uint64_t digest = 0;   // LogitsDigest
  float maximum = 0.0f;  // -infinity when every logit is
  bool broken = false;   // holds a NaN or +infinity
};

#define LOCKSTEP_DECLARE_LOGITS(isa)                                                           \
  namespace isa {                                                                              \
  RowScan ScanRow(const float* logits, int64_t count);                                         \
  /* Lowest index of `value`, or -1. */                                                        \
  int64_t FindFirst(const float* logits, int64_t count, float value);                          \
  /* sum of exp((logit - maximum) / temperature): leaves of 128 ids, sixteen lanes (id mod 16, \
     ascending) and a tree each, joined pairwise like the digits of a binary counter. */       \
  float SumExp(const float* logits, int64_t count, float maximum, float temperature);          \
  /* sum of NucleusWeight((logit - maximum) / temperature); ids at -infinity count nothing. */ \
  uint64_t SumWeights(const float* logits, int64_t count, float maximum, float temperature);   \
  /* The id with the largest (logit - maximum) / temperature + noise(key, id), lower id first; \
     ids at -infinity never. -1 when there is none. */                                         \
  int64_t GumbelArgmax(const float* logits, int64_t count, float maximum, float temperature,   \
                       uint64_t key);                                                          \
  }
LOCKSTEP_DECLARE_LOGITS(generic)
LOCKSTEP_DECLARE_LOGITS(avx2)
LOCKSTEP_DECLARE_LOGITS(avx512)
#undef LOCKSTEP_DECLARE_LOGITS

}  // namespace lockstep
