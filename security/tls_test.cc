// Who talks to whom over TLS, on real sockets.
#include "security/tls.h"

#include <stdlib.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "proto/health.grpc.pb.h"
#include "security/testing/certificates.h"

namespace lockstep {
namespace {

using ::lockstep::testing::PemPair;
using ::lockstep::testing::StatusIs;
using ::lockstep::testing::TestCa;
using ::lockstep::testing::WriteFile;
using ::lockstep::testing::WriteTlsFiles;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kLocal[] = "IP:127.0.0.1,DNS:localhost";

class AlwaysServing : public grpc::health::v1::Health::Service {
  grpc::Status Check(grpc::ServerContext*, const grpc::health::v1::HealthCheckRequest*,
                     grpc::health::v1::HealthCheckResponse* response) override {
    response->set_status(grpc::health::v1::HealthCheckResponse::SERVING);
    return grpc::Status::OK;
  }
};

class TlsTest : public ::testing::Test {
 protected:
  std::string Path(const std::string& name) const {
    return absl::StrCat(::testing::TempDir(), "/", name);
  }
  TlsFiles Files(const std::string& stem, const PemPair& pair, const std::string& ca) const {
    return WriteTlsFiles(Path(stem), pair, ca);
  }
  // A client without a certificate of its own.
  TlsFiles CaOnly(const TestCa& ca) const {
    TlsFiles files;
    files.ca = Path("client-only.ca");
    WriteFile(files.ca, ca.cert());
    return files;
  }
  void StartServer(const TlsFiles& files, const std::string& address = "127.0.0.1:0") {
    auto credentials = MakeServerCredentials(files, "--tls");
    ASSERT_OK(credentials);
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort(address, *credentials, &port);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
    address_ = address[0] == 'u' ? address : absl::StrCat("127.0.0.1:", port);
  }
  // The status of one call over a connection of its own.
  grpc::Status Call(const TlsFiles& files) {
    auto credentials = MakeChannelCredentials(files, "--tls");
    EXPECT_OK(credentials);
    if (!credentials.ok()) return grpc::Status(grpc::StatusCode::UNKNOWN, "no credentials");
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    const auto channel = grpc::CreateCustomChannel(address_, *credentials, arguments);
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(20)));
    grpc::health::v1::HealthCheckResponse response;
    return grpc::health::v1::Health::NewStub(channel)->Check(&context, {}, &response);
  }
  // Until a call gives this code; files are read once a second.
  bool WaitForCode(const TlsFiles& files, grpc::StatusCode code) {
    for (int i = 0; i < 200; ++i) {
      if (Call(files).error_code() == code) return true;
      absl::SleepFor(absl::Milliseconds(100));
    }
    return false;
  }
  void ExpectRefused(const TlsFiles& files) {
    EXPECT_EQ(Call(files).error_code(), grpc::StatusCode::UNAVAILABLE);
  }

  const TestCa ca_{"the CA"};
  const TestCa other_ca_{"another CA"};
  AlwaysServing service_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
};

TEST_F(TlsTest, PlaintextWithoutFiles) {
  StartServer(TlsFiles());
  EXPECT_TRUE(Call(TlsFiles()).ok());
  ExpectRefused(CaOnly(ca_));
}

TEST_F(TlsTest, TheServerIsKnownByItsCertificate) {
  StartServer(Files("server", ca_.Issue(kLocal), ""));
  const grpc::Status status = Call(CaOnly(ca_));
  EXPECT_TRUE(status.ok()) << status.error_message();
  ExpectRefused(TlsFiles());         // plaintext
  ExpectRefused(CaOnly(other_ca_));  // it is not signed by whom the client believes
}

TEST_F(TlsTest, ACertificateOfAnotherHostIsRefused) {
  StartServer(Files("server", ca_.Issue("DNS:worker-7.example,IP:127.0.0.2"), ""));
  ExpectRefused(CaOnly(ca_));
}

TEST_F(TlsTest, AUnixSocketIsNamedLocalhost) {
  // The test's folder makes a longer path than a socket may have.
  char folder[] = "/tmp/tls.XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::string address = absl::StrCat("unix:", folder, "/socket");
  StartServer(Files("server", ca_.Issue("DNS:localhost"), ""), address);
  const grpc::Status status = Call(CaOnly(ca_));
  EXPECT_TRUE(status.ok()) << status.error_message();
  server_->Shutdown();
  StartServer(Files("server", ca_.Issue("DNS:elsewhere"), ""), address);
  ExpectRefused(CaOnly(ca_));
  server_->Shutdown();
  unlink(absl::StrCat(folder, "/socket").c_str());
  EXPECT_EQ(rmdir(folder), 0);
}

TEST_F(TlsTest, MutualTlsAsksForTheClientsCertificate) {
  StartServer(Files("server", ca_.Issue(kLocal), ca_.cert()));
  const grpc::Status status = Call(Files("client", ca_.Issue("DNS:client"), ca_.cert()));
  EXPECT_TRUE(status.ok()) << status.error_message();
  ExpectRefused(TlsFiles());
  ExpectRefused(CaOnly(ca_));                                                   // none
  ExpectRefused(Files("stranger", other_ca_.Issue("DNS:client"), ca_.cert()));  // another CA's
}

// The files of either side are checked when they are read; what expires later is refused by the
// other side.
TEST_F(TlsTest, AnExpiredCertificateIsRefused) {
  const PemPair good = ca_.Issue(kLocal);
  const PemPair expired = ca_.Issue(kLocal, -absl::Minutes(1));
  const TlsFiles files = Files("expired", expired, ca_.cert());
  EXPECT_THAT(MakeServerCredentials(files, "--tls").status(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("--tls-cert"), HasSubstr("has expired"))));
  EXPECT_THAT(MakeChannelCredentials(files, "--tls").status(),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("has expired")));

  const TlsFiles server = Files("server", good, ca_.cert());
  StartServer(server);
  const TlsFiles client = Files("client", ca_.Issue("DNS:client"), ca_.cert());
  EXPECT_TRUE(Call(client).ok());
  WriteFile(server.key, expired.key);
  WriteFile(server.cert, expired.cert);
  EXPECT_TRUE(WaitForCode(client, grpc::StatusCode::UNAVAILABLE));
}

TEST_F(TlsTest, CertificatesAreReplacedWhileTheServerRuns) {
  const TlsFiles server = Files("server", ca_.Issue(kLocal), "");
  StartServer(server);
  EXPECT_TRUE(Call(CaOnly(ca_)).ok());
  const PemPair renewed = other_ca_.Issue(kLocal);
  WriteFile(server.key, renewed.key);
  WriteFile(server.cert, renewed.cert);
  EXPECT_TRUE(WaitForCode(CaOnly(other_ca_), grpc::StatusCode::OK));
  ExpectRefused(CaOnly(ca_));
}

TEST_F(TlsTest, ErrorsSayWhichFileAndWhatIsWrong) {
  const PemPair pair = ca_.Issue(kLocal);
  TlsFiles files = Files("bad", pair, ca_.cert());
  const auto expect = [&](absl::StatusCode code, const std::string& text) {
    EXPECT_THAT(MakeServerCredentials(files, "--tls").status(), StatusIs(code, HasSubstr(text)));
  };
  files.key = Path("nowhere");
  expect(absl::StatusCode::kNotFound, absl::StrCat("--tls-key ", files.key, " cannot be read"));
  files.key = "";
  expect(absl::StatusCode::kInvalidArgument, "--tls-cert and --tls-key belong together");
  files.key = files.cert;
  expect(absl::StatusCode::kInvalidArgument, "has no private key");
  files = Files("bad", pair, ca_.cert());
  WriteFile(files.key, ca_.Issue(kLocal).key);
  expect(absl::StatusCode::kInvalidArgument, "is not the key of the certificate");
  WriteFile(files.ca, "not PEM\n");
  WriteFile(files.key, pair.key);
  expect(absl::StatusCode::kInvalidArgument, absl::StrCat("--tls-ca ", files.ca, " has no cert"));

  files = TlsFiles();
  files.ca = CaOnly(ca_).ca;
  expect(absl::StatusCode::kInvalidArgument, "needs --tls-cert");
  EXPECT_OK(CheckMutual(TlsFiles(), "--worker-tls"));
  EXPECT_THAT(CheckMutual(files, "--worker-tls"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("missing: --worker-tls-cert, --worker-tls-key")));
  files = Files("bad", pair, "");
  EXPECT_THAT(
      MakeChannelCredentials(files, "--worker-tls").status(),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--worker-tls-ca is missing")));
}

}  // namespace
}  // namespace lockstep
