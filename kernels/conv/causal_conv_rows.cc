// The causal convolution of one sequence over a block of channels: lanes are channels, taps ascend
// from the bias.
#include "kernels/conv/causal_conv_rows.h"

#include <cstring>

#include "kernels/base/simd_math.h"

namespace lockstep {
namespace LOCKSTEP_ISA {
namespace {

// The last `width` raw inputs of the unit's channels as floats, in a ring of rows; lanes past the
// last channel are zero.
struct Window {
  float rows[kMaxConvWidth][kConvChannels];
  int64_t width;
  int64_t next = 0;  // ring row that the next input takes, which is also the oldest one

  // Row `age` of the window, 0 the oldest.
  float* Oldest(int64_t age) {
    const int64_t row = next + age;
    return rows[row < width ? row : row - width];
  }
};

template <typename Act>
void LoadRow(const Act* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) Store(to + i, LoadAs(from + i));
  for (; i < count; ++i) to[i] = ToFloat(from[i]);
}

template <typename Act>
void StoreRow(const float* from, int64_t count, Act* to) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) StoreAs(to + i, Load(from + i));
  for (; i < count; ++i) to[i] = FromFloat<Act>(from[i]);
}

// taps[j][c] = weight[c * width + j]
template <typename Weight>
void LoadTaps(const Weight* weight, int64_t width, int64_t count, float (*taps)[kConvChannels]) {
  if (width == 4) {  // the usual width, as a loop that the compiler knows how to vectorize
    for (int64_t c = 0; c < count; ++c) {
      taps[0][c] = ToFloat(weight[4 * c]);
      taps[1][c] = ToFloat(weight[4 * c + 1]);
      taps[2][c] = ToFloat(weight[4 * c + 2]);
      taps[3][c] = ToFloat(weight[4 * c + 3]);
    }
    return;
  }
  for (int64_t c = 0; c < count; ++c) {
    for (int64_t j = 0; j < width; ++j) taps[j][c] = ToFloat(weight[c * width + j]);
  }
}

// Writes the newest width - 1 inputs as a history.
template <typename Act>
void StoreHistory(Window* window, Act* history, int64_t channels, int64_t count) {
  for (int64_t i = 0; i + 1 < window->width; ++i) {
    StoreRow(window->Oldest(i + 1), count, history + i * channels);
  }
}

template <typename Act, typename Weight>
void Run(const ConvProblem& p, int64_t sequence, int64_t begin, int64_t count) {
  const BatchRows& batch = p.batch;
  float taps[kMaxConvWidth][kConvChannels] = {};
  const Weight* weight = static_cast<const Weight*>(p.weight) + begin * p.width;
  LoadTaps(weight, p.width, count, taps);
  float bias[kConvChannels] = {};
  for (int64_t c = 0; p.bias != nullptr && c < count; ++c) {
    bias[c] = p.bias_bf16 ? ToFloat(static_cast<const BF16*>(p.bias)[begin + c])
                          : static_cast<const float*>(p.bias)[begin + c];
  }
  const int64_t history_size = (p.width - 1) * p.channels;
  Act* history = static_cast<Act*>(p.conv) + batch.slots[sequence] * history_size + begin;
  int64_t position = batch.start_positions[sequence];
  Window window;
  std::memset(window.rows, 0, sizeof window.rows);
  window.width = p.width;
  if (position > 0) {
    for (int64_t i = 0; i + 1 < p.width; ++i) {
      LoadRow(history + i * p.channels, count, window.rows[i + 1]);
    }
  }
  const int64_t lanes = (count + 15) / 16 * 16;
  for (int64_t t = batch.row_offsets[sequence]; t < batch.row_offsets[sequence + 1]; ++t) {
    LoadRow(static_cast<const Act*>(p.x) + t * p.x_stride + begin, count, window.rows[window.next]);
    window.next = window.next + 1 < p.width ? window.next + 1 : 0;
    ++position;
    float y[kConvChannels];
    for (int64_t c = 0; c < lanes; c += 16) {
      F32x16 sum = Load(bias + c);
      for (int64_t j = 0; j < p.width; ++j) {
        sum = Fma(Load(taps[j] + c), Load(window.Oldest(j) + c), sum);
      }
      Store(y + c, SiluOf(sum));
    }
    StoreRow(y, count, static_cast<Act*>(p.y) + t * p.y_stride + begin);
    for (int64_t s = 0; s < batch.num_snapshots; ++s) {
      if (batch.snapshot_sequence[s] == sequence && batch.snapshot_position[s] == position) {
        StoreHistory(
            &window,
            static_cast<Act*>(p.conv_snapshot) + batch.snapshot_slot[s] * history_size + begin,
            p.channels, count);
      }
    }
  }
  StoreHistory(&window, history, p.channels, count);
}

}  // namespace

void ConvUnit(const ConvProblem& p, int64_t sequence, int64_t begin, int64_t count) {
  if (p.bf16) {
    p.weight_bf16 ? Run<BF16, BF16>(p, sequence, begin, count)
                  : Run<BF16, float>(p, sequence, begin, count);
  } else {
    p.weight_bf16 ? Run<float, BF16>(p, sequence, begin, count)
                  : Run<float, float>(p, sequence, begin, count);
  }
}

}  // namespace LOCKSTEP_ISA
}  // namespace lockstep
