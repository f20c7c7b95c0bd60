#include "coordinator/engine_test_util.h"

#include <chrono>
#include <thread>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/hash.h"

namespace lockstep {
namespace testing {
namespace {

constexpr int32_t kVocabSize = 1000;
constexpr std::chrono::seconds kPatience{30};

FakeStepOptions TransportFor(const EngineOptions& options) {
  FakeStepOptions fake;
  fake.kv_blocks = options.kv_blocks;
  fake.slots = options.slots;
  fake.snapshots = options.snapshots;
  fake.max_batch_tokens = options.max_batch_tokens;
  fake.max_logit_rows = std::max(options.max_logit_rows, options.slots);
  fake.vocab_size = kVocabSize;
  return fake;
}

FakeStepOptions WithChange(
    FakeStepOptions options,
    std::function<void(const worker::v1::StepPlan&, worker::v1::StepResult*)> change) {
  options.change = std::move(change);
  return options;
}

}  // namespace

void RecordingSink::OnEvent(inference::v1::GenerateEvent event) {
  std::lock_guard<std::mutex> lock(mu_);
  const auto note = [&](const std::string& what) {
    if (breach_.empty()) breach_ = absl::StrCat(what, ": ", event.ShortDebugString());
  };
  if (done_) note("event after OnDone");
  const auto index = static_cast<size_t>(event.output_index());
  if (index >= outputs_.size()) {
    note("no such output");
    return;
  }
  Output& output = outputs_[index];
  if (event.sequence() != output.last_sequence + 1) note("gap in the sequence");
  if ((event.sequence() == 1) != event.has_accepted()) note("Accepted is not the first event");
  if (output.finished) note("event after Finished");
  output.last_sequence = event.sequence();
  if (event.has_accepted()) output.accepted = event.accepted();
  if (event.has_delta()) {
    if (event.delta().token_ids_size() > 0 &&
        event.delta().token_offset() != static_cast<int64_t>(output.ids.size())) {
      note("wrong token_offset");
    }
    for (const int32_t id : event.delta().token_ids()) output.ids.push_back(id);
    for (const auto& logprobs : event.delta().logprobs()) output.logprobs.push_back(logprobs);
    output.text += event.delta().text();
  }
  if (event.has_finished()) {
    output.finished = true;
    output.end = event.finished();
  }
  changed_.notify_all();
}

void RecordingSink::OnDone(const absl::Status& status) {
  std::lock_guard<std::mutex> lock(mu_);
  if (done_) breach_ = "second OnDone";
  if (status.ok()) {
    for (const Output& output : outputs_) {
      if (!output.finished) breach_ = "OK although an output has not finished";
    }
  }
  done_ = true;
  status_ = status;
  changed_.notify_all();
}

bool RecordingSink::WaitDone() {
  std::unique_lock<std::mutex> lock(mu_);
  return changed_.wait_for(lock, kPatience, [this] { return done_; });
}

bool RecordingSink::WaitTokens(size_t count, int32_t output) {
  std::unique_lock<std::mutex> lock(mu_);
  return changed_.wait_for(lock, kPatience, [&] {
    return done_ || outputs_[static_cast<size_t>(output)].ids.size() >= count;
  });
}

bool RecordingSink::done() const {
  std::lock_guard<std::mutex> lock(mu_);
  return done_;
}
absl::Status RecordingSink::status() const {
  std::lock_guard<std::mutex> lock(mu_);
  return status_;
}
RecordingSink::Output RecordingSink::output(int32_t index) const {
  std::lock_guard<std::mutex> lock(mu_);
  return outputs_[static_cast<size_t>(index)];
}
std::string RecordingSink::breach() const {
  std::lock_guard<std::mutex> lock(mu_);
  return breach_;
}

std::vector<int32_t> MakePrompt(int64_t length, uint64_t seed, int32_t vocab_size) {
  std::vector<int32_t> prompt;
  for (int64_t i = 0; i < length; ++i) {
    const uint64_t draw = Mix64(seed * 1000003 + static_cast<uint64_t>(i));
    prompt.push_back(static_cast<int32_t>(draw % static_cast<uint64_t>(vocab_size)));
  }
  return prompt;
}

GenerationSpec MakeSpec(const std::string& id, std::vector<int32_t> prompt, int32_t max_tokens) {
  GenerationSpec spec;
  spec.request_id = id;
  spec.body_digest = HashBytes(id);
  spec.prompt_ids = std::move(prompt);
  spec.max_tokens = max_tokens;
  spec.detokenize = false;
  spec.sampling.set_seed(HashBytes(id, 1));
  spec.sampling.set_num_logprobs(-1);
  return spec;
}

EngineOptions SmallEngine() {
  EngineOptions options;
  options.max_context = 4096;
  options.kv_blocks = 64;
  options.slots = 4;
  options.snapshots = 8;
  options.max_batch_tokens = 128;
  options.max_logit_rows = 16;
  options.snapshot_interval = 128;
  return options;
}

EngineFixture::EngineFixture(
    const EngineOptions& engine_options,
    std::function<void(const worker::v1::StepPlan&, worker::v1::StepResult*)> change,
    const Tokenizer* tokenizer)
    : options(engine_options),
      transport(WithChange(TransportFor(engine_options), std::move(change))),
      engine(engine_options, &transport, tokenizer) {
  engine.Start(1, 1);
}

std::shared_ptr<RecordingSink> EngineFixture::Submit(const GenerationSpec& spec) {
  auto sink = std::make_shared<RecordingSink>(spec.n);
  const absl::Status status = engine.Submit(spec, sink);
  CHECK(status.ok()) << status.ToString();
  return sink;
}

bool EngineFixture::WaitIdle() {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!engine.idle()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

FakeStepTransport::Expected EngineFixture::Expect(const GenerationSpec& spec, int32_t index) {
  worker::v1::SamplingSpec sampling = spec.sampling;
  sampling.set_output_index(static_cast<uint32_t>(index));
  return FakeStepTransport::Run(spec.prompt_ids, sampling, kVocabSize, spec.max_tokens);
}

std::string Difference(const RecordingSink& sink, const GenerationSpec& spec, int32_t index) {
  if (!sink.breach().empty()) return sink.breach();
  if (!sink.status().ok()) return sink.status().ToString();
  const RecordingSink::Output output = sink.output(index);
  const FakeStepTransport::Expected expected = EngineFixture::Expect(spec, index);
  const auto count = static_cast<size_t>(output.end.usage().completion_tokens());
  if (count == 0 || count > expected.ids.size()) return absl::StrCat(count, " tokens");
  uint64_t fold = 0;
  for (size_t i = 0; i < count; ++i) fold = Fold64(fold, expected.digests[i]);
  for (size_t i = 0; i < output.ids.size(); ++i) {
    if (output.ids[i] != expected.ids[i]) return absl::StrCat("token ", i, " differs");
  }
  if (output.end.reason() == inference::v1::MAX_TOKENS &&
      output.ids.size() != expected.ids.size()) {
    return "too few tokens";
  }
  return output.end.determinism_digest() == fold ? "" : "the digest differs";
}

std::string Leaks(const Engine& engine) {
  EngineStats stats = engine.stats();
  std::string leaks;
  if (stats.kv_blocks_active != 0)
    absl::StrAppend(&leaks, stats.kv_blocks_active, " blocks held; ");
  if (stats.kv_blocks_free + stats.kv_blocks_cached != stats.kv_blocks_total) {
    absl::StrAppend(&leaks, "blocks are lost; ");
  }
  if (stats.slots_free != stats.slots_total) absl::StrAppend(&leaks, "slots are lost; ");
  if (stats.requests_running != 0 || stats.requests_queued != 0) {
    absl::StrAppend(&leaks, "requests remain; ");
  }
  auto& c = stats.counters;
  if (c["requests_started"] !=
      c["requests_finished"] + c["requests_failed"] + c["requests_cancelled"]) {
    absl::StrAppend(&leaks, "the counters of requests do not balance; ");
  }
  return leaks;
}

}  // namespace testing
}  // namespace lockstep
