// From a journal to an engine: see restore_requests.h.
#include "coordinator/restore_requests.h"

#include <memory>
#include <vector>

#include "coordinator/generation_log.h"
#include "coordinator/restore.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"

namespace lockstep {

absl::Status RestoreRequests(uint64_t model_digest, const Tokenizer* tokenizer, Journal* journal,
                             Engine* engine, GenerationTable* table) {
  ASSIGN_OR_RETURN(
      const std::vector<Journal::Restored> all,
      journal->Begin(model_digest, [engine](const std::string& id, const absl::Status& status) {
        engine->Cancel(id, status);
      }));
  int64_t running = 0, tokens = 0;
  for (const Journal::Restored& restored : all) {
    const GenerationSpec& spec = restored.request.spec;
    auto log = std::make_shared<GenerationLog>(spec.request_id, spec.n);
    if (restored.request.end.has_value()) {
      ReplayEnded(restored.request, tokenizer, log.get());
    } else {
      ++running;
      for (const auto& output : restored.request.outputs) {
        tokens += static_cast<int64_t>(output.ids.size());
      }
      engine->Restore(restored.request, log.get(), Journal::WrapRestored(restored, log));
    }
    table->AddRestored(spec, std::move(log));
  }
  if (!all.empty()) {
    LogInfo("journal: ", running, " requests with ", tokens, " tokens go on, ",
            static_cast<int64_t>(all.size()) - running, " that have ended can be read");
  }
  return absl::OkStatus();
}

}  // namespace lockstep
