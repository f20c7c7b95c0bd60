// The worker that fails on purpose: each fault does what its name says, once, where the rule says.
#include <grpcpp/grpcpp.h>
#include <signal.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "proto/worker.grpc.pb.h"
#include "tests/cluster.h"
#include "tests/fault_injector.h"
#include "tests/fault_rule.h"
#include "tools/process/child_process.h"
#include "worker/worker_test_util.h"

namespace lockstep {
namespace testing {
namespace {

namespace pb = worker::v1;
using ::testing::ExitedWithCode;
using ::testing::HasSubstr;
using ::testing::KilledBySignal;
using worker_test::Begin;
using worker_test::Group;
using worker_test::Server;
using worker_test::Step;
using worker_test::Stream;
using worker_test::Stub;

FaultOptions Rules(const std::vector<std::string>& texts) {
  FaultOptions options;
  for (const std::string& text : texts) {
    const auto rule = ParseFaultRule(text);
    EXPECT_OK(rule.status());
    if (rule.ok()) options.rules.push_back(*rule);
  }
  return options;
}

Server::Hooks HooksOf(FaultInjector* faults) {
  return {[faults](ModelLoader loader) { return faults->WrapLoader(std::move(loader)); },
          [faults](Worker* worker) { return faults->MakeService(worker); }};
}

// A group of one with faults, and its step stream.
class Faulty {
 public:
  explicit Faulty(FaultOptions options)
      : faults_(std::move(options)), group_(1, HooksOf(&faults_)) {
    Open();
  }
  void Open() {
    group_.Join(++epoch_);
    digest_ = 0;
    step_ = 0;
    stream_.reset();
    context_ = std::make_unique<grpc::ClientContext>();
    stream_ = group_.at(0).stub->StepStream(context_.get());
  }
  ~Faulty() { context_->TryCancel(); }

  void Send(const pb::StepPlan& plan) {
    const pb::StepRequest request = Step(epoch_, ++step_, digest_, plan);
    digest_ = request.batch_digest();
    EXPECT_TRUE(stream_->Write(request));
  }
  // The next token of slot 0, which began in step 1 of Begin().
  void SendNext() {
    pb::StepPlan plan;
    pb::SequenceEntry* e = plan.add_sequences();
    e->set_generation(1);
    e->set_position(static_cast<int64_t>(step_) + 2);
    e->set_sampled_in_step(step_);
    e->set_num_logits(1);
    e->set_sample(true);
    Send(plan);
  }
  pb::StepResult Read() {
    pb::StepResult result;
    EXPECT_TRUE(stream_->Read(&result)) << stream_->Finish().error_message();
    return result;
  }
  absl::Status End() {
    pb::StepResult result;
    EXPECT_FALSE(stream_->Read(&result));
    return ToAbsl(stream_->Finish());
  }
  Server& server() { return group_.at(0); }

 private:
  FaultInjector faults_;
  Group group_;
  uint64_t epoch_ = 0, step_ = 0, digest_ = 0;
  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<Stream> stream_;
};

TEST(FaultRule, SaysPhaseOccurrenceKindAndTime) {
  ASSERT_OK_AND_ASSIGN(FaultRule rule, ParseFaultRule("decode:12=stop-resume,250"));
  EXPECT_EQ(rule.phase, FaultPhase::kDecode);
  EXPECT_EQ(rule.occurrence, 12);
  EXPECT_EQ(rule.kind, FaultKind::kStopResume);
  EXPECT_EQ(rule.time, absl::Milliseconds(250));
  ASSERT_OK_AND_ASSIGN(rule, ParseFaultRule("idle=kill"));
  EXPECT_EQ(rule.occurrence, 1);
  for (const char* wrong :
       {"", "decode", "decode=", "decode=burn", "sleep=kill", "decode:0=kill", "decode:x=kill",
        "decode=kill,3", "decode=delay", "decode=delay,-1", "load=nan", "idle=drop-stream",
        "decode:1:2=kill", "decode=kill=kill"}) {
    EXPECT_THAT(ParseFaultRule(wrong),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("PHASE[:N]=KIND")))
        << wrong;
  }
}

TEST(FaultInjector, EndsTheProcessAsItIsTold) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto at = [](const char* rule) {
    FaultInjector faults(Rules({rule}));
    (void)faults.At(FaultPhase::kDecode);
    (void)faults.At(FaultPhase::kDecode);
    _exit(7);
  };
  EXPECT_EXIT(at("decode:2=kill"), KilledBySignal(SIGKILL), "");
  EXPECT_EXIT(at("decode=abort"), KilledBySignal(SIGABRT), "fault: decode=abort");
  EXPECT_EXIT(at("decode=exit0"), ExitedWithCode(0), "");
  EXPECT_EXIT(at("decode=exit1"), ExitedWithCode(1), "");
  EXPECT_EXIT(at("decode:3=kill"), ExitedWithCode(7), "");
  EXPECT_EXIT(at("prefill=kill"), ExitedWithCode(7), "");
  const auto poison = [](int32_t id) {
    FaultOptions options;
    options.poison_ids = {151};
    const int32_t ids[] = {3, id, 4};
    FaultInjector(options).CheckPoison(ids, 3);
    _exit(7);
  };
  EXPECT_EXIT(poison(151), KilledBySignal(SIGABRT), "token 151");
  EXPECT_EXIT(poison(150), ExitedWithCode(7), "");
}

TEST(FaultInjector, StepsFailOnceAtTheirPhase) {
  Faulty faulty(Rules({"prefill:2=oom", "decode:2=error", "sampling:6=error"}));
  faulty.Send(Begin());
  faulty.Read();
  faulty.SendNext();
  faulty.Read();
  faulty.SendNext();
  EXPECT_THAT(faulty.End(), StatusIs(absl::StatusCode::kInternal, HasSubstr("decode:2=error")));
  faulty.Open();
  faulty.Send(Begin());
  EXPECT_THAT(faulty.End(), StatusIs(absl::StatusCode::kResourceExhausted));
  faulty.Open();
  faulty.Send(Begin());
  for (int i = 0; i < 2; ++i) {
    faulty.Read();
    faulty.SendNext();
  }
  faulty.Read();
  faulty.SendNext();  // the sixth that samples
  EXPECT_THAT(faulty.End(), StatusIs(absl::StatusCode::kInternal, HasSubstr("sampling:6")));
}

TEST(FaultInjector, NanHitsOneSequence) {
  Faulty faulty(Rules({"prefill=nan"}));
  pb::StepPlan plan = Begin();
  *plan.add_sequences() = plan.sequences(0);
  plan.mutable_sequences(1)->set_slot(1);
  plan.mutable_sequences(1)->set_new_blocks(0, 1);
  faulty.Send(plan);
  const pb::StepResult result = faulty.Read();
  EXPECT_TRUE(result.sequences(0).nan());
  EXPECT_FALSE(result.sequences(1).nan());
}

TEST(FaultInjector, ResultsAreFalsifiedRepeatedAndReordered) {
  Faulty good{FaultOptions()};
  good.Send(Begin());
  const pb::StepResult expected = good.Read();
  {
    Faulty faulty(Rules({"prefill=digest"}));
    faulty.Send(Begin());
    EXPECT_NE(faulty.Read().result_digest(), expected.result_digest());
  }
  {
    Faulty faulty(Rules({"sampling=corrupt-result"}));
    faulty.Send(Begin());
    const pb::StepResult result = faulty.Read();
    EXPECT_EQ(result.result_digest(), expected.result_digest());
    EXPECT_NE(result.sequences(0).sampled_id(), expected.sequences(0).sampled_id());
  }
  {
    Faulty faulty(Rules({"prefill=duplicate-result"}));
    faulty.Send(Begin());
    EXPECT_EQ(faulty.Read().step_id(), 1u);
    EXPECT_EQ(faulty.Read().step_id(), 1u);
  }
  {
    Faulty faulty(Rules({"prefill=reorder-results", "prefill=delay,50"}));
    faulty.Send(Begin());
    faulty.SendNext();
    const uint64_t first = faulty.Read().step_id();
    EXPECT_EQ(first + faulty.Read().step_id(), 3u);
    EXPECT_EQ(first, 2u);
  }
  {
    Faulty alone(Rules({"prefill=reorder-results"}));
    alone.Send(Begin());
    EXPECT_EQ(alone.Read().step_id(), 1u) << "nothing overtakes it: it comes late";
  }
  {
    Faulty faulty(Rules({"decode=drop-stream"}));
    faulty.Send(Begin());
    faulty.Read();
    faulty.SendNext();
    EXPECT_THAT(faulty.End(), StatusIs(absl::StatusCode::kUnavailable));
  }
}

TEST(FaultInjector, CallsFailOnce) {
  FaultInjector faults(Rules(
      {"load=oom", "prepare=error", "init=oom", "configure=oom", "idle:2=error", "drain=error"}));
  Server server(WorkerOptions(), HooksOf(&faults));
  const auto load = [&] { return server.Load(worker_test::LoadRequest(0, 1)); };
  EXPECT_EQ(load().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  ASSERT_TRUE(load().ok());
  pb::PrepareCommRequest prepare;
  prepare.set_term(1);
  prepare.set_epoch(1);
  pb::PrepareCommResponse prepared;
  EXPECT_EQ(server.Call(&Stub::PrepareComm, prepare, &prepared).error_code(),
            grpc::StatusCode::INTERNAL);
  ASSERT_TRUE(server.Call(&Stub::PrepareComm, prepare, &prepared).ok());
  pb::InitCommRequest init;
  init.set_term(1);
  init.set_epoch(1);
  init.add_addresses(prepared.address());
  pb::InitCommResponse joined;
  EXPECT_EQ(server.Call(&Stub::InitComm, init, &joined).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  ASSERT_TRUE(server.Call(&Stub::InitComm, init, &joined).ok());
  pb::ConfigureResponse configured;
  const pb::ConfigureRequest limits = worker_test::Limits(1);
  EXPECT_EQ(server.Call(&Stub::Configure, limits, &configured).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  ASSERT_TRUE(server.Call(&Stub::Configure, limits, &configured).ok());
  pb::HealthResponse health;
  EXPECT_TRUE(server.Call(&Stub::Health, pb::HealthRequest(), &health).ok());
  EXPECT_EQ(server.Call(&Stub::Health, pb::HealthRequest(), &health).error_code(),
            grpc::StatusCode::INTERNAL);
  EXPECT_TRUE(server.Call(&Stub::Health, pb::HealthRequest(), &health).ok());
  pb::DrainRequest drain;
  drain.set_term(1);
  pb::DrainResponse drained;
  EXPECT_EQ(server.Call(&Stub::Drain, drain, &drained).error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_TRUE(server.Call(&Stub::Drain, drain, &drained).ok());
}

TEST(FaultInjector, ARuleFiresOnceForAllProcessesThatShareTheFile) {
  FaultOptions options = Rules({"decode=error", "decode:2=oom"});
  options.once_file = TempPath("fired");
  for (int process = 0; process < 2; ++process) {
    FaultInjector faults(options);
    EXPECT_EQ(faults.At(FaultPhase::kDecode).ok(), process > 0);
    EXPECT_EQ(faults.At(FaultPhase::kDecode).ok(), process > 0);
  }
  EXPECT_EQ(ReadFile(options.once_file), "decode=error\ndecode:2=oom\n");
}

TEST(FaultInjector, TheLedgerSaysWhatWasSampled) {
  FaultOptions options = Rules({"decode:2=error"});
  options.ledger = TempPath("ledger");
  Faulty faulty(options);
  faulty.Send(Begin());
  faulty.Read();
  faulty.SendNext();
  faulty.Read();
  faulty.SendNext();
  EXPECT_FALSE(faulty.End().ok());
  faulty.Open();
  faulty.Send(Begin(5));
  faulty.Read();
  EXPECT_EQ(ReadFile(options.ledger), "1 1 0 1 3\n1 2 0 1 4\n2 1 0 5 3\n");
}

TEST(FaultWorker, StopsGoesOnAndDies) {
  const std::string address_file = TempPath("address");
  const std::string log = TempPath("log");
  ChildProcess::Options options;
  options.stderr_path = log;
  ASSERT_OK_AND_ASSIGN(ChildProcess process,
                       ChildProcess::Start({"tests/fault_worker", "--listen", "127.0.0.1:0",
                                            "--address-file", address_file, "--fault",
                                            "prepare=stop-resume,300", "--fault", "prepare:2=kill"},
                                           options));
  ASSERT_OK_AND_ASSIGN(const std::string address,
                       WaitForAddressFile(address_file, &process, absl::Seconds(60)));
  const auto stub =
      pb::WorkerService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  const auto prepare = [&] {
    grpc::ClientContext context;
    pb::PrepareCommResponse response;
    return stub->PrepareComm(&context, pb::PrepareCommRequest(), &response);
  };
  const absl::Time start = absl::Now();
  EXPECT_EQ(prepare().error_code(), grpc::StatusCode::FAILED_PRECONDITION) << "there is no model";
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(300));
  EXPECT_EQ(prepare().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_TRUE(process.Wait(absl::Seconds(60)));
  EXPECT_EQ(process.Outcome(), "signal 9 (Killed)") << ReadFile(log);
  EXPECT_THAT(ReadFile(log), HasSubstr("fault: prepare:2=kill"));

  ASSERT_OK_AND_ASSIGN(
      process, ChildProcess::Start({"tests/fault_worker", "--fault", "prepare=burn"}, options));
  EXPECT_TRUE(process.Wait(absl::Seconds(60)));
  EXPECT_EQ(process.exit_code(), 2);
}

}  // namespace
}  // namespace testing
}  // namespace lockstep
