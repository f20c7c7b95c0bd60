#include "models/layers/rope.h"

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/status_macros.h"
#include "kernels/runtime/device_memory.h"

namespace lockstep {

absl::StatusOr<RopeConfig> ReadRope(const ModelConfig& model, int64_t head_dim, double partial) {
  RopeConfig c;
  c.theta = model.RopeNumberOr("rope_theta", 10000.0);
  const double factor = model.RopeNumberOr("partial_rotary_factor", partial);
  if (!(factor > 0.0 && factor <= 1.0)) {
    return model.Refuse(absl::StrCat("partial_rotary_factor is ", factor, ", must be in (0, 1]"));
  }
  c.rotary_dim = static_cast<int64_t>(std::lround(factor * static_cast<double>(head_dim)));
  if (c.rotary_dim < 2 || c.rotary_dim % 2 != 0) {
    return model.Refuse(absl::StrCat("partial_rotary_factor gives a rotary width of ", c.rotary_dim,
                                     " for head_dim ", head_dim,
                                     "; it must be even and in [2, head_dim]"));
  }
  if (!(c.theta > 0.0 && std::isfinite(c.theta))) {
    return model.Refuse(absl::StrCat("rope_theta is ", c.theta, ", must be positive and finite"));
  }
  const std::string type = model.RopeStringOr("rope_type", "default");
  if (type == "default") return c;
  if (type != "llama3") return model.Unsupported("rope_type", type, "default, llama3");
  c.llama3 = true;
  c.factor = model.RopeNumberOr("factor", 0.0);
  c.low_frequency = model.RopeNumberOr("low_freq_factor", 0.0);
  c.high_frequency = model.RopeNumberOr("high_freq_factor", 0.0);
  c.original_positions = model.RopeNumberOr("original_max_position_embeddings", 0.0);
  if (!(c.factor > 0.0) || !(c.low_frequency > 0.0) || !(c.high_frequency >= c.low_frequency) ||
      !(c.original_positions > 0.0)) {
    return model.Refuse(absl::StrCat(
        "rope_type llama3 has factor ", c.factor, ", low_freq_factor ", c.low_frequency,
        ", high_freq_factor ", c.high_frequency, ", original_max_position_embeddings ",
        c.original_positions, "; all must be positive and low_freq_factor not above the high one"));
  }
  return c;
}

double RopeFrequency(const RopeConfig& c, int64_t i) {
  const double inv =
      std::pow(c.theta, -2.0 * static_cast<double>(i) / static_cast<double>(c.rotary_dim));
  if (!c.llama3) return inv;
  constexpr double kTwoPi = 6.28318530717958647692;
  const double turns = c.original_positions * inv / kTwoPi;
  if (turns > c.high_frequency) return inv;
  if (turns < c.low_frequency || c.high_frequency == c.low_frequency) return inv / c.factor;
  const double kept = (turns - c.low_frequency) / (c.high_frequency - c.low_frequency);
  return (1.0 - kept) * inv / c.factor + kept * inv;
}

absl::StatusOr<std::shared_ptr<const RopeTable>> RopeTable::Make(DeviceType device,
                                                                 const RopeConfig& config) {
  auto table = std::make_shared<RopeTable>();
  table->size_ = config.rotary_dim / 2;
  ASSIGN_OR_RETURN(table->buffer_, DeviceBuffer::Allocate(device, table->size_ * 4));
  std::vector<float> f;
  for (int64_t i = 0; i < table->size_; ++i) {
    f.push_back(static_cast<float>(RopeFrequency(config, i)));
  }
  RETURN_IF_ERROR(
      CopyBytes(device, table->buffer_.data(), DeviceType::kCpu, f.data(), table->size_ * 4));
  return std::shared_ptr<const RopeTable>(std::move(table));
}

}  // namespace lockstep
