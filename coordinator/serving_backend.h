// ServingBackend: what the public services need from the process that serves. The coordinator is
// the real one; tests use a fake.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "coordinator/generation.h"
#include "coordinator/served_model.h"
#include "proto/model.pb.h"

namespace lockstep {

enum class CancelResult { kCancelled, kAlreadyFinished, kNotFound };

// Thread safe. No method waits for a step or for loading.
class ServingBackend {
 public:
  virtual ~ServingBackend() = default;

  // The model that is served. UNAVAILABLE MODEL_LOADING (with progress) before it is loaded, and
  // UNAVAILABLE ENGINE_FAILED when loading failed.
  virtual absl::StatusOr<std::shared_ptr<const ServedModel>> Model() const = 0;
  // OK when a step can run and new requests are taken.
  virtual absl::Status Ready() const = 0;

  // As Engine::Submit.
  virtual absl::Status Submit(GenerationSpec spec, std::shared_ptr<GenerationSink> sink) = 0;
  // Ends a request with `status`. Idempotent.
  virtual CancelResult Cancel(const std::string& request_id, const absl::Status& status) = 0;

  virtual inference::v1::ServerStatus Status() const = 0;
};

}  // namespace lockstep
