// The two generation calls as gRPC reactors that are also the engine's sink: GenerateStream (events
// as they come) and GenerateOnce (one answer).
//
// Lifetime: an object is held by the RPC (until the library's OnDone) and by the engine (until the
// sink's OnDone), whichever is longer; so a client that goes away and an engine that goes on never
// meet a dead object. Every decision is taken under the object's mutex; library calls are made
// outside it, by the one thread that took the decision.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "coordinator/generation.h"
#include "coordinator/serving_backend.h"
#include "grpcpp/grpcpp.h"
#include "proto/inference.pb.h"

namespace lockstep {

// How far an answer has come: what the trailers of a failed call tell.
class AnswerProgress {
 public:
  // Numbers the event: per output 1, 2, 3, ...
  void Count(inference::v1::GenerateEvent* event);
  // lockstep-last-sequence (of output 0, 1, ..., comma separated), lockstep-prompt-tokens,
  // lockstep-completion-tokens.
  void AddTrailers(grpc::CallbackServerContext* context) const;

 private:
  std::vector<uint64_t> last_sequence_ = std::vector<uint64_t>(1, 0);
  int64_t prompt_tokens_ = 0;
  int64_t completion_tokens_ = 0;
};

// What becomes of the engine's request when the call ends early: CANCELLED with reason CLIENT, or
// DEADLINE_EXCEEDED when the call's deadline has passed.
absl::Status EarlyEnd(absl::Time deadline);

class GenerateStream final : public grpc::ServerWriteReactor<grpc::ByteBuffer>,
                             public GenerationSink {
 public:
  // More waiting events than this and the deltas of an output are merged.
  static constexpr size_t kMaxWaiting = 256;

  // The stream of a call. Begin or Fail must follow, once.
  static std::shared_ptr<GenerateStream> Create(grpc::CallbackServerContext* context,
                                                ServingBackend* backend);
  void Begin(GenerationSpec spec);
  void Fail(const absl::Status& status);

  // GenerationSink.
  void OnEvent(inference::v1::GenerateEvent event) override;
  void OnDone(const absl::Status& status) override;
  // The library's reactor.
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  enum class Action { kNone, kWrite, kFinish };

  GenerateStream(grpc::CallbackServerContext* context, ServingBackend* backend);
  void Enqueue(inference::v1::GenerateEvent event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Action Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Perform(Action action) ABSL_LOCKS_EXCLUDED(mutex_);

  grpc::CallbackServerContext* const context_;  // valid until Finish
  ServingBackend* const backend_;
  const absl::Time deadline_;
  std::string request_id_;    // set by Begin, before the engine knows the sink
  grpc::ByteBuffer current_;  // the message being written; owned by whoever set writing_

  absl::Mutex mutex_;
  std::shared_ptr<GenerateStream> self_ ABSL_GUARDED_BY(mutex_);  // held by the RPC
  std::deque<inference::v1::GenerateEvent> waiting_ ABSL_GUARDED_BY(mutex_);
  AnswerProgress progress_ ABSL_GUARDED_BY(mutex_);
  absl::Status final_status_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;     // no more events will come
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;  // Finish is called or about to be
  bool submitted_ ABSL_GUARDED_BY(mutex_) = false;
};

class GenerateOnce final : public grpc::ServerUnaryReactor, public GenerationSink {
 public:
  static std::shared_ptr<GenerateOnce> Create(grpc::CallbackServerContext* context,
                                              grpc::ByteBuffer* response, ServingBackend* backend);
  void Begin(GenerationSpec spec);
  void Fail(const absl::Status& status);

  void OnEvent(inference::v1::GenerateEvent event) override;
  void OnDone(const absl::Status& status) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  GenerateOnce(grpc::CallbackServerContext* context, grpc::ByteBuffer* response,
               ServingBackend* backend);
  // Finishes the call unless that was done before.
  void End(const absl::Status& status);

  grpc::CallbackServerContext* const context_;  // valid until Finish
  grpc::ByteBuffer* const response_;            // valid until Finish
  ServingBackend* const backend_;
  const absl::Time deadline_;
  std::string request_id_;

  absl::Mutex mutex_;
  std::shared_ptr<GenerateOnce> self_ ABSL_GUARDED_BY(mutex_);
  inference::v1::GenerateResult result_ ABSL_GUARDED_BY(mutex_);
  AnswerProgress progress_ ABSL_GUARDED_BY(mutex_);
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool submitted_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace lockstep
