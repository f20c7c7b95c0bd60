// ServiceNotifier: see service_notifier.h.
#include "coordinator/service_notifier.h"

#include <errno.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/base/log.h"

namespace lockstep {
namespace {

constexpr absl::Duration kStatusPeriod = absl::Seconds(1);
// Of the watchdog's time.
constexpr int kSignsOfLife = 3;

}  // namespace

void ServiceNotifier::Send(absl::string_view message) const {
  if (options_.socket.empty()) return;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::string& name = options_.socket;
  if (name.size() >= sizeof(address.sun_path)) {
    LogWarning("the notify socket's name is too long: ", name);
    return;
  }
  memcpy(address.sun_path, name.data(), name.size());
  if (name[0] == '@') address.sun_path[0] = '\0';
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
  const bool sent =
      fd >= 0 && sendto(fd, message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT,
                        reinterpret_cast<const sockaddr*>(&address), size) >= 0;
  if (!sent) LogWarning("the service manager at ", name, " cannot be told: ", strerror(errno));
  if (fd >= 0) close(fd);
}

void ServiceNotifier::ExtendStart(absl::Duration bound) {
  Send(absl::StrCat("EXTEND_TIMEOUT_USEC=", absl::ToInt64Microseconds(bound)));
}

void ServiceNotifier::Ready() { Send("READY=1"); }
void ServiceNotifier::Stopping() { Send("STOPPING=1"); }

void ServiceNotifier::Status(absl::string_view line, absl::Time now) {
  if (line == last_status_ || now - status_sent_ < kStatusPeriod) return;
  last_status_ = std::string(line);
  status_sent_ = now;
  std::string text = absl::StrCat("STATUS=", line);
  std::replace(text.begin(), text.end(), '\n', ' ');
  Send(text);
}

void ServiceNotifier::Alive(absl::Time now) {
  if (options_.watchdog <= absl::ZeroDuration()) return;
  if (now - alive_sent_ < options_.watchdog / kSignsOfLife) return;
  alive_sent_ = now;
  Send("WATCHDOG=1");
}

}  // namespace lockstep
