// Host side of the fragment layout.
#include "kernels/gemm/pack_fragments.h"

#include <algorithm>
#include <cstring>

#include "kernels/base/check.h"

namespace lockstep {
namespace {

constexpr int64_t kLanes = 32;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bytes of a lane's 8 codes of one k16 step.
int64_t StepBytes(WeightFormat format) {
  CHECK(format != WeightFormat::kF32) << "F32 has no fragments ";
  return format == WeightFormat::kNvfp4 ? 4 : format == WeightFormat::kFp8 ? 8 : 16;
}

// Where the codes of a k16 step of a leaf lie within its (group, leaf), and how far apart lanes.
struct StepPlace {
  int64_t offset;
  int64_t lane_stride;
};

StepPlace PlaceOf(int64_t step, int64_t leaf_steps, int64_t run, int64_t lanes,
                  int64_t step_bytes) {
  const int64_t begin = step / run * run;
  const int64_t length = std::min(run, leaf_steps - begin);
  return {begin * lanes * step_bytes + (step - begin) * step_bytes, length * step_bytes};
}

// The row and first column, within a group and a k16 step, of a lane's pair.
struct PairPlace {
  int64_t row;
  int64_t column;
};
PairPlace PairOf(int64_t lane, int pair) {
  return {lane / 4 + 8 * (pair % 2), lane % 4 * 2 + 8 * (pair / 2)};
}

// Bits of a code within a 16-bit half, lowest first; the last one is the sign.
constexpr int kNvfp4Bits[4][4] = {{6, 7, 8, 15}, {3, 4, 5, 14}, {0, 1, 2, 9}, {10, 11, 12, 13}};
constexpr int kFp8Bits[2][8] = {{4, 5, 6, 7, 8, 9, 10, 15}, {0, 1, 2, 3, 12, 13, 14, 11}};

// The word, half and bits of element e (0, 1) of a pair within a lane's step.
struct CodePlace {
  int word;
  int shift;        // 16 e
  const int* bits;  // nullptr: the whole half
  int num_bits;
};
CodePlace CodePlaceOf(WeightFormat format, int pair, int element) {
  switch (format) {
    case WeightFormat::kNvfp4:
      return {0, 16 * element, kNvfp4Bits[pair], 4};
    case WeightFormat::kFp8:
      return {pair / 2, 16 * element, kFp8Bits[pair % 2], 8};
    default:
      return {pair, 16 * element, nullptr, 16};
  }
}

uint32_t Scatter(uint32_t code, const CodePlace& place) {
  if (place.bits == nullptr) return code << place.shift;
  uint32_t word = 0;
  for (int i = 0; i < place.num_bits; ++i) word |= (code >> i & 1) << (place.bits[i] + place.shift);
  return word;
}

uint32_t Collect(uint32_t word, const CodePlace& place) {
  if (place.bits == nullptr) return word >> place.shift & 0xffff;
  uint32_t code = 0;
  for (int i = 0; i < place.num_bits; ++i) code |= (word >> (place.bits[i] + place.shift) & 1) << i;
  return code;
}

int64_t RunOf(WeightFormat format) { return 16 / StepBytes(format); }

uint32_t CodeOf(WeightFormat format, const uint8_t* row, int64_t column) {
  switch (format) {
    case WeightFormat::kNvfp4:
      return row[column / 2] >> (4 * (column % 2)) & 15;
    case WeightFormat::kFp8:
      return row[column];
    default: {
      uint16_t bits;
      std::memcpy(&bits, row + 2 * column, 2);
      return bits;
    }
  }
}

// Every code through tables: a word is the OR of what its codes scatter to.
class Scatterer {
 public:
  explicit Scatterer(WeightFormat format) : format_(format) {
    if (format == WeightFormat::kBF16) return;
    const int codes = format == WeightFormat::kNvfp4 ? 16 : 256;
    for (int pair = 0; pair < 4; ++pair) {
      for (int code = 0; code < codes; ++code) {
        table_[pair][code] = Scatter(static_cast<uint32_t>(code), CodePlaceOf(format, pair, 0));
      }
    }
  }
  uint32_t operator()(uint32_t code, int pair, int element) const {
    return (format_ == WeightFormat::kBF16 ? code : table_[pair][code]) << (16 * element);
  }

 private:
  WeightFormat format_;
  uint32_t table_[4][256] = {};
};

// An E4M3 scale with 5 bits of exponent, so that it has no subnormals.
uint8_t EncodeScale(uint8_t e4m3) {
  const int exponent = e4m3 >> 3 & 15;
  const int fraction = e4m3 & 7;
  if (exponent > 0) return static_cast<uint8_t>((exponent + 3) << 3 | fraction);
  if (fraction >= 4) return static_cast<uint8_t>(3 << 3 | (fraction & 3) << 1);
  if (fraction >= 2) return static_cast<uint8_t>(2 << 3 | (fraction & 1) << 2);
  return static_cast<uint8_t>(fraction << 3);
}

uint8_t DecodeScale(uint8_t byte) {
  const int exponent = byte >> 3;
  const int fraction = byte & 7;
  if (exponent > 3) return static_cast<uint8_t>((exponent - 3) << 3 | fraction);
  return static_cast<uint8_t>(exponent == 0 ? 0 : (8 | fraction) >> (4 - exponent));
}

// fn(i) for every i below count.
template <typename Fn>
void ForEach(ThreadPool* pool, int64_t count, const Fn& fn) {
  if (pool != nullptr) {
    pool->ParallelFor(count, fn);
  } else {
    for (int64_t i = 0; i < count; ++i) fn(i);
  }
}

// Packs rows of codes; `is_zero(row, block)` says that a block of 16 counts as zeros.
template <typename IsZero>
void Pack(ThreadPool* pool, WeightFormat format, const std::vector<const uint8_t*>& rows, int64_t k,
          int leaves, uint8_t* out, IsZero is_zero) {
  const int64_t step_bytes = StepBytes(format);
  const int64_t leaf_steps = k / 16 / leaves;
  CHECK_EQ(leaf_steps * 16 * leaves, k);
  const int64_t n = static_cast<int64_t>(rows.size());
  const Scatterer scatter(format);
  ForEach(pool, CeilDiv(n, kGroupRows), [&](int64_t group) {
    for (int64_t leaf = 0; leaf < leaves; ++leaf) {
      uint8_t* base = out + (group * leaves + leaf) * leaf_steps * kLanes * step_bytes;
      for (int64_t step = 0; step < leaf_steps; ++step) {
        const StepPlace place = PlaceOf(step, leaf_steps, RunOf(format), kLanes, step_bytes);
        const int64_t block = leaf * leaf_steps + step;
        for (int64_t lane = 0; lane < kLanes; ++lane) {
          uint32_t words[4] = {};
          for (int pair = 0; pair < 4; ++pair) {
            const PairPlace at = PairOf(lane, pair);
            const int64_t row = group * kGroupRows + at.row;
            if (row >= n || is_zero(row, block)) continue;
            for (int e = 0; e < 2; ++e) {
              const uint32_t code = CodeOf(format, rows[row], block * 16 + at.column + e);
              words[CodePlaceOf(format, pair, e).word] |= scatter(code, pair, e);
            }
          }
          std::memcpy(base + place.offset + lane * place.lane_stride, words,
                      static_cast<size_t>(step_bytes));
        }
      }
    }
  });
}

}  // namespace

int64_t FragmentCodeBytes(WeightFormat format, int64_t n, int64_t k) {
  return CeilDiv(n, kGroupRows) * (k / 16) * kLanes * StepBytes(format);
}

int64_t FragmentScaleBytes(int64_t n, int64_t k) {
  return CeilDiv(n, kGroupRows) * (k / 16) * kGroupRows;
}

void PackFragments(ThreadPool* pool, WeightFormat format, const std::vector<const uint8_t*>& rows,
                   int64_t k, int leaves, uint8_t* out) {
  CHECK(format != WeightFormat::kNvfp4) << "NVFP4 is packed with its scales ";
  Pack(pool, format, rows, k, leaves, out, [](int64_t, int64_t) { return false; });
}

void PackNvfp4Fragments(ThreadPool* pool, const std::vector<const uint8_t*>& rows,
                        const std::vector<const uint8_t*>& scale_rows, int64_t k, int leaves,
                        uint8_t* codes, uint8_t* scales) {
  CHECK_EQ(rows.size(), scale_rows.size());
  const int64_t n = static_cast<int64_t>(rows.size());
  Pack(pool, WeightFormat::kNvfp4, rows, k, leaves, codes,
       [&](int64_t row, int64_t block) { return (scale_rows[row][block] & 0x7f) == 0; });
  const int64_t leaf_steps = k / 16 / leaves;
  const int64_t run = RunOf(WeightFormat::kNvfp4);
  ForEach(pool, CeilDiv(n, kGroupRows), [&](int64_t group) {
    for (int64_t block = 0; block < leaf_steps * leaves; ++block) {
      uint8_t* base =
          scales + (group * leaves + block / leaf_steps) * leaf_steps * int64_t{kGroupRows};
      const StepPlace place = PlaceOf(block % leaf_steps, leaf_steps, run, 8, 2);
      for (int64_t row = 0; row < kGroupRows; ++row) {
        const int64_t r = group * kGroupRows + row;
        base[place.offset + row % 8 * place.lane_stride + row / 8] =
            r < n ? EncodeScale(scale_rows[r][block]) : uint8_t{0};
      }
    }
  });
}

uint32_t FragmentCode(WeightFormat format, const uint8_t* packed, int64_t k, int leaves,
                      int64_t row, int64_t column) {
  const int64_t step_bytes = StepBytes(format);
  const int64_t leaf_steps = k / 16 / leaves;
  const int64_t step = column / 16;
  const uint8_t* base =
      packed + (row / kGroupRows * leaves + step / leaf_steps) * leaf_steps * kLanes * step_bytes;
  const StepPlace place = PlaceOf(step % leaf_steps, leaf_steps, RunOf(format), kLanes, step_bytes);
  const int64_t r = row % kGroupRows;
  const int64_t c = column % 16;
  const int64_t lane = r % 8 * 4 + c % 8 / 2;
  const CodePlace code =
      CodePlaceOf(format, static_cast<int>(r / 8 + c / 8 * 2), static_cast<int>(c % 2));
  uint32_t word;
  std::memcpy(&word, base + place.offset + lane * place.lane_stride + code.word * 4, 4);
  return Collect(word, code);
}

uint8_t FragmentScale(const uint8_t* packed, int64_t k, int leaves, int64_t row, int64_t block) {
  const int64_t leaf_steps = k / 16 / leaves;
  const StepPlace place =
      PlaceOf(block % leaf_steps, leaf_steps, RunOf(WeightFormat::kNvfp4), 8, 2);
  const int64_t r = row % kGroupRows;
  return DecodeScale(
      packed[(row / kGroupRows * leaves + block / leaf_steps) * leaf_steps * kGroupRows +
             place.offset + r % 8 * place.lane_stride + r / 8]);
}

}  // namespace lockstep
