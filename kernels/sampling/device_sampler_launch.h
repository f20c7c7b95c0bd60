// Launchers of sampling on CUDA, and the plain structs that host and device share. Pointers are
// device memory unless a comment says otherwise.
#pragma once

#include <cstdint>

#include "kernels/runtime/launch.h"

namespace lockstep {

constexpr int64_t kSamplerMaxVocab = 1 << 18;
constexpr int32_t kSamplerMaxTop = 20;     // top logprobs of a row
constexpr int32_t kSamplerMaxBias = 1024;  // logit biases of a slot
constexpr int32_t kSamplerChunk = 2048;    // ids of one block of threads: 16 leaves of 128
constexpr int32_t kSamplerBins = 2048;     // of a row's histogram
constexpr int32_t kSamplerList = 4096;     // ids whose order is needed, per row

// One row to look at. A row of the plan with row < 0 is padding.
struct SampleRow {
  int32_t row;   // of the logits
  int32_t slot;  // -1: its digest only
  uint64_t key;  // RowNoiseKey
};
static_assert(sizeof(SampleRow) == 16, "rows of a plan are two words");

constexpr uint32_t kRowNan = 1;  // a NaN; for a sampled row also +infinity
constexpr uint32_t kRowAllMasked = 2;

struct SampledRow {
  int32_t id;
  uint32_t flags;
  uint64_t digest;
  float logprob;
  int32_t num_top;
};

struct TopLogprob {
  int32_t id;
  float logprob;
};

// What a slot's parameters ask of the kernels.
constexpr uint32_t kSlotPenalties = 1;
constexpr uint32_t kSlotMasks = 2;  // any of the planes of SamplerState::masks

struct SamplerSlot {
  float temperature;
  float top_p;
  float min_p;
  float presence_penalty;
  float frequency_penalty;
  float repetition_penalty;
  int32_t top_k;
  int32_t min_tokens;
  int32_t num_logprobs;
  int32_t num_bias;
  uint32_t flags;
};

struct SamplerState {
  int32_t vocab = 0;
  int32_t mask_words = 0;           // ceil(vocab / 32)
  SamplerSlot* slots = nullptr;     // [slots]
  int32_t* num_output = nullptr;    // [slots]
  int32_t* last_sampled = nullptr;  // [slots]
  // [slots, vocab]: twice the occurrences among generated ids, plus one for an id of the prompt.
  uint32_t* uses = nullptr;
  // [slots, mask_words, 4]: bits of ids that are not allowed, banned, stop ids, biased.
  uint32_t* masks = nullptr;
  int32_t* bias_ids = nullptr;  // [slots, kSamplerMaxBias] ascending, equal ones in request order
  float* bias_values = nullptr;
};

// The id lists of one slot, in memory of the host that the device reads.
struct SamplerLists {
  const int32_t* ids = nullptr;  // prompt, output, allowed, banned, stop, bias, one after the other
  const float* bias_values = nullptr;
  int32_t num_prompt = 0;
  int32_t num_output = 0;
  int32_t num_allowed = 0;
  int32_t num_banned = 0;
  int32_t num_stop = 0;
  int32_t num_bias = 0;
};

// Temporaries of a launch; C = ceil(vocab / kSamplerChunk), P = SamplerParts(C, rows).
struct SamplerScratch {
  void* scans = nullptr;          // [rows, P] of kSamplerScanBytes
  void* bests = nullptr;          // [rows, P] of kSamplerBestBytes
  float* leaf_sums = nullptr;     // [rows, C * 16]
  uint64_t* tops = nullptr;       // [rows, C, kSamplerMaxTop]
  uint64_t* weights = nullptr;    // [rows, kSamplerBins]
  uint32_t* counts = nullptr;     // [rows, kSamplerBins]
  uint64_t* list = nullptr;       // [rows, kSamplerList]
  uint32_t* list_size = nullptr;  // [rows]
};
constexpr int64_t kSamplerScanBytes = 24;
constexpr int64_t kSamplerBestBytes = 8;

// Blocks of threads that share the chunks of a row: about as many in all as run at the same time.
// No result depends on it.
inline int64_t SamplerParts(int64_t chunks, int64_t rows) {
  const int64_t parts = (1024 + rows - 1) / rows;
  return parts < chunks ? parts : chunks;
}

struct SampleProblem {
  SamplerState state;
  SamplerScratch scratch;
  const float* logits = nullptr;    // [pieces, R, local]
  int64_t piece_stride = 0;         // in elements
  uint32_t local = 0;               // columns of a piece
  const SampleRow* rows = nullptr;  // [num_rows]
  int64_t num_rows = 0;
  int32_t parts = 0;              // P
  SampledRow* results = nullptr;  // [num_rows]
  TopLogprob* top = nullptr;      // [num_rows, kSamplerMaxTop]
};

// Rows are sampled by four kernels, whatever their number and their parameters.
LaunchStatus LaunchSample(const SampleProblem& problem, void* stream);
// The parts of LaunchSample in their two sources.
void LaunchSampleScans(const SampleProblem& problem, void* stream);
void LaunchSampleFinish(const SampleProblem& problem, void* stream);

// Makes the slot's state that of `params` and `lists`.
LaunchStatus LaunchResetSlot(const SamplerState& state, int32_t slot, const SamplerSlot& params,
                             const SamplerLists& lists, void* stream);

// tokens[row_offsets[b]] = last_sampled[slots[b]] where it is negative.
LaunchStatus LaunchResolveFeedback(const SamplerState& state, int32_t* tokens,
                                   const int32_t* row_offsets, const int32_t* slots,
                                   int64_t num_tokens, int64_t num_sequences, int64_t num_slots,
                                   void* stream);

}  // namespace lockstep
