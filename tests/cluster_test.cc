// Clusters of real processes on real sockets: streaming, cancellation, deadlines, drain, refusal of
// wrong steps, late ranks, delayed results, and conservation of blocks and slots.
#include "tests/cluster.h"

#include <signal.h>

#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/group/worker_group.h"
#include "gtest/gtest.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/testing/matchers.h"
#include "proto/worker.grpc.pb.h"
#include "tools/eval/step_driver.h"

namespace lockstep {
namespace testing {
namespace {

using inference::v1::GenerateEvent;
using inference::v1::GenerateRequest;
using inference::v1::GenerateResult;
using ::testing::HasSubstr;

constexpr char kModel[] = "qwen3_5-trained-ct-nvfp4-fp8";

ClusterOptions Options(int tp) {
  ClusterOptions options;
  options.model = TestModel(kModel);
  options.tp = tp;
  return options;
}

GenerateRequest Greedy(const std::string& text, int max_tokens) {
  GenerateRequest request;
  request.set_text(text);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_max_tokens(max_tokens);
  return request;
}

// Never stops by itself before the context is full.
GenerateRequest Endless() {
  GenerateRequest request = Greedy("The capital of France is", 3000);
  request.mutable_stopping()->set_ignore_eos(true);
  return request;
}

std::unique_ptr<worker::v1::WorkerService::Stub> WorkerStub(const std::string& address) {
  return worker::v1::WorkerService::NewStub(
      grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
}

worker::v1::GetStatsResponse WorkerStats(const std::string& address) {
  grpc::ClientContext context;
  worker::v1::GetStatsResponse stats;
  const grpc::Status status = WorkerStub(address)->GetStats(&context, {}, &stats);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return stats;
}

TEST(Cluster, StreamsWholeCharactersInOrderAndTheSameAsOnce) {
  ASSERT_OK_AND_ASSIGN(auto cluster, Cluster::Start(Options(2)));
  const GenerateRequest request = Greedy("The capital of France is", 16);
  grpc::ClientContext context;
  auto stream = cluster->inference()->Generate(&context, request);
  GenerateEvent event;
  std::string text;
  uint64_t sequence = 0;
  int accepted = 0, finished = 0;
  uint64_t digest = 0;
  while (stream->Read(&event)) {
    EXPECT_EQ(event.sequence(), ++sequence);
    EXPECT_FALSE(event.request_id().empty());
    accepted += event.has_accepted();
    finished += event.has_finished();
    text += event.delta().text();
    if (event.has_finished()) digest = event.finished().determinism_digest();
  }
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(accepted, 1);
  EXPECT_EQ(finished, 1);
  EXPECT_THAT(text, HasSubstr(" Paris.\nThe capital of Germany is Berlin."));
  ASSERT_OK_AND_ASSIGN(const GenerateResult once, cluster->Generate(request));
  EXPECT_EQ(once.outputs(0).text(), text);
  EXPECT_EQ(once.outputs(0).finished().determinism_digest(), digest);
  cluster->ExpectIdle();
}

TEST(Cluster, CancelByCallClientDropAndDeadlineFreeEverything) {
  ASSERT_OK_AND_ASSIGN(auto cluster, Cluster::Start(Options(2)));
  const auto start = [&](grpc::ClientContext* context, const std::string& id) {
    GenerateRequest request = Endless();
    request.set_request_id(id);
    auto stream = cluster->inference()->Generate(context, request);
    GenerateEvent event;
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(stream->Read(&event));
    return stream;
  };
  const auto finish = [](grpc::ClientReader<GenerateEvent>* stream) {
    GenerateEvent event;
    while (stream->Read(&event)) EXPECT_FALSE(event.has_finished());
    return stream->Finish();
  };
  {  // by call
    grpc::ClientContext context;
    auto stream = start(&context, "by-call");
    grpc::ClientContext cancel_context;
    inference::v1::CancelGenerationRequest cancel;
    cancel.set_request_id("by-call");
    inference::v1::CancelGenerationResponse response;
    ASSERT_TRUE(cluster->inference()->CancelGeneration(&cancel_context, cancel, &response).ok());
    EXPECT_EQ(response.outcome(), inference::v1::CancelGenerationResponse::CANCELLED);
    const grpc::Status status = finish(stream.get());
    EXPECT_EQ(status.error_code(), grpc::StatusCode::CANCELLED);
    EXPECT_EQ(ReasonOf(status), "CLIENT");
    grpc::ClientContext again;
    ASSERT_TRUE(cluster->inference()->CancelGeneration(&again, cancel, &response).ok());
    EXPECT_EQ(response.outcome(), inference::v1::CancelGenerationResponse::ALREADY_FINISHED);
    grpc::ClientContext unknown;
    cancel.set_request_id("nobody");
    const grpc::Status missing =
        cluster->inference()->CancelGeneration(&unknown, cancel, &response);
    EXPECT_EQ(missing.error_code(), grpc::StatusCode::NOT_FOUND);
    EXPECT_EQ(ReasonOf(missing), "REQUEST_NOT_FOUND");
  }
  cluster->ExpectIdle();
  {  // the client goes away
    grpc::ClientContext context;
    auto stream = start(&context, "dropped");
    context.TryCancel();
    finish(stream.get());
  }
  cluster->ExpectIdle();
  {  // the deadline passes
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(1)));
    auto stream = start(&context, "late");
    EXPECT_EQ(finish(stream.get()).error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  }
  cluster->ExpectIdle();
  EXPECT_OK(cluster->Generate(Greedy("The capital of France is", 4)));
}

TEST(Cluster, SigtermFinishesStreamsRefusesNewOnesAndExitsZero) {
  ASSERT_OK_AND_ASSIGN(auto cluster, Cluster::Start(Options(1)));
  GenerateRequest request = Greedy("The capital of France is", 600);
  request.mutable_stopping()->set_ignore_eos(true);
  grpc::ClientContext context;
  auto stream = cluster->inference()->Generate(&context, request);
  GenerateEvent event;
  ASSERT_TRUE(stream->Read(&event));
  cluster->coordinator().Signal(SIGTERM);
  bool refused = false;
  for (int i = 0; i < 200 && !refused; ++i) {
    const auto result = cluster->Generate(Greedy("x", 1));
    refused = result.status().code() == absl::StatusCode::kUnavailable;
    if (!refused) absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_TRUE(refused);
  bool finished = false;
  while (stream->Read(&event)) finished = event.has_finished() || finished;
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_TRUE(finished);
  ASSERT_TRUE(cluster->coordinator().Wait(absl::Seconds(35)));
  EXPECT_EQ(cluster->coordinator().exit_code(), 0) << cluster->coordinator_log();
}

TEST(Cluster, ASecondSigtermEndsStreamsWithAStatus) {
  ASSERT_OK_AND_ASSIGN(auto cluster, Cluster::Start(Options(1)));
  grpc::ClientContext context;
  auto stream = cluster->inference()->Generate(&context, Endless());
  GenerateEvent event;
  ASSERT_TRUE(stream->Read(&event));
  cluster->coordinator().Signal(SIGTERM);
  while (cluster->Status().state() != "DRAINING") absl::SleepFor(absl::Milliseconds(5));
  cluster->coordinator().Signal(SIGTERM);
  while (stream->Read(&event)) EXPECT_FALSE(event.has_finished());
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
  EXPECT_EQ(ReasonOf(status), "DRAINING") << status.error_message();
  ASSERT_TRUE(cluster->coordinator().Wait(absl::Seconds(20)));
  EXPECT_EQ(cluster->coordinator().exit_code(), 1) << cluster->coordinator_log();
}

TEST(Cluster, PortInUseIsAClearError) {
  ASSERT_OK_AND_ASSIGN(auto cluster, Cluster::Start(Options(1)));
  const std::string port = cluster->address().substr(cluster->address().rfind(':') + 1);
  ClusterOptions options = Options(1);
  options.coordinator_flags = {"--port", port};
  const auto second = Cluster::StartCoordinator(options, {"127.0.0.1:1"});
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(port));
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("in use"));
  const auto worker = Workers::Start(1, {"--listen", cluster->address()});
  ASSERT_FALSE(worker.ok());
  EXPECT_THAT(std::string(worker.status().message()), HasSubstr("in use"));
}

TEST(Cluster, RanksMayComeUpFarApart) {
  // A socket's path is known before anybody listens; it must be short.
  char folder[] = "/tmp/lockstep-XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::string late = absl::StrCat("unix:", folder, "/worker");
  ASSERT_OK_AND_ASSIGN(Workers first, Workers::Start(1));
  ASSERT_OK_AND_ASSIGN(auto cluster,
                       Cluster::StartCoordinator(Options(2), {first.addresses[0], late}));
  EXPECT_FALSE(cluster->WaitReady(absl::Seconds(3)).ok());
  const auto loading = cluster->Generate(Greedy("x", 1));
  EXPECT_EQ(loading.status().code(), absl::StatusCode::kUnavailable);
  ASSERT_OK_AND_ASSIGN(Workers second, Workers::Start(1, {"--listen", late}));
  ASSERT_OK(cluster->WaitReady(absl::Seconds(60)));
  ASSERT_OK_AND_ASSIGN(const GenerateResult result,
                       cluster->Generate(Greedy("The capital of France is", 3)));
  EXPECT_EQ(result.outputs(0).text(), " Paris.\n");
}

// ---- ranks that stop, coordinators that follow each other
// ----------------------------------------

TEST(Stopped, ARankThatStopsAnsweringIsNamedAndTheStreamGoesOnWhenItReturns) {
  ClusterOptions options = Options(2);
  options.coordinator_flags = {"--lease-ms", "3000"};
  ASSERT_OK_AND_ASSIGN(auto cluster, Cluster::Start(options));
  grpc::ClientContext context;
  auto stream = cluster->inference()->Generate(&context, Endless());
  GenerateEvent event;
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(stream->Read(&event));
  cluster->workers().processes[1].Signal(SIGSTOP);
  const absl::Time start = absl::Now();
  // Readiness is withdrawn within the lease, long before the collective's bound.
  inference::v1::ServerStatus status;
  while (absl::Now() - start < absl::Seconds(8)) {
    status = cluster->Status();
    if (status.state() != "READY") break;
    absl::SleepFor(absl::Milliseconds(50));
  }
  EXPECT_EQ(status.state(), "RECOVERING");
  EXPECT_THAT(status.state_detail(), HasSubstr("rank 1"));
  cluster->workers().processes[1].Signal(SIGCONT);
  uint64_t last = event.sequence();
  for (int i = 0; i < 300; ++i) {
    ASSERT_TRUE(stream->Read(&event)) << stream->Finish().error_message();
    ASSERT_EQ(event.sequence(), last + 1);
    last = event.sequence();
  }
  EXPECT_EQ(cluster->Status().counters().at("recoveries"), 1);
  context.TryCancel();
  stream->Finish();
  cluster->ExpectIdle();
}

TEST(Takeover, WorkersOutliveAnOrderlyStopAndServeTheNextCoordinator) {
  ASSERT_OK_AND_ASSIGN(Workers workers, Workers::Start(2));
  uint64_t digest = 0;
  for (int round = 0; round < 2; ++round) {
    ASSERT_OK_AND_ASSIGN(auto cluster, Cluster::StartCoordinator(Options(2), workers.addresses));
    ASSERT_OK(cluster->WaitReady(absl::Seconds(60)));
    ASSERT_OK_AND_ASSIGN(const GenerateResult result,
                         cluster->Generate(Greedy("The capital of France is", 8)));
    const uint64_t mine = result.outputs(0).finished().determinism_digest();
    if (round == 1) {
      EXPECT_EQ(mine, digest);
    }
    digest = mine;
    cluster->coordinator().Signal(SIGTERM);
    ASSERT_TRUE(cluster->coordinator().Wait(absl::Seconds(20)));
    EXPECT_EQ(cluster->coordinator().exit_code(), 0);
  }
}

TEST(Takeover, AnOlderCoordinatorIsNotReadyAndItsEndHarmsNobody) {
  ASSERT_OK_AND_ASSIGN(Workers workers, Workers::Start(2));
  ASSERT_OK_AND_ASSIGN(auto older, Cluster::StartCoordinator(Options(2), workers.addresses));
  ASSERT_OK(older->WaitReady(absl::Seconds(60)));
  ASSERT_OK_AND_ASSIGN(auto newer, Cluster::StartCoordinator(Options(2), workers.addresses));
  ASSERT_OK(newer->WaitReady(absl::Seconds(60)));
  ASSERT_OK(newer->Generate(Greedy("The capital of France is", 4)));
  // The older one fails (its streams are gone) or stops counting on its workers; either way it
  // ends.
  older->coordinator().Signal(SIGTERM);
  ASSERT_TRUE(older->coordinator().Wait(absl::Seconds(45)));
  ASSERT_OK_AND_ASSIGN(const GenerateResult result,
                       newer->Generate(Greedy("The capital of France is", 3)));
  EXPECT_EQ(result.outputs(0).text(), " Paris.\n");
}

TEST(Limits, CachesBeyondTheMachinesMemoryAreRefusedWithNumbers) {
  ASSERT_OK_AND_ASSIGN(Workers workers, Workers::Start(1));
  ClusterOptions options = Options(1);
  options.coordinator_flags = {"--max-kv-blocks", "100000000"};
  ASSERT_OK_AND_ASSIGN(auto cluster, Cluster::StartCoordinator(options, workers.addresses));
  EXPECT_FALSE(cluster->WaitReady(absl::Seconds(20)).ok());
  ASSERT_TRUE(cluster->coordinator().Wait(absl::Seconds(20)));
  EXPECT_EQ(cluster->coordinator().exit_code(), 1);
  EXPECT_THAT(cluster->coordinator_log(), HasSubstr("100000000 KV blocks"));
  EXPECT_THAT(cluster->coordinator_log(), HasSubstr("this machine has"));
}

// ---- refusal of wrong steps
// ----------------------------------------------------------------------

struct Group {
  Workers workers;
  std::unique_ptr<WorkerGroup> group;
};

absl::StatusOr<Group> StartGroup(int tp) {
  Group g;
  ASSIGN_OR_RETURN(g.workers, Workers::Start(tp));
  WorkerGroupOptions options;
  options.addresses = g.workers.addresses;
  options.model_path = TestModel(kModel);
  g.group = std::make_unique<WorkerGroup>(options);
  RETURN_IF_ERROR(g.group->Load(5, nullptr).status());
  return g;
}

worker::v1::ConfigureRequest Limits() {
  worker::v1::ConfigureRequest limits;
  limits.set_kv_blocks(4);
  limits.set_slots(2);
  limits.set_max_batch_tokens(64);
  limits.set_max_batch_sequences(2);
  limits.set_max_logit_rows(8);
  limits.set_max_sequence_blocks(4);
  return limits;
}

worker::v1::StepPlan OneToken() {
  worker::v1::StepPlan plan;
  worker::v1::SequenceEntry* entry = plan.add_sequences();
  entry->set_generation(1);
  entry->add_token_ids(5);
  entry->add_new_blocks(0);
  entry->set_num_logits(1);
  entry->set_sample(true);
  worker::v1::NewSequence* begin = entry->mutable_begin();
  begin->set_restore_snapshot(-1);
  begin->add_prompt_ids(5);
  begin->mutable_sampling()->set_top_p(1);
  begin->mutable_sampling()->set_repetition_penalty(1);
  begin->mutable_sampling()->set_num_logprobs(-1);
  return plan;
}

struct Mutation {
  const char* name;
  void (*apply)(worker::v1::StepRequest*);
  const char* expected;
};

TEST(Refusal, AWrongTermEpochStepOrDigestRunsNothingAndTheGroupCanFormAgain) {
  const Mutation mutations[] = {
      {"term", [](worker::v1::StepRequest* r) { r->set_term(4); }, "term"},
      {"epoch", [](worker::v1::StepRequest* r) { r->set_epoch(r->epoch() + 1); }, "epoch"},
      {"step", [](worker::v1::StepRequest* r) { r->set_step_id(2); }, "step"},
      {"digest", [](worker::v1::StepRequest* r) { r->set_batch_digest(1); }, "digest"},
      {"plan", [](worker::v1::StepRequest* r) { r->mutable_plan()->push_back('\0'); }, "digest"},
  };
  ASSERT_OK_AND_ASSIGN(Group g, StartGroup(2));
  int64_t refused = 0;
  for (const Mutation& mutation : mutations) {
    ASSERT_OK_AND_ASSIGN(const StepEpoch epoch, g.group->Join(1, Limits()));
    const uint64_t steps = WorkerStats(g.workers.addresses[0]).steps();
    StepDriver driver(g.group.get(), epoch);
    worker::v1::StepRequest request = driver.Number(OneToken());
    mutation.apply(&request);
    ASSERT_OK(g.group->Send(request));
    const auto result = g.group->Receive(absl::Now() + absl::Seconds(20));
    ASSERT_FALSE(result.ok()) << mutation.name;
    EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition)
        << result.status().ToString();
    EXPECT_THAT(std::string(result.status().message()), HasSubstr(mutation.expected));
    EXPECT_EQ(WorkerStats(g.workers.addresses[0]).steps(), steps) << mutation.name;
    int64_t now = 0;
    for (const std::string& address : g.workers.addresses) {
      now += WorkerStats(address).refused_steps();
    }
    EXPECT_GT(now, refused) << mutation.name;
    refused = now;
  }
  ASSERT_OK_AND_ASSIGN(const StepEpoch epoch, g.group->Join(1, Limits()));
  StepDriver driver(g.group.get(), epoch);
  EXPECT_OK(driver.Run(OneToken()));
}

TEST(Refusal, ASecondStreamIsRefusedAndTheFirstGoesOn) {
  ASSERT_OK_AND_ASSIGN(Group g, StartGroup(2));
  ASSERT_OK_AND_ASSIGN(const StepEpoch epoch, g.group->Join(1, Limits()));
  StepDriver driver(g.group.get(), epoch);
  StepDriver intruder(g.group.get(), epoch);
  // The first stream has surely arrived once it has carried a step.
  ASSERT_OK(driver.Run(OneToken()));
  grpc::ClientContext context;
  auto stub = WorkerStub(g.workers.addresses[1]);
  auto stream = stub->StepStream(&context);
  stream->Write(intruder.Number(OneToken()));
  worker::v1::StepResult result;
  EXPECT_FALSE(stream->Read(&result));
  const grpc::Status refused = stream->Finish();
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::FAILED_PRECONDITION) << refused.error_message();
  worker::v1::StepPlan next = OneToken();
  next.mutable_sequences(0)->set_generation(2);
  EXPECT_OK(driver.Run(next));
}

// Ranks as a coordinator that is broken would drive them: each rank gets what it is sent.
struct RawRank {
  std::unique_ptr<worker::v1::WorkerService::Stub> stub;
  std::unique_ptr<grpc::ClientContext> context = std::make_unique<grpc::ClientContext>();
  std::unique_ptr<grpc::ClientReaderWriter<worker::v1::StepRequest, worker::v1::StepResult>> stream;
};

TEST(Refusal, RanksThatGetDifferentStepsFailBothAndNeverHang) {
  ASSERT_OK_AND_ASSIGN(Group g, StartGroup(2));
  std::vector<RawRank> ranks(2);
  worker::v1::InitCommRequest init;
  init.set_term(5);
  init.set_epoch(1);
  for (size_t r = 0; r < 2; ++r) {
    ranks[r].stub = WorkerStub(g.workers.addresses[r]);
    worker::v1::PrepareCommRequest prepare;
    prepare.set_term(5);
    prepare.set_epoch(1);
    worker::v1::PrepareCommResponse response;
    grpc::ClientContext context;
    ASSERT_TRUE(ranks[r].stub->PrepareComm(&context, prepare, &response).ok());
    init.add_addresses(response.address());
  }
  std::vector<std::thread> joins;
  for (int r = 0; r < 2; ++r) {
    joins.emplace_back([&, r] {
      worker::v1::InitCommRequest mine = init;
      mine.set_rank(r);
      worker::v1::InitCommResponse response;
      grpc::ClientContext context;
      const grpc::Status status =
          ranks[static_cast<size_t>(r)].stub->InitComm(&context, mine, &response);
      EXPECT_TRUE(status.ok()) << status.error_message();
    });
  }
  for (std::thread& t : joins) t.join();
  const absl::Time start = absl::Now();
  for (size_t r = 0; r < 2; ++r) {
    worker::v1::ConfigureRequest limits = Limits();
    limits.set_term(5);
    limits.set_epoch(1);
    worker::v1::ConfigureResponse response;
    grpc::ClientContext context;
    ASSERT_TRUE(ranks[r].stub->Configure(&context, limits, &response).ok());
    ranks[r].stream = ranks[r].stub->StepStream(ranks[r].context.get());
    // Valid for this rank, and not what the other one gets.
    StepDriver driver(nullptr, StepEpoch{5, 1});
    worker::v1::StepPlan plan = OneToken();
    plan.mutable_sequences(0)->set_token_ids(0, 5 + static_cast<int32_t>(r));
    ASSERT_TRUE(ranks[r].stream->Write(driver.Number(plan)));
  }
  std::string messages;
  for (RawRank& rank : ranks) {
    worker::v1::StepResult result;
    EXPECT_FALSE(rank.stream->Read(&result));
    const grpc::Status status = rank.stream->Finish();
    EXPECT_FALSE(status.ok());
    messages += status.error_message() + "\n";
  }
  EXPECT_THAT(messages, HasSubstr("digest"));
  EXPECT_LT(absl::Now() - start, absl::Seconds(15));
}

// ---- queueing
// ------------------------------------------------------------------------------------

TEST(Queueing, DelayedResultsKeepTheExecutorBusyAndChangeNothing) {
  GenerateRequest request;
  for (int i = 0; i < 3400; ++i) request.mutable_token_ids()->add_ids(i * 7 % 4000);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_max_tokens(1);
  ASSERT_OK_AND_ASSIGN(auto plain, Cluster::Start(Options(1)));
  ASSERT_OK_AND_ASSIGN(const GenerateResult expected, plain->Generate(request));
  plain.reset();

  ClusterOptions options = Options(1);
  options.delay_results_ms = 50;
  options.worker_flags = {"--threads", "1"};  // so that a step is longer than the delay
  ASSERT_OK_AND_ASSIGN(auto cluster, Cluster::Start(options));
  const std::string worker = cluster->workers().addresses[0];
  const auto before = WorkerStats(worker);
  ASSERT_OK_AND_ASSIGN(const GenerateResult result, cluster->Generate(request));
  const auto after = WorkerStats(worker);
  const int64_t steps = static_cast<int64_t>(after.steps() - before.steps());
  const int64_t step_micros = (after.step_micros_total() - before.step_micros_total()) / steps;
  EXPECT_GE(steps, 7);
  // Steps are longer than the delay, or two in flight could not cover it.
  ASSERT_GT(step_micros, 50000);
  // One wait at the most: after the last step (the request has ended).
  EXPECT_LE(after.idle_waits() - before.idle_waits(), 2);
  EXPECT_EQ(result.outputs(0).finished().determinism_digest(),
            expected.outputs(0).finished().determinism_digest());
}

TEST(Conservation, BlocksAndSlotsReturnAfterRandomRequests) {
  ClusterOptions options = Options(2);
  options.coordinator_flags = {"--max-kv-blocks", "24", "--max-num-seqs", "6"};
  ASSERT_OK_AND_ASSIGN(auto cluster, Cluster::Start(options));
  constexpr int kRequests = 200, kClients = 10;
  std::atomic<int> next{0}, ok{0}, cancelled{0}, other{0};
  std::vector<std::thread> clients;
  for (int c = 0; c < kClients; ++c) {
    clients.emplace_back([&, c] {
      std::mt19937 random(static_cast<uint32_t>(c));
      while (next.fetch_add(1) < kRequests) {
        GenerateRequest request;
        const int length = 1 + static_cast<int>(random() % 180);
        for (int i = 0; i < length; ++i) {
          request.mutable_token_ids()->add_ids(static_cast<int32_t>(random() % 4000));
        }
        request.mutable_sampling()->set_max_tokens(1 + static_cast<int>(random() % 30));
        request.mutable_sampling()->set_seed(random());
        request.mutable_sampling()->set_n(1 + static_cast<int>(random() % 2));
        grpc::ClientContext context;
        auto stream = cluster->inference()->Generate(&context, request);
        GenerateEvent event;
        const int drop_after = random() % 4 == 0 ? static_cast<int>(random() % 12) : 1 << 30;
        int events = 0, finished = 0;
        while (stream->Read(&event)) {
          finished += event.has_finished();
          if (++events == drop_after) context.TryCancel();
        }
        const grpc::Status status = stream->Finish();
        if (status.ok()) {
          EXPECT_EQ(finished, request.sampling().n());
          ok++;
        } else if (status.error_code() == grpc::StatusCode::CANCELLED) {
          cancelled++;
        } else {
          other++;
          ADD_FAILURE() << status.error_code() << " " << status.error_message();
        }
      }
    });
  }
  for (std::thread& t : clients) t.join();
  EXPECT_EQ(ok + cancelled + other, kRequests);
  EXPECT_GT(ok, kRequests / 2);
  EXPECT_GT(cancelled, 0);
  cluster->ExpectIdle();
  const auto counters = cluster->Status().counters();
  EXPECT_EQ(counters.at("requests_started"), counters.at("requests_finished") +
                                                 counters.at("requests_failed") +
                                                 counters.at("requests_cancelled"));
}

TEST(Counters, AStepMovesThePlanInAndIdsOutAndNothingElse) {
  ASSERT_OK_AND_ASSIGN(auto cluster, Cluster::Start(Options(2)));
  const std::string worker = cluster->workers().addresses[0];
  const auto before = WorkerStats(worker);
  ASSERT_OK(cluster->Generate(Greedy("The capital of France is", 40)));
  const auto after = WorkerStats(worker);
  const auto moved = [&](const std::string& kind) {
    return after.traffic_bytes().at(kind) - before.traffic_bytes().at(kind);
  };
  EXPECT_GT(before.traffic_bytes().at("weights_to_device"), 1000000);
  EXPECT_EQ(moved("weights_to_device"), 0);
  EXPECT_EQ(moved("logits_to_host"), 0);
  EXPECT_EQ(moved("diagnostics_to_host"), 0);
  const int64_t steps = static_cast<int64_t>(after.steps() - before.steps());
  EXPECT_GT(moved("plan_to_device"), 0);
  EXPECT_LE(moved("plan_to_device") / steps, 1024);
  EXPECT_GT(moved("results_to_host"), 0);
  EXPECT_LE(moved("results_to_host") / steps, 64);
}

TEST(Counters, LaunchesDoNotDependOnTheNumberOfTokens) {
  ASSERT_OK_AND_ASSIGN(auto cluster, Cluster::Start(Options(1)));
  const std::string worker = cluster->workers().addresses[0];
  std::vector<int64_t> launches;
  for (int tokens : {1, 5, 512}) {
    GenerateRequest request;
    for (int i = 0; i < tokens; ++i) request.mutable_token_ids()->add_ids(i);
    request.mutable_sampling()->set_max_tokens(1);
    request.mutable_cache()->set_bypass(true);
    const auto before = WorkerStats(worker);
    ASSERT_OK(cluster->Generate(request));
    const auto after = WorkerStats(worker);
    ASSERT_EQ(after.steps() - before.steps(), 1u);
    launches.push_back(after.op_launches() - before.op_launches());
  }
  EXPECT_EQ(launches[0], launches[1]);
  EXPECT_EQ(launches[0], launches[2]);
}

}  // namespace
}  // namespace testing
}  // namespace lockstep
