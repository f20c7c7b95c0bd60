// Launchers of the push collectives: every rank writes its data straight into the peers' memory
// and waits for theirs. Pointers are device memory unless said otherwise.
//
// A message is a run of 16-byte packets {word, flag, word, flag}: a reader takes a half when its
// flag is the number of the collective, so data and arrival are one store and no fence is needed.
// A channel has two slots per pair of ranks, used in turn: a rank can be at most one collective
// ahead of a peer, because each collective waits for all peers.
#pragma once

#include <cstdint>

#include "kernels/runtime/launch.h"

namespace lockstep {

constexpr int kMaxPushRanks = 8;
constexpr int64_t kPushPacketBytes = 16;
constexpr int64_t kPushPacketWords = 2;  // payload

enum class PushFailure : uint32_t { kNone = 0, kTimeout, kAborted, kDisagreed };

// Host memory that the device writes: the first failure of a channel.
struct PushFailureRecord {
  PushFailure failure = PushFailure::kNone;
  uint32_t sequence = 0;  // number of the collective
  uint32_t peer = 0;
  uint64_t mine = 0;  // kDisagreed: the two values
  uint64_t theirs = 0;
};

// Lives in device memory, so that captured launches survive a new group.
struct PushChannel {
  int rank = 0;
  int world = 0;
  int64_t capacity = 0;                  // packets of a slot
  void* to[kMaxPushRanks] = {};          // in peer r's memory: 2 slots for messages of this rank
  const void* from[kMaxPushRanks] = {};  // in this rank's memory: 2 slots for messages of rank r
  uint32_t* sequence = nullptr;          // number of the last collective
  uint32_t* ended = nullptr;             // blocks of the running one that have ended
  uint32_t* failed = nullptr;            // not 0: later collectives return at once
  const uint32_t* abort = nullptr;       // host memory: not 0 ends every wait
  PushFailureRecord* record = nullptr;   // host memory
  uint64_t timeout_ns = 0;
};

// data[i] = the tree sum over ranks, in place; n <= capacity * kPushPacketWords. The order is that
// of TreeSum, the result bit for bit equal on every rank.
LaunchStatus LaunchPushAllReduce(const PushChannel* channel, int world, float* data, int64_t n,
                                 void* stream);

// out[r * out_stride + i] = word i of rank r's local, i < n.
LaunchStatus LaunchPushAllGather(const PushChannel* channel, int world, const uint32_t* local,
                                 int64_t n, uint32_t* out, int64_t out_stride, void* stream);

// Compares `value` with every peer's: kDisagreed when one differs. A barrier.
LaunchStatus LaunchPushAgree(const PushChannel* channel, uint64_t value, void* stream);

}  // namespace lockstep
