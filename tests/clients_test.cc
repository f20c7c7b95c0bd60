// What many or large clients do to a server of real processes.
#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "proto/inference.grpc.pb.h"
#include "tests/cluster.h"

namespace lockstep {
namespace testing {
namespace {

using inference::v1::GenerateEvent;
using inference::v1::GenerateRequest;
using inference::v1::GenerateResult;

std::unique_ptr<Cluster> StartCluster() {
  ClusterOptions options;
  options.model = TestModel("qwen3_5-trained-ct-nvfp4-fp8");
  options.coordinator_flags = {"--max-kv-blocks", "32", "--max-num-seqs", "8"};
  auto cluster = Cluster::Start(options);
  EXPECT_OK(cluster.status());
  return cluster.ok() ? *std::move(cluster) : nullptr;
}

TEST(Clients, FiveHundredThatDropLeaveNothingBehind) {
  const std::unique_ptr<Cluster> cluster = StartCluster();
  ASSERT_NE(cluster, nullptr);
  constexpr int kClients = 500, kThreads = 20;
  std::atomic<int> next{0}, dropped{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<uint32_t>(t));
      while (next.fetch_add(1) < kClients) {
        GenerateRequest request;
        for (uint32_t i = 1 + random() % 30; i > 0; --i) {
          request.mutable_token_ids()->add_ids(static_cast<int32_t>(random() % 4000));
        }
        request.mutable_sampling()->set_max_tokens(200);
        request.mutable_sampling()->set_n(1 + static_cast<int>(random() % 2));
        request.mutable_stopping()->set_ignore_eos(true);
        grpc::ClientContext context;
        auto stream = cluster->inference()->Generate(&context, request);
        // While it waits, in its prompt, or after some tokens.
        GenerateEvent event;
        for (uint32_t events = random() % 5; events > 0 && stream->Read(&event); --events) {
        }
        context.TryCancel();
        dropped += stream->Finish().error_code() == grpc::StatusCode::CANCELLED;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(dropped, kClients);
  cluster->ExpectIdle();
  const auto counters = cluster->Status().counters();
  EXPECT_EQ(counters.at("requests_started"),
            counters.at("requests_cancelled") + counters.at("requests_finished"));
  GenerateRequest request;
  request.set_text("The capital of France is");
  request.mutable_sampling()->set_max_tokens(3);
  EXPECT_OK(cluster->Generate(request).status());
}

TEST(Clients, TwoMillionIdsArriveAndMoreThanTheLimitIsRefused) {
  const std::unique_ptr<Cluster> cluster = StartCluster();
  ASSERT_NE(cluster, nullptr);
  grpc::ChannelArguments arguments;
  arguments.SetMaxSendMessageSize(-1);  // what the server does is asked
  const auto stub = inference::v1::InferenceService::NewStub(
      grpc::CreateCustomChannel(cluster->address(), grpc::InsecureChannelCredentials(), arguments));
  const auto generate = [&](const GenerateRequest& request) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Minutes(2)));
    GenerateResult result;
    return stub->GenerateOnce(&context, request, &result);
  };
  GenerateRequest request;
  for (int i = 0; i < 2000000; ++i) request.mutable_token_ids()->add_ids(1000 + i % 1000);
  ASSERT_GT(request.ByteSizeLong(), 4000000u) << "no more than any default";
  const grpc::Status read = generate(request);
  EXPECT_EQ(read.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << read.error_message();
  EXPECT_EQ(ReasonOf(read), "CONTEXT_LENGTH_EXCEEDED");
  EXPECT_NE(read.error_message().find("2000000"), std::string::npos) << read.error_message();

  grpc::ClientContext context;
  inference::v1::Model model;
  ASSERT_TRUE(cluster->models()->GetModel(&context, {}, &model).ok());
  request.set_text(std::string(static_cast<size_t>(model.max_message_bytes()) + 1, 'a'));
  const grpc::Status refused = generate(request);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << refused.error_message();
  EXPECT_NE(refused.error_message().find(std::to_string(model.max_message_bytes())),
            std::string::npos)
      << refused.error_message();
}

}  // namespace
}  // namespace testing
}  // namespace lockstep
