// The calls that give a generation, as gRPC reactors that read its log: GenerateStream (Generate
// and AttachGeneration: events as they come) and GenerateOnce (one answer).
//
// Lifetime: an object is held by the RPC (until the library's OnDone) and by the table (until
// Leave), whichever is longer; the log only has weak references. So a client that goes away and an
// engine that goes on never meet a dead object. Every decision is taken under the object's mutex;
// library and table are called outside it, by the one thread that took the decision.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "coordinator/generation.h"
#include "coordinator/generation_log.h"
#include "coordinator/generation_table.h"
#include "grpcpp/grpcpp.h"
#include "proto/inference.pb.h"

namespace lockstep {

// What becomes of the engine's request when the call ends early: CANCELLED with reason CLIENT, or
// DEADLINE_EXCEEDED when the call's deadline has passed.
absl::Status EarlyEnd(absl::Time deadline);

class GenerateStream final : public grpc::ServerWriteReactor<grpc::ByteBuffer>,
                             public GenerationReader {
 public:
  // A write that waits is slow when more than this waits behind it.
  static constexpr int64_t kMaxWaiting = 256;
  static constexpr int64_t kMaxWaitingBytes = 256 << 10;

  // The stream of a call. Begin, Attach or Fail must follow, once.
  static std::shared_ptr<GenerateStream> Create(grpc::CallbackServerContext* context,
                                                GenerationTable* table);
  void Begin(GenerationSpec spec);
  void Attach(const inference::v1::AttachGenerationRequest& request);
  void Fail(const absl::Status& status);

  // GenerationReader.
  void OnNews() override;
  void OnTick(absl::Time now) override;
  // The library's reactor.
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  enum class Action { kNone, kWrite, kFinish };

  GenerateStream(grpc::CallbackServerContext* context, GenerationTable* table);
  std::shared_ptr<GenerateStream> Self() ABSL_LOCKS_EXCLUDED(mutex_);
  // Submits spec_, or waits for the end of the request that still has its id.
  void Join() ABSL_LOCKS_EXCLUDED(mutex_);
  // The place in the table is had: reads from there.
  void Read(std::shared_ptr<GenerationLog> log, std::vector<uint64_t> after)
      ABSL_LOCKS_EXCLUDED(mutex_);
  Action Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Perform(Action action) ABSL_LOCKS_EXCLUDED(mutex_);
  void Advance() ABSL_LOCKS_EXCLUDED(mutex_);

  grpc::CallbackServerContext* const context_;  // valid until Finish
  GenerationTable* const table_;
  const absl::Time deadline_;
  GenerationSpec spec_;       // what Join submits; of the one thread that joins
  grpc::ByteBuffer current_;  // the message being written; owned by whoever set writing_

  absl::Mutex mutex_;
  std::shared_ptr<GenerateStream> self_ ABSL_GUARDED_BY(mutex_);  // held by the RPC
  std::shared_ptr<GenerationLog> log_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<GenerationLog::Reader> reader_ ABSL_GUARDED_BY(mutex_);
  // The log of a request that is being cancelled: Join again when it has ended.
  std::shared_ptr<GenerationLog> ending_ ABSL_GUARDED_BY(mutex_);
  absl::Time write_started_ ABSL_GUARDED_BY(mutex_);
  // Why the call ends before its log does.
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  absl::Status final_status_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;  // Finish is called or about to be
};

class GenerateOnce final : public grpc::ServerUnaryReactor, public GenerationReader {
 public:
  static std::shared_ptr<GenerateOnce> Create(grpc::CallbackServerContext* context,
                                              grpc::ByteBuffer* response, GenerationTable* table);
  void Begin(GenerationSpec spec);
  void Fail(const absl::Status& status);

  void OnNews() override;
  void OnTick(absl::Time now) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  GenerateOnce(grpc::CallbackServerContext* context, grpc::ByteBuffer* response,
               GenerationTable* table);
  std::shared_ptr<GenerateOnce> Self() ABSL_LOCKS_EXCLUDED(mutex_);
  void Join() ABSL_LOCKS_EXCLUDED(mutex_);
  // Finishes the call unless that was done before.
  void End(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);

  grpc::CallbackServerContext* const context_;  // valid until Finish
  grpc::ByteBuffer* const response_;            // valid until Finish
  GenerationTable* const table_;
  const absl::Time deadline_;
  GenerationSpec spec_;  // of the one thread that joins

  absl::Mutex mutex_;
  std::shared_ptr<GenerateOnce> self_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<GenerationLog> log_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<GenerationLog> ending_ ABSL_GUARDED_BY(mutex_);
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace lockstep
