// ShardSpec: which part of a tensor's dimension a rank holds. A value; pure functions; thread safe.
//
// A dimension is a sequence of segments (q | k | v, say). A segment has `units` equal units of
// `unit_size` elements (a head, a value head, one row). With `world` ranks, rank r holds of each
// segment the units [r * units / world, (r + 1) * units / world); with fewer units than ranks (and
// `replicate` set) the one unit r / (world / units). Slices of the segments are concatenated.
// A vocabulary is split by rows after padding to a multiple of 128: see Vocab.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace lockstep {

struct Range {
  int64_t begin = 0;
  int64_t size = 0;
  bool operator==(const Range& o) const { return begin == o.begin && size == o.size; }
};

class ShardSpec {
 public:
  struct Segment {
    int64_t units = 0;
    int64_t unit_size = 1;
    bool replicate = false;  // fewer units than ranks: neighbours share one (kv heads)
  };

  // Every rank holds all `size` elements.
  static ShardSpec Replicated(int64_t size);
  static ShardSpec Split(std::vector<Segment> segments);
  static ShardSpec Split(int64_t units, int64_t unit_size) {
    return Split({{units, unit_size, false}});
  }
  // Rows of a vocabulary: rank r holds [r * p / world, (r + 1) * p / world) of the rows below
  // `size`, p = size rounded up to a multiple of 128. Ranks at the end may hold fewer rows, or
  // none.
  static ShardSpec Vocab(int64_t size);

  bool replicated() const { return kind_ == Kind::kReplicated; }
  int64_t full_size() const;
  // InvalidArgument says which segment cannot be cut into `world` parts and why.
  absl::Status Validate(int world) const;
  // Ascending, disjoint, non-empty ranges of the full dimension that `rank` holds. Validate first.
  std::vector<Range> Slices(int rank, int world) const;
  int64_t LocalSize(int rank, int world) const;
  // Rows per rank of a Vocab split, padding included (the same on every rank).
  static int64_t VocabRowsPerRank(int64_t size, int world);

 private:
  enum class Kind { kReplicated, kSplit, kVocab };
  Kind kind_ = Kind::kReplicated;
  int64_t size_ = 0;
  std::vector<Segment> segments_;
};

// The virtual shards of a row-parallel K (numerics N2): V = 8, or the largest power of two below it
// for which K / V is a multiple of 16. V depends on the full K alone.
struct VirtualShards {
  int64_t count = 1;  // V
  int64_t size = 0;   // K / V
};
VirtualShards VirtualShardsOf(int64_t full_k);

}  // namespace lockstep
