// What every program of --config=tsan links: how the packaged Abseil and gRPC hand memory from
// thread to thread, told to ThreadSanitizer.
//
// The sanitizer sees what is ordered by pthreads and by atomics of code that it has instrumented.
// The packages are not instrumented, and the locks of Abseil wait on futexes, so it sees neither
// absl::Mutex, ours included, nor how a call moves between the threads of gRPC. It would report the
// memory that moves: our reactors, and gRPC's own tags, whose code is inline in its headers.
//
// The functions below are those of the packages where such an order is made. They are defined again
// in the program, where the loader finds them first, for calls out of the packages too; each calls
// the package's own and states the order that this one makes, no more. Nothing is suppressed: a
// race that none of these prevents is reported, in code of ours and in inline code of the packages.
//
// Written for Abseil 20220623 and gRPC 1.51. A function that another version does not have is never
// called; one that is new there shows as a report.
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include <atomic>
#include <cstdlib>
#include <string>

#include "absl/base/config.h"
#include "absl/synchronization/mutex.h"
#include "grpcpp/support/server_callback.h"

#define LOCKSTEP_STRING_OF(x) #x
#define LOCKSTEP_STRING(x) LOCKSTEP_STRING_OF(x)

namespace {

// The package's definition of a function.
template <typename Function>
Function Package(const std::string& mangled) {
  void* found = dlsym(RTLD_NEXT, mangled.c_str());
  if (found == nullptr) abort();
  return reinterpret_cast<Function>(found);
}

// Likewise, of namespace absl; `name` is mangled and follows the inline namespace.
template <typename Function>
Function Absl(const std::string& name) {
  const std::string version = LOCKSTEP_STRING(ABSL_OPTION_INLINE_NAMESPACE_NAME);
  return Package<Function>("_ZN4absl" + std::to_string(version.size()) + version + name);
}

}  // namespace

// ---- absl::Mutex: whoever gets the lock sees all that happened before it was given up. Waiting
// for an absl::Condition is not covered, because the package evaluates it with the lock taken by
// itself: wait with a condition variable.

namespace absl {
ABSL_NAMESPACE_BEGIN

void Mutex::Lock() {
  static const auto package = Absl<void (*)(Mutex*)>("5Mutex4LockEv");
  package(this);
  __tsan_acquire(this);
}

bool Mutex::TryLock() {
  static const auto package = Absl<bool (*)(Mutex*)>("5Mutex7TryLockEv");
  if (!package(this)) return false;
  __tsan_acquire(this);
  return true;
}

void Mutex::Unlock() {
  static const auto package = Absl<void (*)(Mutex*)>("5Mutex6UnlockEv");
  __tsan_release(this);
  package(this);
}

// Waiting gives up the lock and takes it again.
void CondVar::Wait(Mutex* mutex) {
  static const auto package = Absl<void (*)(CondVar*, Mutex*)>("7CondVar4WaitEPNS0_5MutexE");
  __tsan_release(mutex);
  package(this, mutex);
  __tsan_acquire(mutex);
}

bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  static const auto package = Absl<bool (*)(CondVar*, Mutex*, Duration)>(
      "7CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE");
  __tsan_release(mutex);
  const bool expired = package(this, mutex, timeout);
  __tsan_acquire(mutex);
  return expired;
}

bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  static const auto package =
      Absl<bool (*)(CondVar*, Mutex*, Time)>("7CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE");
  __tsan_release(mutex);
  const bool expired = package(this, mutex, deadline);
  __tsan_acquire(mutex);
  return expired;
}

ABSL_NAMESPACE_END
}  // namespace absl

// ---- grpc_core::MultiProducerSingleConsumerQueue, which carries the work of a call from the
// thread that starts it to the one that does it: whoever takes a node sees all that happened before
// it was put in. (Push exchanges the head with acquire and release and stores the link with
// release; Pop loads it with acquire.) The class is not in the installed headers.

#define LOCKSTEP_QUEUE "_ZN9grpc_core32MultiProducerSingleConsumerQueue"

extern "C" bool LockstepQueuePush(void* queue, void* node) asm(LOCKSTEP_QUEUE "4PushEPNS0_4NodeE");
extern "C" void* LockstepQueuePop(void* queue) asm(LOCKSTEP_QUEUE "3PopEv");
extern "C" void* LockstepQueuePopAndCheckEnd(void* queue,
                                             bool* is_empty) asm(LOCKSTEP_QUEUE
                                                                 "14PopAndCheckEndEPb");

bool LockstepQueuePush(void* queue, void* node) {
  static const auto package = Package<bool (*)(void*, void*)>(LOCKSTEP_QUEUE "4PushEPNS0_4NodeE");
  __tsan_release(node);
  return package(queue, node);
}

void* LockstepQueuePop(void* queue) {
  static const auto package = Package<void* (*)(void*)>(LOCKSTEP_QUEUE "3PopEv");
  void* node = package(queue);
  if (node != nullptr) __tsan_acquire(node);
  return node;
}

void* LockstepQueuePopAndCheckEnd(void* queue, bool* is_empty) {
  static const auto package =
      Package<void* (*)(void*, bool*)>(LOCKSTEP_QUEUE "14PopAndCheckEndEPb");
  void* node = package(queue, is_empty);
  if (node != nullptr) __tsan_acquire(node);
  return node;
}

// ---- The counters of a server call: OnDone comes after everything that still held the call, and
// OnCancel after the method has returned. Counting down (acquire and release) is inline, in part in
// code of the package; whoever counts to the end calls one of these. Loading the counter once more
// acquires what the instrumented part has released.

namespace grpc {
namespace internal {

void ServerCallbackCall::ScheduleOnDone(bool inline_ondone) {
  static const auto package = Package<void (*)(ServerCallbackCall*, bool)>(
      "_ZN4grpc8internal18ServerCallbackCall14ScheduleOnDoneEb");
  callbacks_outstanding_.load(std::memory_order_acquire);
  package(this, inline_ondone);
}

void ServerCallbackCall::CallOnCancel(ServerReactor* reactor) {
  static const auto package = Package<void (*)(ServerCallbackCall*, ServerReactor*)>(
      "_ZN4grpc8internal18ServerCallbackCall12CallOnCancelEPNS0_13ServerReactorE");
  on_cancel_conditions_remaining_.load(std::memory_order_acquire);
  package(this, reactor);
}

}  // namespace internal
}  // namespace grpc
