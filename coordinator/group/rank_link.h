// RankLink: one worker process as the group sees it. Every method returns at once; what comes of it
// arrives as RankEvents, in the order in which it happened on the link, at the sink that the link
// was made with. The real one speaks gRPC (grpc_rank_link.h); simulations have their own.
//
// A link belongs to one thread. Its sink may be called from any thread until the link is destroyed,
// and never after.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/variant.h"
#include "proto/worker.pb.h"

namespace lockstep {

using RankRequest = absl::variant<worker::v1::GetInfoRequest, worker::v1::LoadModelRequest,
                                  worker::v1::PrepareCommRequest, worker::v1::InitCommRequest,
                                  worker::v1::ConfigureRequest, worker::v1::AbortCommRequest,
                                  worker::v1::HealthRequest>;

// A process of this machine that ended or was started.
struct ProcessExit {
  std::string outcome;     // "signal 9 (Killed)", "exit code 3"
  bool own_doing = false;  // by its own fault, not by a signal from outside
};
struct ProcessStart {
  std::string address;  // empty when it failed; then `status` of the event says why
};

struct RankEvent {
  enum class Kind {
    kAnswer,          // a call ended: `status`, and its response in `payload` when OK
    kProgress,        // of LoadModel: LoadModelProgress
    kStepResult,      // StepResult
    kStreamEnded,     // `status`: OK when the worker ended it
    kProcessExited,   // ProcessExit
    kProcessStarted,  // ProcessStart
  };
  int32_t link = 0;  // as given to the factory
  uint64_t id = 0;   // of the call or stream
  Kind kind = Kind::kAnswer;
  absl::Status status;
  absl::variant<absl::monostate, worker::v1::GetInfoResponse, worker::v1::LoadModelProgress,
                worker::v1::LoadModelResult, worker::v1::PrepareCommResponse,
                worker::v1::InitCommResponse, worker::v1::ConfigureResponse,
                worker::v1::AbortCommResponse, worker::v1::HealthResponse, worker::v1::StepResult,
                ProcessExit, ProcessStart>
      payload;
};

class RankLink {
 public:
  // Cancels what is open.
  virtual ~RankLink() = default;

  // Begins a call; exactly one kAnswer with this id follows unless the link is destroyed before.
  // `timeout` infinite: none. LoadModel: the payload of the answer is a LoadModelResult.
  virtual void Call(uint64_t id, const RankRequest& request, absl::Duration timeout) = 0;
  // Cancels the calls that are open; each still ends with an answer.
  virtual void CancelCalls() = 0;

  // One step stream at a time; exactly one kStreamEnded with this id follows.
  virtual void OpenStream(uint64_t id) = 0;
  virtual void Write(uint64_t id, const worker::v1::StepRequest& request) = 0;
  // `orderly`: no more steps come, what runs may end. Otherwise it is cut.
  virtual void CloseStream(uint64_t id, bool orderly) = 0;
};

using RankEventSink = std::function<void(RankEvent)>;
// `link` is the id that its events carry.
using RankLinkFactory =
    std::function<std::unique_ptr<RankLink>(const std::string& address, int32_t link)>;

// WorkerLauncher: the processes of this machine that the coordinator may start and end. Methods
// return at once and belong to the group's thread.
class WorkerLauncher {
 public:
  virtual ~WorkerLauncher() = default;
  // From now on the end of the process behind `address` is reported, once, as kProcessExited for
  // `link`; at once when it has ended. False when it is not a process of this launcher.
  virtual bool Watch(const std::string& address, int32_t link) = 0;
  // Ends the process behind `address` at once and for good (SIGKILL). False as above.
  virtual bool Kill(const std::string& address) = 0;
  // Starts a process in place of the one behind `address`, which has ended or is ended first. A
  // kProcessStarted for `link` follows, and its end is watched for `link`. False as above.
  virtual bool Restart(const std::string& address, int32_t link) = 0;
};

}  // namespace lockstep
