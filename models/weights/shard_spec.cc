// Implementation of ShardSpec and VirtualShardsOf.
#include "models/weights/shard_spec.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"

namespace lockstep {
namespace {

constexpr int64_t kVocabPadding = 128;
constexpr int64_t kMaxVirtualShards = 8;
constexpr int64_t kVirtualShardMultiple = 16;

int64_t PaddedVocab(int64_t size) {
  return (size + kVocabPadding - 1) / kVocabPadding * kVocabPadding;
}

bool CanReplicate(const ShardSpec::Segment& segment, int world) {
  return segment.replicate && segment.units > 0 && segment.units < world &&
         world % segment.units == 0;
}

}  // namespace

ShardSpec ShardSpec::Replicated(int64_t size) {
  CHECK_GE(size, 0);
  ShardSpec spec;
  spec.kind_ = Kind::kReplicated;
  spec.size_ = size;
  return spec;
}

ShardSpec ShardSpec::Split(std::vector<Segment> segments) {
  ShardSpec spec;
  spec.kind_ = Kind::kSplit;
  for (const Segment& segment : segments) {
    CHECK(segment.units >= 0 && segment.unit_size >= 0)
        << segment.units << " units of " << segment.unit_size << " ";
    spec.size_ += segment.units * segment.unit_size;
  }
  spec.segments_ = std::move(segments);
  return spec;
}

ShardSpec ShardSpec::Vocab(int64_t size) {
  CHECK_GE(size, 0);
  ShardSpec spec;
  spec.kind_ = Kind::kVocab;
  spec.size_ = size;
  return spec;
}

int64_t ShardSpec::full_size() const { return size_; }

absl::Status ShardSpec::Validate(int world) const {
  if (world < 1) {
    return absl::InvalidArgumentError(absl::StrCat("cannot split among ", world, " ranks"));
  }
  if (kind_ == Kind::kVocab && kVocabPadding % world != 0) {
    return absl::InvalidArgumentError(absl::StrCat("a vocabulary padded to a multiple of ",
                                                   kVocabPadding, " rows cannot be split ", world,
                                                   " ways; use a power of two up to 128"));
  }
  if (kind_ != Kind::kSplit) return absl::OkStatus();
  for (size_t i = 0; i < segments_.size(); ++i) {
    const Segment& segment = segments_[i];
    if (segment.units % world == 0 || CanReplicate(segment, world)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "segment ", i, ": ", segment.units, " units of ", segment.unit_size, " cannot be split ",
        world, " ways: ", segment.units,
        segment.replicate && segment.units < world ? " does not divide the number of ranks"
                                                   : " is not a multiple of the number of ranks"));
  }
  return absl::OkStatus();
}

std::vector<Range> ShardSpec::Slices(int rank, int world) const {
  CHECK_OK(Validate(world));
  CHECK(rank >= 0 && rank < world) << "rank " << rank << " of " << world << " ";
  std::vector<Range> slices;
  const auto add = [&slices](int64_t begin, int64_t size) {
    if (size > 0) slices.push_back(Range{begin, size});
  };
  if (kind_ == Kind::kReplicated) {
    add(0, size_);
  } else if (kind_ == Kind::kVocab) {
    const int64_t rows = VocabRowsPerRank(size_, world);
    const int64_t begin = std::min(size_, rank * rows);
    add(begin, std::min(size_, begin + rows) - begin);
  } else {
    int64_t offset = 0;
    for (const Segment& segment : segments_) {
      int64_t first = rank * segment.units / world;
      int64_t count = segment.units / world;
      if (CanReplicate(segment, world)) {
        first = rank / (world / segment.units);
        count = 1;
      }
      add(offset + first * segment.unit_size, count * segment.unit_size);
      offset += segment.units * segment.unit_size;
    }
  }
  return slices;
}

int64_t ShardSpec::LocalSize(int rank, int world) const {
  int64_t size = 0;
  for (const Range& slice : Slices(rank, world)) size += slice.size;
  return size;
}

int64_t ShardSpec::VocabRowsPerRank(int64_t size, int world) { return PaddedVocab(size) / world; }

VirtualShards VirtualShardsOf(int64_t full_k) {
  CHECK_GT(full_k, 0);
  int64_t count = kMaxVirtualShards;
  while (count > 1 && full_k % (count * kVirtualShardMultiple) != 0) count /= 2;
  return VirtualShards{count, full_k / count};
}

}  // namespace lockstep
