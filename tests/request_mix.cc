#include "tests/request_mix.h"

#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace lockstep {
namespace testing {

using inference::v1::GenerateEvent;
using inference::v1::GenerateRequest;

GenerateRequest MixedRequest(int i, int max_tokens) {
  GenerateRequest request;
  for (int j = 0; j < 3 + (i * 37) % 150; ++j) {
    request.mutable_token_ids()->add_ids((i * 7919 + j * 104729) % 300);
  }
  auto* sampling = request.mutable_sampling();
  sampling->set_max_tokens(max_tokens);
  if (i % 2 == 0) {
    sampling->set_temperature(0);
  } else {
    sampling->set_temperature(0.9f);
    sampling->set_top_p(0.95f);
    sampling->set_presence_penalty(0.4f);
    sampling->set_repetition_penalty(1.1f);
    sampling->set_min_tokens(5);
    sampling->set_seed(static_cast<uint64_t>(i));
  }
  request.mutable_stopping()->set_ignore_eos(true);
  return request;
}

Answer ReadAnswer(inference::v1::InferenceService::Stub* stub, const GenerateRequest& request,
                  std::atomic<int64_t>* tokens) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Minutes(4)));
  auto stream = stub->Generate(&context, request);
  Answer answer;
  GenerateEvent event;
  uint64_t last = 0;
  while (stream->Read(&event)) {
    ++answer.events;
    const uint64_t first = event.first_sequence() > 0 ? event.first_sequence() : event.sequence();
    if (first != last + 1) answer.breach = absl::StrCat("event ", first, " follows ", last);
    last = event.sequence();
    if (answer.finished > 0) answer.breach = "an event follows the end";
    if (event.has_delta()) {
      answer.ids.insert(answer.ids.end(), event.delta().token_ids().begin(),
                        event.delta().token_ids().end());
      if (tokens != nullptr) *tokens += event.delta().token_ids_size();
    }
    if (event.has_finished()) {
      ++answer.finished;
      answer.digest = event.finished().determinism_digest();
      answer.recoveries = event.finished().recoveries();
    }
  }
  answer.status = stream->Finish();
  return answer;
}

std::vector<Answer> ReadAnswers(inference::v1::InferenceService::Stub* stub, int count,
                                int max_tokens, int64_t after,
                                const std::function<void()>& disturb) {
  std::vector<Answer> answers(static_cast<size_t>(count));
  std::atomic<int64_t> tokens{0};
  std::atomic<int> ended{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      answers[static_cast<size_t>(i)] = ReadAnswer(stub, MixedRequest(i, max_tokens), &tokens);
      ++ended;
    });
  }
  while (disturb && tokens < after && ended < count) absl::SleepFor(absl::Milliseconds(1));
  if (disturb) disturb();
  for (std::thread& thread : threads) thread.join();
  return answers;
}

std::string Difference(const Answer& found, const Answer& wanted) {
  if (!found.status.ok()) {
    return absl::StrCat("it ended with code ", found.status.error_code(), ": ",
                        found.status.error_message());
  }
  if (!found.breach.empty()) return found.breach;
  if (found.finished != 1) return absl::StrCat(found.finished, " ends");
  if (found.ids != wanted.ids) {
    return absl::StrCat("ids ", absl::StrJoin(found.ids, " "), ", wanted ",
                        absl::StrJoin(wanted.ids, " "));
  }
  if (found.digest != wanted.digest) return "the digest differs";
  return "";
}

void ExpectSameAnswers(const std::vector<Answer>& found, const std::vector<Answer>& wanted) {
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_EQ(Difference(found[i], wanted[i]), "") << i;
}

}  // namespace testing
}  // namespace lockstep
