// What a service manager is told over the life of a server, by its own protocol.
#include "coordinator/serve_loop.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "coordinator/group/fake_worker_service.h"
#include "coordinator/service_notifier.h"
#include "gmock/gmock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "proto/inference.grpc.pb.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::StartsWith;

// The manager's end of the socket.
class Manager {
 public:
  explicit Manager(bool abstract = false) {
    EXPECT_NE(mkdtemp(folder_), nullptr);
    name_ = absl::StrCat(abstract ? "@" : "", folder_, "/notify");
    fd_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    memcpy(address.sun_path, name_.data(), name_.size());
    if (abstract) address.sun_path[0] = '\0';
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name_.size());
    EXPECT_EQ(bind(fd_, reinterpret_cast<sockaddr*>(&address), size), 0);
    const timeval patience = {30, 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  }
  ~Manager() {
    close(fd_);
    unlink(name_.c_str());
    rmdir(folder_);
  }
  const std::string& name() const { return name_; }
  // The next message; "" when none comes.
  std::string Next() {
    char buffer[1024];
    const ssize_t size = recv(fd_, buffer, sizeof(buffer), 0);
    return size < 0 ? "" : std::string(buffer, static_cast<size_t>(size));
  }
  // Up to a message that begins so; "" when none comes.
  std::string Until(const std::string& beginning) {
    std::string message;
    do {
      message = Next();
      seen_.push_back(message);
    } while (!message.empty() && !absl::StartsWith(message, beginning));
    return message;
  }
  const std::vector<std::string>& seen() const { return seen_; }

 private:
  char folder_[32] = "/tmp/notify.XXXXXX";
  std::string name_;
  int fd_ = -1;
  std::vector<std::string> seen_;
};

TEST(ServiceNotifierTest, SpeaksTheProtocol) {
  for (const bool abstract : {false, true}) {
    Manager manager(abstract);
    NotifyOptions options;
    options.socket = manager.name();
    options.watchdog = absl::Seconds(3);
    ServiceNotifier notifier(options);
    absl::Time now = absl::UnixEpoch();
    notifier.ExtendStart(absl::Seconds(30));
    notifier.Status("loading\nrank 0", now);
    notifier.Status("loading more", now + absl::Milliseconds(500));  // too early
    notifier.Status("loading\nrank 0", now + absl::Seconds(2));      // the same
    notifier.Status("loaded", now + absl::Seconds(2));
    notifier.Ready();
    notifier.Alive(now);
    notifier.Alive(now + absl::Milliseconds(900));  // a third of the time is enough
    notifier.Alive(now + absl::Milliseconds(1000));
    notifier.Stopping();
    std::vector<std::string> got;
    for (int i = 0; i < 7; ++i) got.push_back(manager.Next());
    EXPECT_THAT(
        got, ElementsAre("EXTEND_TIMEOUT_USEC=30000000", "STATUS=loading rank 0", "STATUS=loaded",
                         "READY=1", "WATCHDOG=1", "WATCHDOG=1", "STOPPING=1"));
  }
}

TEST(ServiceNotifierTest, NobodyToTellIsNoError) {
  NotifyOptions nobody;
  ServiceNotifier(nobody).Ready();
  nobody.socket = "/nowhere/notify";
  ServiceNotifier(nobody).Ready();
}

TEST(ServeLoopTest, AServiceManagerFollowsTheServersLife) {
  Manager manager;
  FakeWorkerFaults slow;
  slow.load_time = absl::Milliseconds(700);
  FakeWorker worker(slow);
  CoordinatorOptions options;
  options.workers = {worker.Start()};
  options.model_path = ::testing::TempDir();
  options.port = 0;
  ServeLoopOptions loop;
  loop.notify.socket = manager.name();
  loop.notify.watchdog = absl::Milliseconds(300);
  int exit_code = -1;
  std::thread server([&]() { exit_code = RunServer(options, loop); });
  EXPECT_EQ(manager.Until("READY=1"), "READY=1");
  EXPECT_THAT(manager.seen(), ::testing::Contains(StartsWith("EXTEND_TIMEOUT_USEC=")));
  EXPECT_THAT(manager.seen(), ::testing::Contains(StartsWith("STATUS=the model is loading")));
  EXPECT_THAT(manager.seen(), ::testing::Contains("WATCHDOG=1")) << "a long load is alive";
  EXPECT_THAT(manager.Until("STATUS=ready"),
              AllOf(StartsWith("STATUS=ready; requests: 0 running")));
  EXPECT_EQ(manager.Until("WATCHDOG=1"), "WATCHDOG=1");
  ASSERT_EQ(kill(getpid(), SIGTERM), 0);
  EXPECT_EQ(manager.Until("STOPPING=1"), "STOPPING=1");
  server.join();
  EXPECT_EQ(exit_code, 0);
}

// It goes on answering, with the cause, and its end is no success.
TEST(ServeLoopTest, AServerThatGaveUpItsWorkersStaysAndEndsWithOne) {
  FakeWorkerFaults faults;
  faults.refuse_step = 1;
  FakeWorker worker(faults);
  CoordinatorOptions options;
  options.workers = {worker.Start()};
  options.model_path = ::testing::TempDir();
  options.port = 0;
  options.group.recovery_budget = 0;
  ServeLoopOptions loop;
  Manager manager;
  loop.notify.socket = manager.name();
  loop.address_file = absl::StrCat(::testing::TempDir(), "/address");
  int exit_code = -1;
  std::thread server([&]() { exit_code = RunServer(options, loop); });
  EXPECT_EQ(manager.Until("READY=1"), "READY=1");
  std::string address;
  std::ifstream(loop.address_file) >> address;
  const auto stub = inference::v1::InferenceService::NewStub(
      grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  for (int i = 0; i < 2; ++i) {
    grpc::ClientContext context;
    inference::v1::GenerateRequest request;
    request.mutable_token_ids()->add_ids(1);
    inference::v1::GenerateResult result;
    EXPECT_EQ(stub->GenerateOnce(&context, request, &result).error_code(),
              grpc::StatusCode::ABORTED);
  }
  ASSERT_EQ(kill(getpid(), SIGTERM), 0);
  server.join();
  EXPECT_EQ(exit_code, 1);
}

}  // namespace
}  // namespace lockstep

// The signals must be blocked before any thread exists.
int main(int argc, char** argv) {
  lockstep::BlockStopSignals();
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
