// Launchers of the row operations on CUDA. Pointers are device memory.
#pragma once

#include <cstdint>

#include "kernels/runtime/launch.h"

namespace lockstep {

struct GatherRowsProblem {
  const void* source = nullptr;  // [source_rows, row_bytes]
  const int32_t* rows = nullptr;
  void* out = nullptr;  // [num_rows, row_bytes]
  int64_t source_rows = 0;
  int64_t num_rows = 0;
  int64_t row_bytes = 0;
  int64_t source_stride = 0;  // in bytes
  int64_t out_stride = 0;     // in bytes
};

struct FillProblem {
  void* out = nullptr;  // [rows, dim]
  int64_t rows = 0;
  int64_t dim = 0;
  int64_t stride = 0;  // in elements
  uint32_t bits = 0;   // of one element
  bool half = false;   // elements of two bytes, else four
};

struct JoinColumnsProblem {
  const float* pieces = nullptr;   // [num_pieces, piece_rows, piece_columns]
  const int32_t* order = nullptr;  // [rows], or null: row r is row r of every piece
  float* out = nullptr;            // [rows, columns]
  int64_t num_pieces = 0;
  int64_t piece_rows = 0;
  int64_t piece_columns = 0;
  int64_t piece_stride = 0;  // between pieces, in elements
  int64_t rows = 0;
  int64_t columns = 0;  // at most num_pieces * piece_columns
  int64_t out_stride = 0;
};

// Rows whose index is outside the source become bytes 0xff.
LaunchStatus LaunchGatherRows(const GatherRowsProblem& problem, void* stream);
LaunchStatus LaunchFill(const FillProblem& problem, void* stream);
LaunchStatus LaunchJoinColumns(const JoinColumnsProblem& problem, void* stream);

}  // namespace lockstep
