// Requests as journal records, and back.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "coordinator/generation.h"
#include "proto/journal.pb.h"

namespace lockstep {

journal::v1::Accept ToAccept(uint64_t ordinal, const GenerationSpec& spec,
                             const inference::v1::Accepted& accepted, absl::Time submitted);
journal::v1::End ToEnd(uint64_t ordinal, const absl::Status& status, absl::Time now);

// The requests of a journal, built up record by record.
class RequestCollector {
 public:
  // DATA_LOSS when the record does not fit those before it.
  absl::Status Take(const journal::v1::Record& record);

  // By ordinal. An id that was used again ends the request that had it before without a trace.
  std::map<uint64_t, RestoredRequest>& requests() { return requests_; }
  const std::map<uint64_t, absl::Time>& end_times() const { return end_times_; }
  uint64_t next_ordinal() const { return next_ordinal_; }
  uint64_t model_digest() const { return model_digest_; }

 private:
  absl::Status TakeAccept(const journal::v1::Accept& accept);
  absl::Status TakeToken(const journal::v1::Token& token);
  // The output that a record names; nullptr when there is none.
  RestoredRequest::Output* FindOutput(uint64_t ordinal, int32_t output);

  std::map<uint64_t, RestoredRequest> requests_;
  std::map<uint64_t, absl::Time> end_times_;
  std::map<std::string, uint64_t> by_id_;
  uint64_t next_ordinal_ = 1;
  uint64_t model_digest_ = 0;
};

}  // namespace lockstep
