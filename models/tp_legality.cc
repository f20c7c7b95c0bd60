#include "models/tp_legality.h"

#include "absl/strings/str_cat.h"
#include "models/layers/linear.h"

namespace lockstep {

void TpRules::Split(int64_t count, const std::string& what) {
  rules_.push_back([count, what](int t) {
    if (count % t == 0) return std::string();
    return absl::StrCat(count, " ", what, " cannot be split ", t, " ways");
  });
}

void TpRules::KvHeads(int64_t count) {
  rules_.push_back([count](int t) {
    if (count >= t && count % t != 0) {
      return absl::StrCat(count, " key/value heads cannot be split ", t, " ways");
    }
    if (count < t && t % count != 0) {
      return absl::StrCat(count, " key/value heads cannot be replicated evenly over ", t, " ranks");
    }
    return std::string();
  });
}

void TpRules::RowParallel(const std::string& module, int64_t k) {
  RowParallel(module, k, VirtualShardsOf(k));
}

void TpRules::RowParallel(const std::string& module, int64_t k, const VirtualShards& shards) {
  rules_.push_back([module, k, shards](int t) {
    return std::string(Linear::ValidateRowParallel(module, k, t, shards).message());
  });
}

TpLegality TpRules::Evaluate() const {
  TpLegality legality;
  for (int t : {1, 2, 4, 8}) {
    std::string reason;
    for (size_t i = 0; reason.empty() && i < rules_.size(); ++i) reason = rules_[i](t);
    if (reason.empty()) {
      legality.legal.push_back(t);
    } else {
      legality.reasons.push_back(absl::StrCat(t, ": ", reason));
    }
  }
  return legality;
}

}  // namespace lockstep
