// Rotary position embedding: the frequencies as config.json describes them, and their table.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/base/tensor_view.h"
#include "kernels/runtime/device_buffer.h"
#include "models/model_config.h"

namespace lockstep {

struct RopeConfig {
  int64_t rotary_dim = 0;  // R; pairs are (i, i + R / 2)
  double theta = 10000.0;
  // rope_type "llama3": wavelengths above original / low_frequency are stretched by `factor`, those
  // below original / high_frequency are kept, those between are interpolated.
  bool llama3 = false;
  double factor = 1.0;
  double low_frequency = 1.0;
  double high_frequency = 1.0;
  double original_positions = 0.0;
};

// `partial` is partial_rotary_factor where the config has none. InvalidArgument names an impossible
// number, Unimplemented an unknown rope_type.
absl::StatusOr<RopeConfig> ReadRope(const ModelConfig& model, int64_t head_dim, double partial);

// inv_freq F32 [R / 2], shared by the layers of a model. Source of llama3: models-*.md section 4.
class RopeTable {
 public:
  static absl::StatusOr<std::shared_ptr<const RopeTable>> Make(DeviceType device,
                                                               const RopeConfig& config);
  TensorView inv_freq() const { return buffer_.View(DType::kF32, {size_}); }

 private:
  DeviceBuffer buffer_;
  int64_t size_ = 0;
};

// One frequency: inv_freq[i].
double RopeFrequency(const RopeConfig& config, int64_t i);

}  // namespace lockstep
