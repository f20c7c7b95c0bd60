#include "coordinator/admin_faults.h"

#include <algorithm>
#include <string>
#include <utility>

namespace lockstep {
namespace {

admin::v1::FaultRecord ToProto(const FaultRecord& record, uint64_t id) {
  admin::v1::FaultRecord out;
  out.set_id(id);
  out.set_cause(std::string(Name(record.fault.cause)));
  out.set_detail(record.fault.message);
  for (const int rank : record.fault.ranks) out.add_ranks(rank);
  out.set_epoch_before(record.epoch_before);
  out.set_epoch_after(record.epoch_after);
  out.set_start_unix_ms(absl::ToUnixMillis(record.detected));
  admin::v1::FaultPhases* phases = out.mutable_phases();
  phases->set_detect(absl::ToDoubleSeconds(record.silence));
  phases->set_abort(absl::ToDoubleSeconds(record.abort));
  phases->set_replace(absl::ToDoubleSeconds(record.replace));
  phases->set_join(absl::ToDoubleSeconds(record.join));
  phases->set_replay(absl::ToDoubleSeconds(record.replay));
  out.set_requests_replayed(record.requests_replayed);
  out.set_tokens_recomputed(record.tokens_recomputed);
  out.set_outcome(record.outcome == "recovered"     ? admin::v1::RECOVERED
                  : record.outcome == "exhausted"   ? admin::v1::GAVE_UP
                  : record.outcome == "interrupted" ? admin::v1::INTERRUPTED
                                                    : admin::v1::RECOVERING);
  return out;
}

}  // namespace

std::vector<admin::v1::FaultRecord> ToProto(const std::vector<FaultRecord>& records) {
  std::vector<admin::v1::FaultRecord> out;
  for (size_t i = 0; i < records.size(); ++i) out.push_back(ToProto(records[i], i + 1));
  std::reverse(out.begin(), out.end());
  return out;
}

}  // namespace lockstep
