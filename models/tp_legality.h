// TpRules: the conditions that an architecture puts on the tensor-parallel size, collected from its
// config and evaluated for 1, 2, 4 and 8.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "models/model.h"

namespace lockstep {

class TpRules {
 public:
  // `count` units ("attention heads") are split evenly.
  void Split(int64_t count, const std::string& what);
  // Key/value heads are split evenly, or replicated evenly when there are fewer than ranks.
  void KvHeads(int64_t count);
  // The virtual shards of a row-parallel linear are shared by the ranks.
  void RowParallel(const std::string& module, int64_t k);
  void RowParallel(const std::string& module, int64_t k, const VirtualShards& shards);

  // The first rule that a size breaks is its reason.
  TpLegality Evaluate() const;

 private:
  // The reason why a size is refused, or an empty string.
  std::vector<std::function<std::string(int)>> rules_;
};

}  // namespace lockstep
