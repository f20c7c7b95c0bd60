// BpeModel: merges the bytes of one piece of text into vocabulary tokens by the ranks of a merge
// list. Immutable after Create; thread safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lockstep {

struct BpeConfig {
  // Token bytes by id. An id may be missing from the list; no two ids have the same bytes.
  std::vector<std::pair<std::string, int32_t>> vocab;
  // Best rank first. Both parts and their concatenation are in the vocabulary.
  std::vector<std::pair<std::string, std::string>> merges;
  // A piece that is a token as it stands becomes that token, whatever the merges would give.
  bool ignore_merges = false;
  // Id for bytes that are no token; -1: such bytes are left out.
  int32_t unknown_id = -1;
};

class BpeModel {
 public:
  // DataLoss for a duplicate token or id, a negative or absurd id, or a merge that is not in the
  // vocabulary.
  static absl::StatusOr<std::unique_ptr<BpeModel>> Create(BpeConfig config);

  // Appends the ids of `piece`: the adjacent pair of lowest rank is merged, leftmost first, until
  // there is none. O(n log n) in the bytes of the piece.
  void EncodePiece(absl::string_view piece, std::vector<int32_t>* ids) const;

  // The bytes of `id`; empty when the vocabulary does not have it.
  absl::string_view TokenBytes(int32_t id) const;
  // -1 when there is none.
  int32_t FindToken(absl::string_view bytes) const;
  int32_t size() const { return static_cast<int32_t>(tokens_.size()); }  // greatest id + 1

 private:
  struct Merge {
    int32_t rank;
    int32_t id;
  };

  BpeModel() = default;
  const Merge* FindMerge(int32_t left, int32_t right) const;

  std::vector<std::string> tokens_;  // by id; never changed once ids_ views it
  absl::flat_hash_map<absl::string_view, int32_t> ids_;
  absl::flat_hash_map<uint64_t, Merge> merges_;  // key: left id << 32 | right id
  std::vector<int32_t> byte_ids_;                // 256; unknown_id where there is none
  bool ignore_merges_ = false;
};

}  // namespace lockstep
