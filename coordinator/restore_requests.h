// The requests of a journal, given back to an engine that is about to start.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "coordinator/engine.h"
#include "coordinator/generation_table.h"
#include "coordinator/journal/journal.h"

namespace lockstep {

class Tokenizer;

// Begins to write `journal` for the model of this digest. What it has goes to `table`, so that
// clients can attach to it, and what has not ended to `engine`, which has not started and outlives
// the journal's thread. Errors: as Journal::Begin.
absl::Status RestoreRequests(uint64_t model_digest, const Tokenizer* tokenizer, Journal* journal,
                             Engine* engine, GenerationTable* table);

}  // namespace lockstep
