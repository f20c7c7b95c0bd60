// BPE with a heap of candidate merges over a doubly linked list of symbols.
#include "models/tokenizer/bpe.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

// Far above any vocabulary; keeps a broken file from asking for all memory.
constexpr int32_t kMaxId = 1 << 24;
constexpr int32_t kNoRank = std::numeric_limits<int32_t>::max();

uint64_t PairKey(int32_t left, int32_t right) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) | static_cast<uint32_t>(right);
}

struct Symbol {
  int32_t id;
  int32_t previous;  // index, -1 at the beginning
  int32_t next;      // index, -1 at the end
  int32_t rank;      // of the merge with the next symbol; kNoRank: none, or the symbol is gone
};

}  // namespace

absl::StatusOr<std::unique_ptr<BpeModel>> BpeModel::Create(BpeConfig config) {
  std::unique_ptr<BpeModel> model(new BpeModel());
  int32_t size = 0;
  for (const auto& [bytes, id] : config.vocab) {
    if (id < 0 || id >= kMaxId) {
      return absl::DataLossError(absl::StrCat("vocabulary token \"", absl::CHexEscape(bytes),
                                              "\" has id ", id, "; expected 0 to ", kMaxId - 1));
    }
    size = std::max(size, id + 1);
  }
  model->tokens_.resize(size);
  std::vector<bool> taken(size, false);
  for (auto& [bytes, id] : config.vocab) {
    if (taken[id]) {
      return absl::DataLossError(absl::StrCat("two vocabulary tokens have the id ", id));
    }
    taken[id] = true;
    model->tokens_[id] = std::move(bytes);
  }
  model->ids_.reserve(config.vocab.size());
  for (int32_t id = 0; id < size; ++id) {
    if (taken[id] && !model->ids_.emplace(model->tokens_[id], id).second) {
      return absl::DataLossError(absl::StrCat("two vocabulary tokens have the bytes \"",
                                              absl::CHexEscape(model->tokens_[id]), "\""));
    }
  }
  model->byte_ids_.assign(256, config.unknown_id);
  for (int byte = 0; byte < 256; ++byte) {
    const char c = static_cast<char>(byte);
    const int32_t id = model->FindToken(absl::string_view(&c, 1));
    if (id >= 0) {
      model->byte_ids_[byte] = id;
    }
  }
  model->merges_.reserve(config.merges.size());
  int32_t rank = 0;
  for (const auto& [left, right] : config.merges) {
    const int32_t left_id = model->FindToken(left);
    const int32_t right_id = model->FindToken(right);
    const int32_t merged_id = model->FindToken(left + right);
    if (left_id < 0 || right_id < 0 || merged_id < 0) {
      return absl::DataLossError(absl::StrCat("merge ", rank, " (\"", absl::CHexEscape(left),
                                              "\", \"", absl::CHexEscape(right),
                                              "\"): the vocabulary lacks ",
                                              left_id < 0    ? "its left part"
                                              : right_id < 0 ? "its right part"
                                                             : "its result"));
    }
    model->merges_.insert_or_assign(PairKey(left_id, right_id), Merge{rank++, merged_id});
  }
  model->ignore_merges_ = config.ignore_merges;
  return model;
}

const BpeModel::Merge* BpeModel::FindMerge(int32_t left, int32_t right) const {
  const auto it = merges_.find(PairKey(left, right));
  return it == merges_.end() ? nullptr : &it->second;
}

void BpeModel::EncodePiece(absl::string_view piece, std::vector<int32_t>* ids) const {
  if (ignore_merges_) {
    const int32_t whole = FindToken(piece);
    if (whole >= 0) {
      ids->push_back(whole);
      return;
    }
  }
  std::vector<Symbol> symbols;
  symbols.reserve(piece.size());
  for (const char c : piece) {
    const int32_t id = byte_ids_[static_cast<uint8_t>(c)];
    if (id < 0) {
      continue;
    }
    const int32_t index = static_cast<int32_t>(symbols.size());
    symbols.push_back({id, index - 1, index + 1, kNoRank});
  }
  if (symbols.empty()) {
    return;
  }
  symbols.back().next = -1;

  // Candidates as rank << 32 | index of the left symbol. One is stale when its rank is no longer
  // that of the symbol: ranks are unique to a pair.
  std::vector<uint64_t> storage;
  storage.reserve(symbols.size());
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<uint64_t>> heap(
      std::greater<uint64_t>(), std::move(storage));
  const auto rate = [&](int32_t index) {
    Symbol& symbol = symbols[index];
    const Merge* merge = symbol.next < 0 ? nullptr : FindMerge(symbol.id, symbols[symbol.next].id);
    symbol.rank = merge == nullptr ? kNoRank : merge->rank;
    if (merge != nullptr) {
      heap.push((static_cast<uint64_t>(merge->rank) << 32) | static_cast<uint32_t>(index));
    }
  };
  for (size_t i = 0; i < symbols.size(); ++i) {
    rate(static_cast<int32_t>(i));
  }
  while (!heap.empty()) {
    const int32_t rank = static_cast<int32_t>(heap.top() >> 32);
    const int32_t index = static_cast<int32_t>(heap.top() & 0xFFFFFFFFu);
    heap.pop();
    Symbol& left = symbols[index];
    if (left.rank != rank) {
      continue;
    }
    Symbol& right = symbols[left.next];
    left.id = FindMerge(left.id, right.id)->id;
    left.next = right.next;
    right.rank = kNoRank;
    if (left.next >= 0) {
      symbols[left.next].previous = index;
    }
    rate(index);
    if (left.previous >= 0) {
      rate(left.previous);
    }
  }
  for (int32_t i = 0; i >= 0; i = symbols[i].next) {
    ids->push_back(symbols[i].id);
  }
}

absl::string_view BpeModel::TokenBytes(int32_t id) const {
  if (id < 0 || id >= size()) {
    return "";
  }
  return tokens_[id];
}

int32_t BpeModel::FindToken(absl::string_view bytes) const {
  const auto it = ids_.find(bytes);
  return it == ids_.end() ? -1 : it->second;
}

}  // namespace lockstep
