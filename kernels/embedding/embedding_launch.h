// Launchers of the embedding operations on CUDA. Pointers are device memory, strides in elements.
#pragma once

#include <cstdint>

#include "kernels/runtime/launch.h"

namespace lockstep {

struct EmbeddingLookupProblem {
  const int32_t* tokens = nullptr;  // [num_tokens]
  const void* table = nullptr;      // [table_rows, dim]
  void* out = nullptr;              // [num_tokens, dim]
  int64_t num_tokens = 0;
  int64_t table_rows = 0;
  int64_t dim = 0;
  int64_t vocab_begin = 0;
  int64_t table_stride = 0;
  int64_t out_stride = 0;
  bool table_bf16 = false;  // else F32
  bool out_bf16 = false;    // else F32
};

struct EmbeddingSelectProblem {
  const int32_t* tokens = nullptr;  // [num_tokens]
  const void* gathered = nullptr;   // [world, num_tokens, dim]
  void* out = nullptr;              // [num_tokens, dim]
  int64_t num_tokens = 0;
  int64_t world = 0;
  int64_t rows_per_rank = 0;
  int64_t dim = 0;
  int64_t rank_stride = 0;  // of gathered
  int64_t out_stride = 0;
  int64_t element = 0;  // bytes
};

LaunchStatus LaunchEmbeddingLookup(const EmbeddingLookupProblem& problem, void* stream);
// Rows of tokens outside [0, world * rows_per_rank) become bytes 0xff.
LaunchStatus LaunchEmbeddingSelect(const EmbeddingSelectProblem& problem, void* stream);

}  // namespace lockstep
