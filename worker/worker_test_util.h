// What the tests of a worker's service are made of: a worker with a FakeModel behind a real server
// on a free port, groups of them, and the requests of a small epoch (term 1).
#pragma once

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/hash.h"
#include "proto/error_details.pb.h"
#include "proto/worker.grpc.pb.h"
#include "worker/fake_model.h"
#include "worker/worker.h"
#include "worker/worker_service.h"

namespace lockstep {
namespace worker_test {

namespace pb = worker::v1;

constexpr uint64_t kDigest = 0xfeed;

// Loads a FakeModel; waits in the middle while `hold` is not ready.
struct FakeLoader {
  std::shared_future<void> hold;
  std::atomic<int> loads{0};
  absl::Status fail;
  std::function<void()> dry_run;
  std::function<absl::Status()> forward;

  absl::StatusOr<LoadedModel> operator()(const LoadSpec& spec, const LoadProgressFn& progress) {
    ++loads;
    pb::LoadModelProgress p;
    p.set_phase("load");
    p.set_bytes_total(100);
    progress(p);
    if (hold.valid()) hold.wait();
    if (!fail.ok()) return fail;
    FakeModelOptions options;
    options.rank = spec.rank;
    options.world = spec.world;
    options.on_dry_run = [this] {
      if (dry_run) dry_run();
    };
    options.fail = [this] { return forward ? forward() : absl::OkStatus(); };
    LoadedModel loaded;
    loaded.model = std::make_unique<FakeModel>(options);
    loaded.model_digest = kDigest;
    loaded.result.set_vocab_size(loaded.model->vocab_size());
    return loaded;
  }
};

// A worker behind a real server on a free port.
class Server {
 public:
  // Empty hooks change nothing.
  struct Hooks {
    std::function<ModelLoader(ModelLoader)> wrap_loader;
    std::function<std::unique_ptr<grpc::Service>(Worker*)> make_service;
  };
  explicit Server(WorkerOptions options = WorkerOptions(), const Hooks& hooks = Hooks()) {
    options.threads = 1;
    options.loader = [this](const LoadSpec& spec, Counters*, const LoadProgressFn& progress) {
      return loader(spec, progress);
    };
    if (hooks.wrap_loader) options.loader = hooks.wrap_loader(options.loader);
    worker_ = std::make_unique<Worker>(options);
    if (hooks.make_service) {
      service_ = hooks.make_service(worker_.get());
    } else {
      service_ = std::make_unique<WorkerServiceImpl>(worker_.get());
    }
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(service_.get());
    server_ = builder.BuildAndStart();
    stub = pb::WorkerService::NewStub(
        grpc::CreateChannel(absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials()));
  }
  ~Server() { server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1)); }

  grpc::Status Load(const pb::LoadModelRequest& request, pb::LoadModelResult* result = nullptr) {
    grpc::ClientContext context;
    auto reader = stub->LoadModel(&context, request);
    pb::LoadModelProgress progress;
    while (reader->Read(&progress)) {
      if (result != nullptr && progress.has_result()) *result = progress.result();
    }
    return reader->Finish();
  }
  template <typename Request, typename Response>
  grpc::Status Call(grpc::Status (pb::WorkerService::Stub::*method)(grpc::ClientContext*,
                                                                    const Request&, Response*),
                    const Request& request, Response* response) {
    grpc::ClientContext context;
    return (stub.get()->*method)(&context, request, response);
  }
  pb::HealthResponse Health() {
    pb::HealthResponse response;
    EXPECT_TRUE(Call(&pb::WorkerService::Stub::Health, pb::HealthRequest(), &response).ok());
    return response;
  }

  FakeLoader loader;
  std::unique_ptr<pb::WorkerService::Stub> stub;

 private:
  std::unique_ptr<Worker> worker_;
  std::unique_ptr<grpc::Service> service_;
  std::unique_ptr<grpc::Server> server_;
};

using Stub = pb::WorkerService::Stub;
using Stream = grpc::ClientReaderWriter<pb::StepRequest, pb::StepResult>;

inline pb::LoadModelRequest LoadRequest(int rank, int world) {
  pb::LoadModelRequest request;
  request.set_term(1);
  request.set_path("model");
  request.set_rank(rank);
  request.set_world(world);
  return request;
}

inline pb::ConfigureRequest Limits(uint64_t epoch, int64_t kv_blocks = 16) {
  pb::ConfigureRequest r;
  r.set_term(1);
  r.set_epoch(epoch);
  r.set_kv_blocks(kv_blocks);
  r.set_slots(4);
  r.set_snapshots(2);
  r.set_max_batch_tokens(128);
  r.set_max_batch_sequences(4);
  r.set_max_logit_rows(16);
  r.set_max_sequence_blocks(4);
  return r;
}

inline pb::StepRequest Step(uint64_t epoch, uint64_t id, uint64_t previous_digest,
                            const pb::StepPlan& plan) {
  pb::StepRequest request;
  request.set_term(1);
  request.set_epoch(epoch);
  request.set_step_id(id);
  request.set_plan(plan.SerializeAsString());
  request.set_batch_digest(Fold64(previous_digest, HashBytes(request.plan())));
  return request;
}

inline pb::StepPlan Begin(uint64_t generation = 1) {
  pb::StepPlan plan;
  pb::SequenceEntry* e = plan.add_sequences();
  e->set_generation(generation);
  e->mutable_begin()->set_restore_snapshot(-1);
  for (int id : {5, 6, 7}) e->add_token_ids(id);
  e->add_new_blocks(0);
  e->set_num_logits(1);
  e->set_sample(true);
  return plan;
}

// Servers of a group, brought to READY.
class Group {
 public:
  explicit Group(int world, const Server::Hooks& hooks = Server::Hooks()) {
    for (int r = 0; r < world; ++r) {
      servers.emplace_back(WorkerOptions(), hooks);
      EXPECT_TRUE(at(r).Load(LoadRequest(r, world)).ok());
    }
  }
  Server& at(int r) { return servers[static_cast<size_t>(r)]; }

  void Join(uint64_t epoch, int64_t kv_blocks = 16) {
    const int world = static_cast<int>(servers.size());
    pb::InitCommRequest init;
    init.set_term(1);
    init.set_epoch(epoch);
    for (int r = 0; r < world; ++r) {
      pb::PrepareCommRequest prepare;
      prepare.set_term(1);
      prepare.set_epoch(epoch);
      pb::PrepareCommResponse response;
      const grpc::Status status = at(r).Call(&Stub::PrepareComm, prepare, &response);
      ASSERT_TRUE(status.ok()) << status.error_message();
      init.add_addresses(response.address());
    }
    std::vector<std::thread> threads;
    std::vector<pb::InitCommResponse> joined(servers.size());
    for (int r = 0; r < world; ++r) {
      threads.emplace_back([&, r, init]() mutable {
        init.set_rank(r);
        const grpc::Status status =
            at(r).Call(&Stub::InitComm, init, &joined[static_cast<size_t>(r)]);
        EXPECT_TRUE(status.ok()) << status.error_message();
      });
    }
    for (std::thread& t : threads) t.join();
    for (const auto& j : joined) EXPECT_EQ(j.self_test(), joined[0].self_test());
    EXPECT_EQ(joined[0].transport(), world > 1 ? "process" : "solo");
    for (int r = 0; r < world; ++r) {
      pb::ConfigureResponse response;
      const grpc::Status status = at(r).Call(&Stub::Configure, Limits(epoch, kv_blocks), &response);
      ASSERT_TRUE(status.ok()) << status.error_message();
      EXPECT_GT(response.cache_bytes(), 0);
      EXPECT_EQ(at(r).Health().state(), pb::READY);
    }
  }

  std::deque<Server> servers;
};

inline std::string ReasonOf(const grpc::Status& status) {
  google::rpc::Status details;
  google::rpc::ErrorInfo info;
  details.ParseFromString(status.error_details());
  if (details.details_size() > 0) details.details(0).UnpackTo(&info);
  return info.reason();
}

#define EXPECT_REFUSED(status, text)                                       \
  do {                                                                     \
    const grpc::Status refused = (status);                                 \
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::FAILED_PRECONDITION) \
        << refused.error_message();                                        \
    EXPECT_THAT(refused.error_message(), ::testing::HasSubstr(text));      \
  } while (false)

}  // namespace worker_test
}  // namespace lockstep
