#include "coordinator/prefix_cache.h"

#include <algorithm>

#include "absl/strings/string_view.h"
#include "kernels/base/check.h"
#include "kernels/base/hash.h"

namespace lockstep {
namespace {

const int32_t* BlockTokens(const std::vector<int32_t>& tokens, int64_t index) {
  return tokens.data() + index * kBlockPositions;
}

}  // namespace

PrefixCache::PrefixCache(int64_t num_blocks, int64_t num_snapshots)
    : blocks_(num_blocks), snapshots_(static_cast<size_t>(num_snapshots)) {
  for (int64_t i = num_snapshots; i > 0; --i) {
    free_snapshots_.push_back(static_cast<int32_t>(i - 1));
  }
}

int32_t PrefixCache::AllocateBlock() {
  if (blocks_.num_free() == 0) {
    const int32_t victim = blocks_.OldestIdle();
    Forget(name_of_block_.at(victim));
  }
  return blocks_.Take();
}

void PrefixCache::ReleaseBlocks(const std::vector<int32_t>& table) {
  for (auto block = table.rbegin(); block != table.rend(); ++block) blocks_.Release(*block);
}

std::vector<uint64_t> PrefixCache::Chain(const std::vector<int32_t>& tokens,
                                         const std::string& salt) {
  const int64_t whole = static_cast<int64_t>(tokens.size()) / kBlockPositions;
  std::vector<uint64_t> chain;
  chain.reserve(static_cast<size_t>(whole));
  uint64_t name = HashBytes(salt);
  for (int64_t i = 0; i < whole; ++i) {
    const auto* bytes = reinterpret_cast<const char*>(BlockTokens(tokens, i));
    name = Fold64(name, HashBytes(absl::string_view(bytes, kBlockPositions * sizeof(int32_t))));
    chain.push_back(name);
  }
  return chain;
}

const PrefixCache::Entry* PrefixCache::Find(const std::vector<uint64_t>& chain,
                                            const std::vector<int32_t>& tokens,
                                            int64_t index) const {
  const auto found = entries_.find(chain[static_cast<size_t>(index)]);
  if (found == entries_.end()) return nullptr;
  const Entry& entry = found->second;
  if (index > 0 && entry.parent != chain[static_cast<size_t>(index - 1)]) return nullptr;
  const int32_t* wanted = BlockTokens(tokens, index);
  return std::equal(entry.tokens.begin(), entry.tokens.end(), wanted) ? &entry : nullptr;
}

PrefixCache::Hit PrefixCache::Lookup(const std::vector<uint64_t>& chain,
                                     const std::vector<int32_t>& tokens,
                                     int64_t max_position) const {
  const int64_t limit =
      std::min<int64_t>(static_cast<int64_t>(chain.size()), max_position / kBlockPositions);
  Hit hit;
  std::vector<int32_t> table;
  for (int64_t i = 0; i < limit; ++i) {
    const Entry* entry = Find(chain, tokens, i);
    if (entry == nullptr) break;
    table.push_back(entry->block);
    if (entry->snapshot >= 0) {
      hit.position = (i + 1) * kBlockPositions;
      hit.snapshot = entry->snapshot;
    }
  }
  table.resize(static_cast<size_t>(hit.position / kBlockPositions));
  for (const int32_t block : table) hit.idle_blocks += blocks_.holders(block) == 0 ? 1 : 0;
  hit.blocks = std::move(table);
  return hit;
}

void PrefixCache::Acquire(const Hit& hit) {
  if (hit.position == 0) return;
  for (const int32_t block : hit.blocks) blocks_.Hold(block);
  Snapshot& s = snapshot(hit.snapshot);
  CHECK(s.attached);
  if (s.readers++ == 0) lru_.erase({s.used_at, hit.snapshot});
}

void PrefixCache::Register(const std::vector<uint64_t>& chain, const std::vector<int32_t>& tokens,
                           int64_t index, int32_t block) {
  const uint64_t name = chain[static_cast<size_t>(index)];
  if (entries_.count(name) != 0 || name_of_block_.count(block) != 0) return;
  Entry entry;
  entry.block = block;
  entry.parent = index > 0 ? chain[static_cast<size_t>(index - 1)] : 0;
  const int32_t* first = BlockTokens(tokens, index);
  entry.tokens.assign(first, first + kBlockPositions);
  entries_.emplace(name, std::move(entry));
  name_of_block_.emplace(block, name);
  blocks_.Keep(block);
}

void PrefixCache::Forget(uint64_t name) {
  const auto found = entries_.find(name);
  if (found == entries_.end()) return;
  DetachSnapshot(&found->second);
  const int32_t block = found->second.block;
  name_of_block_.erase(block);
  entries_.erase(found);
  blocks_.Discard(block);
}

void PrefixCache::ForgetBlocks(const std::vector<int32_t>& table) {
  for (const int32_t block : table) {
    const auto found = name_of_block_.find(block);
    if (found != name_of_block_.end()) Forget(uint64_t{found->second});
  }
}

void PrefixCache::ForgetAll() {
  while (!entries_.empty()) Forget(uint64_t{entries_.begin()->first});
}

PrefixCache::Snapshot& PrefixCache::snapshot(int32_t id) {
  CHECK(id >= 0 && id < num_snapshots()) << "snapshot " << id << " of " << num_snapshots();
  return snapshots_[static_cast<size_t>(id)];
}

void PrefixCache::DetachSnapshot(Entry* entry) {
  if (entry->snapshot < 0) return;
  const int32_t id = entry->snapshot;
  entry->snapshot = -1;
  Snapshot& s = snapshot(id);
  s.attached = false;
  if (s.readers > 0) return;  // freed by the last reader
  lru_.erase({s.used_at, id});
  free_snapshots_.push_back(id);
}

bool PrefixCache::HasSnapshot(uint64_t name) const {
  const auto found = entries_.find(name);
  return found != entries_.end() && found->second.snapshot >= 0;
}

int32_t PrefixCache::BeginSnapshot() {
  if (free_snapshots_.empty()) {
    if (lru_.empty()) return -1;
    DetachSnapshot(&entries_.at(snapshot(lru_.begin()->second).name));
  }
  const int32_t id = free_snapshots_.back();
  free_snapshots_.pop_back();
  snapshot(id) = Snapshot();
  snapshot(id).writing = true;
  return id;
}

void PrefixCache::CommitSnapshot(int32_t id, uint64_t name) {
  const auto found = entries_.find(name);
  if (found == entries_.end() || found->second.snapshot >= 0) {
    AbandonSnapshot(id);
    return;
  }
  Snapshot& s = snapshot(id);
  CHECK(s.writing);
  s.writing = false;
  s.attached = true;
  s.name = name;
  s.used_at = ++ticks_;
  lru_.insert({s.used_at, id});
  found->second.snapshot = id;
}

void PrefixCache::AbandonSnapshot(int32_t id) {
  CHECK(snapshot(id).writing);
  snapshot(id).writing = false;
  free_snapshots_.push_back(id);
}

void PrefixCache::UnpinSnapshot(int32_t id) {
  Snapshot& s = snapshot(id);
  CHECK_GT(s.readers, 0);
  if (--s.readers > 0) return;
  if (!s.attached) {
    free_snapshots_.push_back(id);
    return;
  }
  s.used_at = ++ticks_;
  lru_.insert({s.used_at, id});
}

int64_t PrefixCache::snapshots_pinned() const {
  return std::count_if(snapshots_.begin(), snapshots_.end(),
                       [](const Snapshot& s) { return s.writing || s.readers > 0; });
}

}  // namespace lockstep
