// Who may call the public port: tokens, TLS, unix sockets.
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "coordinator/fake_serving_backend.h"
#include "coordinator/listener.h"
#include "coordinator/public_server.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "models/tokenizer/fake_tokenizer.h"
#include "proto/error_details.pb.h"
#include "proto/health.grpc.pb.h"
#include "proto/inference.grpc.pb.h"
#include "proto/model.grpc.pb.h"
#include "security/testing/certificates.h"
#include "security/tls.h"

namespace lockstep {
namespace {

using ::lockstep::testing::StatusIs;
using ::lockstep::testing::TestCa;
using ::lockstep::testing::WriteFile;
using ::lockstep::testing::WriteTlsFiles;
using ::testing::AllOf;
using ::testing::HasSubstr;

class PublicServerSecurityTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto model = std::make_shared<ServedModel>();
    model->name = "tiny";
    model->vocab_size = 300;
    model->max_context = 4096;
    model->tokenizer = std::make_shared<FakeTokenizer>();
    backend_.SetModel(std::shared_ptr<const ServedModel>(model));
    backend_.SetAutoTokens(1);
    options_.address = "127.0.0.1:0";
  }
  std::string Path(const std::string& name) const {
    return absl::StrCat(::testing::TempDir(), "/", name);
  }
  void Start() {
    auto server = PublicServer::Start(options_, &backend_);
    ASSERT_OK(server);
    server_ = *std::move(server);
    Connect(grpc::InsecureChannelCredentials());
  }
  void Connect(const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    channel_ = grpc::CreateCustomChannel(
        server_->port() == 0 ? options_.address : absl::StrCat("127.0.0.1:", server_->port()),
        credentials, arguments);
  }
  grpc::Status GetStatus(const std::vector<std::string>& authorization) {
    grpc::ClientContext context;
    for (const std::string& value : authorization) context.AddMetadata("authorization", value);
    inference::v1::ServerStatus response;
    return inference::v1::ModelService::NewStub(channel_)->GetServerStatus(&context, {}, &response);
  }
  // One call of any method with an empty message.
  grpc::Status CallRaw(const std::string& method) {
    grpc::GenericStub stub(channel_);
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(20)));
    grpc::CompletionQueue queue;
    const grpc::Slice nothing("");
    const grpc::ByteBuffer request(&nothing, 1);
    grpc::ByteBuffer response;
    grpc::Status status;
    auto call = stub.PrepareUnaryCall(&context, method, request, &queue);
    call->StartCall();
    call->Finish(&response, &status, &status);
    void* tag = nullptr;
    bool ok = false;
    EXPECT_TRUE(queue.Next(&tag, &ok) && ok && tag == &status);
    return status;
  }
  static std::string Reason(const grpc::Status& status) {
    google::rpc::Status wire;
    google::rpc::ErrorInfo info;
    if (!wire.ParseFromString(status.error_details()) || wire.details().empty()) return "";
    return wire.details(0).UnpackTo(&info) ? info.reason() : "";
  }
  void ExpectRefused(const grpc::Status& status, const std::string& reason) {
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << status.error_message();
    EXPECT_EQ(Reason(status), reason);
  }

  FakeServingBackend backend_;
  ListenOptions options_;
  std::unique_ptr<PublicServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(PublicServerSecurityTest, TokensAreChecked) {
  options_.token_file = Path("tokens");
  WriteFile(options_.token_file, "secret-one\nsecret-two\n");
  Start();
  ExpectRefused(GetStatus({}), "TOKEN_MISSING");
  for (const char* bad : {"Bearer secret-on", "Bearer ", "secret-one", "Basic secret-one",
                          "bearer secret-one", "Bearer secret-one "}) {
    ExpectRefused(GetStatus({bad}), "TOKEN_INVALID");
  }
  ExpectRefused(GetStatus({"Bearer secret-one", "Bearer secret-two"}), "TOKEN_INVALID");
  EXPECT_EQ(GetStatus({"Bearer wrong"}).error_message().find("wrong"), std::string::npos);
  EXPECT_TRUE(GetStatus({"Bearer secret-one"}).ok());
  EXPECT_TRUE(GetStatus({"Bearer secret-two"}).ok());
  // Rotated while the server runs.
  WriteFile(options_.token_file, "secret-three\n");
  ExpectRefused(GetStatus({"Bearer secret-one"}), "TOKEN_INVALID");
  EXPECT_TRUE(GetStatus({"Bearer secret-three"}).ok());
}

// Of every method that the services have, those of tomorrow too.
TEST_F(PublicServerSecurityTest, NoMethodButHealthIsOpenWithoutAToken) {
  options_.token_file = Path("tokens");
  WriteFile(options_.token_file, "secret\n");
  Start();
  server_->SetReady(true);
  int methods = 0;
  for (const auto* message : {inference::v1::GenerateRequest::descriptor(),
                              inference::v1::GetModelRequest::descriptor()}) {
    const auto* file = message->file();
    for (int s = 0; s < file->service_count(); ++s) {
      for (int m = 0; m < file->service(s)->method_count(); ++m) {
        const auto* method = file->service(s)->method(m);
        const std::string path =
            absl::StrCat("/", file->service(s)->full_name(), "/", method->name());
        const grpc::Status status = CallRaw(path);
        EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << path;
        EXPECT_EQ(Reason(status), "TOKEN_MISSING") << path;
        ++methods;
      }
    }
  }
  EXPECT_GE(methods, 9);
  EXPECT_TRUE(CallRaw("/grpc.health.v1.Health/Check").ok());
}

TEST_F(PublicServerSecurityTest, TlsWithTokens) {
  const TestCa ca("ca"), other("other");
  options_.tls = WriteTlsFiles(Path("server"), ca.Issue("IP:127.0.0.1"), ca.cert());
  options_.token_file = Path("tokens");
  WriteFile(options_.token_file, "secret\n");
  Start();
  EXPECT_EQ(GetStatus({"Bearer secret"}).error_code(), grpc::StatusCode::UNAVAILABLE)
      << "plaintext";
  const TlsFiles stranger = WriteTlsFiles(Path("stranger"), other.Issue("DNS:c"), ca.cert());
  Connect(*MakeChannelCredentials(stranger, "--tls"));
  EXPECT_EQ(GetStatus({"Bearer secret"}).error_code(), grpc::StatusCode::UNAVAILABLE);
  const TlsFiles client = WriteTlsFiles(Path("client"), ca.Issue("DNS:c"), ca.cert());
  Connect(*MakeChannelCredentials(client, "--tls"));
  EXPECT_TRUE(GetStatus({"Bearer secret"}).ok());
  ExpectRefused(GetStatus({}), "TOKEN_MISSING");
}

TEST_F(PublicServerSecurityTest, AUnixSocketIsItsOwnersAlone) {
  char folder[] = "/tmp/socket.XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::string path = absl::StrCat(folder, "/public");
  options_.address = absl::StrCat("unix:", path);
  options_.address_flag = "--unix-socket";
  Start();
  EXPECT_EQ(server_->port(), 0);
  EXPECT_TRUE(GetStatus({}).ok());
  struct stat info = {};
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u & info.st_mode) << "nobody else may connect";
  EXPECT_EQ(info.st_mode & 0077, 0u);
  // A second server does not take it over.
  EXPECT_THAT(PublicServer::Start(options_, &backend_).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("another server answers"), HasSubstr("--unix-socket"))));
  EXPECT_TRUE(GetStatus({}).ok());
  options_.address = absl::StrCat("unix:", folder, "/none/public");
  EXPECT_THAT(PublicServer::Start(options_, &backend_).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("folder does not exist")));
  options_.address = absl::StrCat("unix:/tmp/", std::string(120, 'x'));
  EXPECT_THAT(PublicServer::Start(options_, &backend_).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("1 to 107 characters")));
  server_.reset();
  unlink(path.c_str());
  EXPECT_EQ(rmdir(folder), 0);
}

TEST_F(PublicServerSecurityTest, BadFilesAreErrorsOfTheStart) {
  options_.token_file = Path("nowhere");
  EXPECT_THAT(PublicServer::Start(options_, &backend_).status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("--auth-token-file")));
  options_.token_file.clear();
  options_.tls.cert = Path("nowhere");
  EXPECT_THAT(PublicServer::Start(options_, &backend_).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--tls-key")));
}

}  // namespace
}  // namespace lockstep
