#include "coordinator/edge_flags.h"

#include <string>
#include <vector>

#include "CLI/App.hpp"
#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"

namespace lockstep {
namespace {

using ::lockstep::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

absl::StatusOr<EdgeOptions> Parse(std::vector<std::string> arguments,
                                  const std::string& host = "127.0.0.1") {
  CLI::App app;
  EdgeFlags flags;
  flags.AddTo(&app);
  flags.AddWorkerTlsTo(&app);
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
  app.parse(reversed);
  return flags.Options(host);
}

void ExpectRefused(const absl::StatusOr<EdgeOptions>& options, const std::string& flag) {
  EXPECT_THAT(options.status(), StatusIs(absl::StatusCode::kInvalidArgument,
                                         AllOf(HasSubstr(flag), HasSubstr("--insecure-listen"))));
}

TEST(EdgeFlagsTest, NothingIsOpenByDefault) {
  const auto options = Parse({});
  ASSERT_OK(options);
  EXPECT_EQ(options->admin_port, -1);
  EXPECT_EQ(options->metrics_port, -1);
  EXPECT_FALSE(options->tls.any());
}

TEST(EdgeFlagsTest, PlaintextStaysOnThisMachineUnlessThatIsSaid) {
  for (const char* host : {"127.0.0.1", "127.9.9.9", "localhost", "[::1]"}) {
    EXPECT_OK(Parse({}, host)) << host;
  }
  for (const char* host : {"0.0.0.0", "[::]", "10.0.0.1", "example.org"}) {
    ExpectRefused(Parse({}, host), "--host");
    EXPECT_OK(Parse({"--insecure-listen"}, host)) << host;
    EXPECT_OK(Parse({"--tls-cert", "c", "--tls-key", "k"}, host)) << host;
    EXPECT_OK(Parse({"--unix-socket", "/run/lockstep"}, host)) << host;
    ExpectRefused(Parse({"--admin-port", "0", "--admin-host", host}), "--admin-host");
    EXPECT_OK(Parse({"--admin-port", "0", "--admin-host", host, "--tls-cert", "c"})) << host;
    EXPECT_OK(Parse({"--admin-host", host})) << "not opened";
    // Metrics have no TLS.
    ExpectRefused(Parse({"--metrics-port", "0", "--metrics-host", host, "--tls-cert", "c"}),
                  "--metrics-host");
    EXPECT_OK(Parse({"--metrics-port", "0", "--metrics-host", host, "--insecure-listen"})) << host;
  }
}

TEST(EdgeFlagsTest, WorkerLinksAreMutualOrPlain) {
  EXPECT_THAT(Parse({"--worker-tls-cert", "c", "--worker-tls-key", "k"}).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--worker-tls-ca")));
  EXPECT_OK(Parse({"--worker-tls-cert", "c", "--worker-tls-key", "k", "--worker-tls-ca", "a"}));
}

TEST(EdgeFlagsTest, EveryFlagIsListedWithTheValueInEffect) {
  const auto options =
      Parse({"--metrics-port", "0", "--auth-token-file", "/etc/tokens", "--insecure-listen"});
  ASSERT_OK(options);
  EXPECT_EQ(options->flags.at("metrics-port"), "0");
  EXPECT_EQ(options->flags.at("metrics-host"), "127.0.0.1");
  EXPECT_EQ(options->flags.at("auth-token-file"), "/etc/tokens");
  EXPECT_EQ(options->flags.at("insecure-listen"), "true");
  EXPECT_EQ(options->flags.count("help"), 0u);
}

}  // namespace
}  // namespace lockstep
