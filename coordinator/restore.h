// Requests that a journal kept: their events again, from their tokens.
#pragma once

#include "absl/time/time.h"
#include "coordinator/generation.h"
#include "coordinator/sequence_state.h"

namespace lockstep {

class Tokenizer;

// Feeds the log of output `s->output_index`, a fresh sequence of `restored`, through its stream,
// and fills in its log. Events that were shown before go to `shown`, numbered as they were; an end
// that was not (the process died between the token and the end) goes to `sink`, made at `now`. True
// when the output has finished.
bool ReplayOutput(const RestoredRequest& restored, absl::Time now, SequenceState* s,
                  GenerationSink* shown, GenerationSink* sink);

// The events of a request that has ended, and its end.
void ReplayEnded(const RestoredRequest& restored, const Tokenizer* tokenizer,
                 GenerationSink* shown);

}  // namespace lockstep
