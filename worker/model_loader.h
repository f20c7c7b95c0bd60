// Loading a rank's shard, behind a function so that the service can be tested with any model.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/runtime/counters.h"
#include "models/model.h"
#include "proto/worker.pb.h"

namespace lockstep {

struct LoadSpec {
  std::string path;
  uint64_t expected_digest = 0;  // of the checkpoint; 0: any
  int rank = 0;
  int world = 1;
  ModelOptions options;
  DeviceType device = DeviceType::kCpu;
};

struct LoadedModel {
  std::unique_ptr<Model> model;
  std::shared_ptr<void> resources;     // what the model borrows: destroyed after it
  uint64_t model_digest = 0;           // of the checkpoint
  worker::v1::LoadModelResult result;  // but for identity and seconds
};

using LoadProgressFn = std::function<void(const worker::v1::LoadModelProgress&)>;
using ModelLoader = std::function<absl::StatusOr<LoadedModel>(
    const LoadSpec& spec, Counters* counters, const LoadProgressFn& progress)>;

// The loader of real checkpoints. Errors: those of Checkpoint::Open, LoadModelConfig, LegalTpSizes
// and LoadModel; FailedPrecondition when the digest is another.
absl::StatusOr<LoadedModel> LoadCheckpointModel(const LoadSpec& spec, Counters* counters,
                                                const LoadProgressFn& progress);

}  // namespace lockstep
