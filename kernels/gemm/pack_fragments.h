// The packed form of weights on CUDA: operand fragments of mma.m16n8k16, so that each lane of a
// warp reads contiguous bytes. Runs on the host.
//
// Rows are taken in groups of 16 (missing rows of the last group are zeros), K in `leaves` equal
// parts. A (group, leaf) is contiguous, groups slowest. Within it K ascends in k16 steps, `run` of
// them together: 4 for NVFP4, 2 for FP8, 1 for BF16, fewer in the last run of a leaf. A run holds,
// for each of 32 lanes, that lane's 8 codes of each of its steps: 16 bytes per lane in a full run.
//
// Lane l has rows g = l / 4 and g + 8, and columns 2 (l % 4) + {0, 1} and those + 8: pairs
// (row g, low), (g + 8, low), (g, high), (g + 8, high). BF16 pairs are words; in other formats bits
// of the pairs interleave in each 16-bit half of a word, even columns in the low half:
//   NVFP4  sign, magnitude at bits 15, 8..6 | 14, 5..3 | 9, 2..0 | 13, 12..10 of pairs 0..3
//   FP8    sign, magnitude at bits 15, 10..4 | 11, 14..12 3..0 of two pairs per word
// The block scales of NVFP4 are bytes of 5 exponent and 3 fraction bits, biased by 10 (they are
// never negative), 16 per k16 step: a run holds for each g the bytes of rows (g, g + 8) of each of
// its steps. A scale of zero is stored as zero codes.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/gemm/gemm_args.h"
#include "kernels/runtime/thread_pool.h"

namespace lockstep {

// Bytes of codes, and of block scales, of n rows.
int64_t FragmentCodeBytes(WeightFormat format, int64_t n, int64_t k);
int64_t FragmentScaleBytes(int64_t n, int64_t k);

// rows[i] is a row of k BF16 or E4M3 codes as stored. k is a multiple of 16 * leaves. `pool` may be
// null; it changes speed only.
void PackFragments(ThreadPool* pool, WeightFormat format, const std::vector<const uint8_t*>& rows,
                   int64_t k, int leaves, uint8_t* out);
// rows[i] is a row of k E2M1 codes (even columns in the low nibbles), scale_rows[i] one of k / 16
// E4M3 scales, none negative.
void PackNvfp4Fragments(ThreadPool* pool, const std::vector<const uint8_t*>& rows,
                        const std::vector<const uint8_t*>& scale_rows, int64_t k, int leaves,
                        uint8_t* codes, uint8_t* scales);

// What is packed, for tests: the code at (row, column), and the E4M3 scale of a row's block of 16.
uint32_t FragmentCode(WeightFormat format, const uint8_t* packed, int64_t k, int leaves,
                      int64_t row, int64_t column);
uint8_t FragmentScale(const uint8_t* packed, int64_t k, int leaves, int64_t row, int64_t block);

}  // namespace lockstep
