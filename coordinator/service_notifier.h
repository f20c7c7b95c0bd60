// ServiceNotifier: tells a service manager how this process is doing, by the protocol of systemd:
// datagrams to the socket that NOTIFY_SOCKET names. Does nothing without a socket. One thread.
#pragma once

#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace lockstep {

struct NotifyOptions {
  std::string socket;                              // NOTIFY_SOCKET; '@' begins an abstract name
  absl::Duration watchdog = absl::ZeroDuration();  // WATCHDOG_USEC; 0: none is asked for
};

class ServiceNotifier {
 public:
  explicit ServiceNotifier(const NotifyOptions& options) : options_(options) {}

  // Starting takes longer than the manager would wait by itself: not over before `bound` from now.
  void ExtendStart(absl::Duration bound);
  void Ready();
  void Stopping();
  // One line for people; sent when it has changed, and not more often than each second.
  void Status(absl::string_view line, absl::Time now);
  // To be called many times within the watchdog's time; tells that the process is well a few times
  // in it. Not called while it is not well, so that the manager restarts it.
  void Alive(absl::Time now);

 private:
  void Send(absl::string_view message) const;

  const NotifyOptions options_;
  std::string last_status_;
  absl::Time status_sent_ = absl::InfinitePast();
  absl::Time alive_sent_ = absl::InfinitePast();
};

}  // namespace lockstep
