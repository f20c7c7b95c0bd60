// The closed-loop measurement: see bench_serve.h.
#include "tools/cli/bench_serve.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <limits>
#include <mutex>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "proto/inference.grpc.pb.h"
#include "proto/model.grpc.pb.h"

namespace lockstep {
namespace cli {
namespace {

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inference::v1::GenerateRequest MakeRequest(const BenchOptions& options, std::mt19937_64* random) {
  inference::v1::GenerateRequest request;
  for (int i = 0; i < options.prompt_tokens; ++i) {
    request.mutable_token_ids()->add_ids(
        static_cast<int32_t>((*random)() % static_cast<uint64_t>(options.vocab_size)));
  }
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_max_tokens(options.max_tokens);
  request.mutable_stopping()->set_ignore_eos(true);
  request.mutable_cache()->set_bypass(!options.prefix_cache);
  return request;
}

absl::Status ToAbsl(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

// One call. Its events are taken by the threads of the gRPC library: a thread of its own for every
// stream would cost the machine more wake-ups, which the server may need, than the call itself.
class AnswerReader : public grpc::ClientReadReactor<inference::v1::GenerateEvent> {
 public:
  AnswerReader(inference::v1::InferenceService::Stub* stub,
               const inference::v1::GenerateRequest& request, RequestTrace* trace)
      : trace_(trace) {
    trace_->sent = Now();
    stub->async()->Generate(&context_, &request, this);
    StartRead(&event_);
    StartCall();
  }

  // Blocks until the call has ended; `request` and `trace` may go then.
  absl::Status Wait() {
    std::unique_lock<std::mutex> lock(mu_);
    ended_.wait(lock, [this] { return done_; });
    return status_;
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    trace_->tokens.insert(trace_->tokens.end(),
                          static_cast<size_t>(event_.delta().token_ids_size()), Now());
    StartRead(&event_);
  }

  void OnDone(const grpc::Status& status) override {
    std::lock_guard<std::mutex> lock(mu_);
    status_ = ToAbsl(status);
    done_ = true;
    ended_.notify_one();  // under the lock: the waiting thread destroys this right after
  }

 private:
  grpc::ClientContext context_;
  inference::v1::GenerateEvent event_;
  RequestTrace* const trace_;
  std::mutex mu_;
  std::condition_variable ended_;
  bool done_ = false;    // guarded by mu_
  absl::Status status_;  // guarded by mu_
};

absl::Status ReadStatus(const std::shared_ptr<grpc::Channel>& channel,
                        inference::v1::ServerStatus* status) {
  grpc::ClientContext context;
  return ToAbsl(
      inference::v1::ModelService::NewStub(channel)->GetServerStatus(&context, {}, status));
}

int64_t Counter(const inference::v1::ServerStatus& status, const char* name) {
  const auto found = status.counters().find(name);
  return found == status.counters().end() ? 0 : found->second;
}

absl::Status RunStream(const std::shared_ptr<grpc::Channel>& channel, const BenchOptions& options,
                       int stream, std::vector<RequestTrace>* traces) {
  const auto stub = inference::v1::InferenceService::NewStub(channel);
  std::mt19937_64 random(options.seed * 1000003 + static_cast<uint64_t>(stream));
  for (int i = 0; i <= options.requests; ++i) {
    RequestTrace trace;
    const inference::v1::GenerateRequest request = MakeRequest(options, &random);
    const absl::Status status = AnswerReader(stub.get(), request, &trace).Wait();
    if (!status.ok()) return status;
    if (i > 0) traces->push_back(std::move(trace));  // the first one warms up
  }
  return absl::OkStatus();
}

}  // namespace

double Percentile(std::vector<double> sample, double fraction) {
  if (sample.empty()) return 0;
  std::sort(sample.begin(), sample.end());
  const double rank = std::ceil(fraction * static_cast<double>(sample.size()));
  return sample[static_cast<size_t>(std::max(1.0, rank)) - 1];
}

BenchResult Summarize(int concurrency, const std::vector<std::vector<RequestTrace>>& streams) {
  BenchResult result;
  result.concurrency = concurrency;
  double begin = 0, end = std::numeric_limits<double>::infinity();
  std::vector<double> first_token, inter_token, arrivals;
  for (const std::vector<RequestTrace>& stream : streams) {
    double last = 0, first = std::numeric_limits<double>::infinity();
    for (const RequestTrace& trace : stream) {
      ++result.requests;
      if (trace.tokens.empty()) continue;
      first_token.push_back(1e3 * (trace.tokens.front() - trace.sent));
      for (size_t i = 1; i < trace.tokens.size(); ++i) {
        inter_token.push_back(1e3 * (trace.tokens[i] - trace.tokens[i - 1]));
      }
      first = std::min(first, trace.tokens.front());
      last = std::max(last, trace.tokens.back());
    }
    begin = std::max(begin, first);
    end = std::min(end, last);
  }
  for (const std::vector<RequestTrace>& stream : streams) {
    for (const RequestTrace& trace : stream) {
      for (const double time : trace.tokens) {
        if (time >= begin && time <= end) arrivals.push_back(time);
      }
    }
  }
  std::sort(arrivals.begin(), arrivals.end());
  for (size_t i = 1; i < arrivals.size(); ++i) {
    result.window_seconds += arrivals[i] - arrivals[i - 1];
  }
  result.output_tokens = std::max<int64_t>(0, static_cast<int64_t>(arrivals.size()) - 1);
  if (result.window_seconds > 0) {
    result.tokens_per_second = static_cast<double>(result.output_tokens) / result.window_seconds;
  }
  result.ttft_p50 = Percentile(first_token, 0.5);
  result.ttft_p99 = Percentile(first_token, 0.99);
  result.inter_token_p50 = Percentile(inter_token, 0.5);
  result.inter_token_p99 = Percentile(inter_token, 0.99);
  return result;
}

void SummarizeSteps(const inference::v1::ServerStatus& before,
                    const inference::v1::ServerStatus& after, double wall_seconds,
                    BenchResult* result) {
  result->steps = Counter(after, "steps") - Counter(before, "steps");
  if (result->steps <= 0) return;
  const double steps = static_cast<double>(result->steps);
  const int64_t micros = Counter(after, "step_micros_total") - Counter(before, "step_micros_total");
  result->step_ms = 1e-3 * static_cast<double>(micros) / steps;
  result->wall_ms_per_step = 1e3 * wall_seconds / steps;
  if (micros > 0) result->wall_per_step_ratio = result->wall_ms_per_step / result->step_ms;
}

absl::StatusOr<BenchResult> RunBench(const std::shared_ptr<grpc::Channel>& channel,
                                     const BenchOptions& options) {
  const size_t count = static_cast<size_t>(options.concurrency);
  std::vector<std::vector<RequestTrace>> traces(count);
  std::vector<absl::Status> statuses(count);
  std::vector<std::thread> threads;
  inference::v1::ServerStatus before, after;
  absl::Status read = ReadStatus(channel, &before);
  if (!read.ok()) return read;
  const double begin = Now();
  for (size_t i = 0; i < count; ++i) {
    threads.emplace_back(
        [&, i]() { statuses[i] = RunStream(channel, options, static_cast<int>(i), &traces[i]); });
  }
  for (std::thread& thread : threads) thread.join();
  const double wall_seconds = Now() - begin;
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  read = ReadStatus(channel, &after);
  if (!read.ok()) return read;
  BenchResult result = Summarize(options.concurrency, traces);
  SummarizeSteps(before, after, wall_seconds, &result);
  return result;
}

}  // namespace cli
}  // namespace lockstep
