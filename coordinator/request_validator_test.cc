// Every refusal of the validator has its code, reason and field path; every default is filled in.
#include "coordinator/request_validator.h"

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/errors.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "models/tokenizer/fake_tokenizer.h"
#include "proto/error_details.pb.h"

namespace lockstep {
namespace {

using inference::v1::GenerateRequest;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kVocab = 300;
constexpr int64_t kContext = 32;

ServedModel MakeModel(bool with_tokenizer = true) {
  ServedModel model;
  model.name = "tiny";
  model.aliases = {"tiny-alias"};
  model.vocab_size = kVocab;
  model.max_context = kContext;
  model.eos_token_ids = {FakeTokenizer::kEndOfText, FakeTokenizer::kImEnd};
  if (with_tokenizer) {
    model.tokenizer = std::make_shared<FakeTokenizer>();
    model.has_chat_template = true;
  }
  return model;
}

RequestContext MakeContext() {
  RequestContext context;
  context.now = absl::FromUnixSeconds(1000);
  context.fresh_request_id = "fresh";
  context.fresh_seed = 77;
  return context;
}

absl::StatusOr<GenerationSpec> Validate(const GenerateRequest& request,
                                        const ServedModel& model = MakeModel()) {
  return ValidateGenerateRequest(request, model, MakeContext());
}

GenerateRequest WithIds(int count) {
  GenerateRequest request;
  for (int i = 0; i < count; ++i) request.mutable_token_ids()->add_ids(i % kVocab);
  return request;
}

google::rpc::ErrorInfo InfoOf(const absl::Status& status) {
  google::rpc::Status wire;
  google::rpc::ErrorInfo info;
  EXPECT_TRUE(wire.ParseFromString(DetailsOf(status)));
  EXPECT_TRUE(wire.details_size() > 0 && wire.details(0).UnpackTo(&info));
  return info;
}

std::string FieldOf(const absl::Status& status) {
  google::rpc::Status wire;
  google::rpc::BadRequest bad_request;
  EXPECT_TRUE(wire.ParseFromString(DetailsOf(status)));
  for (const auto& detail : wire.details()) {
    if (detail.UnpackTo(&bad_request)) return bad_request.field_violations(0).field();
  }
  return "";
}

struct Refusal {
  const char* name;
  std::function<void(GenerateRequest*)> change;  // of a request that is fine
  const char* reason;
  const char* field;
  const char* message;  // a part of it
};

void ExpectRefusals(const std::vector<Refusal>& refusals) {
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(refusal.name);
    GenerateRequest request = WithIds(4);
    ASSERT_OK(Validate(request));
    refusal.change(&request);
    const absl::Status status = Validate(request).status();
    ASSERT_THAT(status,
                testing::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(refusal.message)));
    EXPECT_EQ(ReasonOf(status), refusal.reason);
    EXPECT_EQ(FieldOf(status), refusal.field);
  }
}

TEST(RequestValidatorTest, RefusesSamplingValues) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  using R = GenerateRequest*;
  const char* const kRange = "SAMPLING_OUT_OF_RANGE";
  std::vector<Refusal> refusals;
  const auto add = [&](const char* field, std::vector<float> values,
                       std::function<void(R, float)> set) {
    for (const float value : values) {
      refusals.push_back(
          {field, [set, value](R r) { set(r, value); }, kRange, field, "must be a number in"});
    }
  };
  add("sampling.temperature", {nan, inf, -inf, -0.5f, 100.5f},
      [](R r, float v) { r->mutable_sampling()->set_temperature(v); });
  add("sampling.top_p", {nan, inf, 0.0f, -1.0f, 1.5f},
      [](R r, float v) { r->mutable_sampling()->set_top_p(v); });
  add("sampling.min_p", {nan, -0.1f, 1.1f},
      [](R r, float v) { r->mutable_sampling()->set_min_p(v); });
  add("sampling.presence_penalty", {nan, inf, -2.1f, 2.1f},
      [](R r, float v) { r->mutable_sampling()->set_presence_penalty(v); });
  add("sampling.frequency_penalty", {nan, -inf, -2.1f, 2.1f},
      [](R r, float v) { r->mutable_sampling()->set_frequency_penalty(v); });
  add("sampling.repetition_penalty", {nan, inf, 0.0f, -1.0f, 10.5f},
      [](R r, float v) { r->mutable_sampling()->set_repetition_penalty(v); });
  add("sampling.logit_bias[0].bias", {nan, inf, -100.5f, 100.5f},
      [](R r, float v) { r->mutable_sampling()->add_logit_bias()->set_bias(v); });
  refusals.push_back({"top_k", [](R r) { r->mutable_sampling()->set_top_k(-1); }, kRange,
                      "sampling.top_k", "at least 0"});
  refusals.push_back(
      {"n zero", [](R r) { r->mutable_sampling()->set_n(0); }, kRange, "sampling.n", "at least 1"});
  refusals.push_back({"min_tokens", [](R r) { r->mutable_sampling()->set_min_tokens(-1); }, kRange,
                      "sampling.min_tokens", "at least 0"});
  refusals.push_back({"max_tokens", [](R r) { r->mutable_sampling()->set_max_tokens(0); }, kRange,
                      "sampling.max_tokens", "at least 1"});
  refusals.push_back({"two biases",
                      [](R r) {
                        r->mutable_sampling()->add_logit_bias();
                        r->mutable_sampling()->add_logit_bias();
                      },
                      kRange, "sampling.logit_bias[1].token_id", "two biases"});
  refusals.push_back({"nothing allowed",
                      [](R r) {
                        r->mutable_sampling()->add_allowed_token_ids(5);
                        r->mutable_sampling()->add_banned_token_ids(5);
                      },
                      kRange, "sampling.allowed_token_ids", "no token is left"});
  refusals.push_back({"all banned",
                      [](R r) {
                        for (int i = 0; i < kVocab; ++i) {
                          r->mutable_sampling()->add_banned_token_ids(i);
                        }
                      },
                      kRange, "sampling.banned_token_ids", "no token is left"});
  refusals.push_back({"only ends allowed, min_tokens",
                      [](R r) {
                        r->mutable_sampling()->add_allowed_token_ids(FakeTokenizer::kEndOfText);
                        r->mutable_sampling()->set_min_tokens(1);
                      },
                      kRange, "sampling.allowed_token_ids", "no token is left"});
  ExpectRefusals(refusals);
}

TEST(RequestValidatorTest, RefusesWhatIsOverACap) {
  using R = GenerateRequest*;
  const char* const kLimit = "LIMIT_EXCEEDED";
  ExpectRefusals({
      {"n", [](R r) { r->mutable_sampling()->set_n(17); }, kLimit, "sampling.n", "[1, 16]"},
      {"huge n", [](R r) { r->mutable_sampling()->set_n(1000000000); }, kLimit, "sampling.n",
       "1000000000"},
      {"min > max",
       [](R r) {
         r->mutable_sampling()->set_min_tokens(5);
         r->mutable_sampling()->set_max_tokens(4);
       },
       kLimit, "sampling.min_tokens", "more than sampling.max_tokens"},
      {"biases",
       [](R r) {
         for (int i = 0; i < 1025; ++i) r->mutable_sampling()->add_logit_bias();
       },
       kLimit, "sampling.logit_bias", "1025 entries; at most 1024"},
      {"allowed",
       [](R r) {
         for (int i = 0; i <= kVocab; ++i) r->mutable_sampling()->add_allowed_token_ids(1);
       },
       kLimit, "sampling.allowed_token_ids", "301 entries"},
      {"stops",
       [](R r) {
         for (int i = 0; i < 17; ++i) r->mutable_stopping()->add_stop_strings("x");
       },
       kLimit, "stopping.stop_strings", "at most 16"},
      {"empty stop",
       [](R r) {
         r->mutable_stopping()->add_stop_strings("x");
         r->mutable_stopping()->add_stop_strings("y");
         r->mutable_stopping()->add_stop_strings("");
       },
       kLimit, "stopping.stop_strings[2]", "[1, 1024]"},
      {"1 MB stop", [](R r) { r->mutable_stopping()->add_stop_strings(std::string(1 << 20, 'x')); },
       kLimit, "stopping.stop_strings[0]", "1048576"},
      {"stop ids",
       [](R r) {
         for (int i = 0; i < 65; ++i) r->mutable_stopping()->add_stop_token_ids(1);
       },
       kLimit, "stopping.stop_token_ids", "at most 64"},
      {"logprobs", [](R r) { r->mutable_output()->set_logprobs(21); }, kLimit, "output.logprobs",
       "[-1, 20]"},
      {"logprobs", [](R r) { r->mutable_output()->set_logprobs(-2); }, kLimit, "output.logprobs",
       "[-1, 20]"},
      {"priority", [](R r) { r->set_priority(101); }, kLimit, "priority", "[-100, 100]"},
      {"labels",
       [](R r) {
         for (int i = 0; i < 17; ++i) (*r->mutable_labels())[absl::StrCat(i)] = "v";
       },
       kLimit, "labels", "at most 16"},
      {"label size", [](R r) { (*r->mutable_labels())["k"] = std::string(129, 'v'); }, kLimit,
       "labels", "129"},
      {"queue timeout", [](R r) { r->set_queue_timeout_ms(-1); }, kLimit, "queue_timeout_ms", "-1"},
      {"timeout", [](R r) { r->set_generation_timeout_ms(-1); }, kLimit, "generation_timeout_ms",
       "-1"},
  });
}

TEST(RequestValidatorTest, RefusesInputs) {
  using R = GenerateRequest*;
  ExpectRefusals({
      {"neither", [](R r) { r->clear_token_ids(); }, "INPUT_AMBIGUOUS", "input", "exactly one"},
      {"no ids", [](R r) { r->mutable_token_ids()->clear_ids(); }, "PROMPT_EMPTY", "token_ids.ids",
       "empty"},
      {"no text", [](R r) { r->set_text(""); }, "PROMPT_EMPTY", "text", "empty"},
      {"no messages", [](R r) { r->mutable_chat(); }, "PROMPT_EMPTY", "chat.messages", "empty"},
      {"role",
       [](R r) {
         r->mutable_chat()->add_messages()->set_role("emperor");
         r->mutable_chat()->mutable_messages(0)->set_content("x");
       },
       "CHAT_INVALID", "chat.messages", "emperor"},
      {"utf8", [](R r) { r->set_text("ab\xc3("); }, "INVALID_UTF8", "text", "byte 2"},
      {"id -1", [](R r) { r->mutable_token_ids()->add_ids(-1); }, "TOKEN_OUT_OF_VOCAB",
       "token_ids.ids[4]", "is -1"},
      {"id V", [](R r) { r->mutable_token_ids()->set_ids(1, kVocab); }, "TOKEN_OUT_OF_VOCAB",
       "token_ids.ids[1]", "[0, 300)"},
      {"id max", [](R r) { r->mutable_token_ids()->set_ids(0, 2147483647); }, "TOKEN_OUT_OF_VOCAB",
       "token_ids.ids[0]", "2147483647"},
      {"allowed", [](R r) { r->mutable_sampling()->add_allowed_token_ids(kVocab); },
       "TOKEN_OUT_OF_VOCAB", "sampling.allowed_token_ids[0]", "300"},
      {"banned", [](R r) { r->mutable_sampling()->add_banned_token_ids(-1); }, "TOKEN_OUT_OF_VOCAB",
       "sampling.banned_token_ids[0]", "-1"},
      {"bias", [](R r) { r->mutable_sampling()->add_logit_bias()->set_token_id(2147483647); },
       "TOKEN_OUT_OF_VOCAB", "sampling.logit_bias[0].token_id", "2147483647"},
      {"stop id", [](R r) { r->mutable_stopping()->add_stop_token_ids(kVocab); },
       "TOKEN_OUT_OF_VOCAB", "stopping.stop_token_ids[0]", "300"},
      {"request id", [](R r) { r->set_request_id("a\tb"); }, "REQUEST_ID_INVALID", "request_id",
       "printable"},
      {"request id", [](R r) { r->set_request_id(std::string(129, 'a')); }, "REQUEST_ID_INVALID",
       "request_id", "129 bytes"},
  });
}

TEST(RequestValidatorTest, ContextIsCheckedToTheToken) {
  // limit - 1: one token fits.
  ASSERT_OK_AND_ASSIGN(const GenerationSpec last, Validate(WithIds(kContext - 1)));
  EXPECT_EQ(last.max_tokens, 1);
  EXPECT_TRUE(last.max_tokens_is_context);
  for (const int prompt : {static_cast<int>(kContext), static_cast<int>(kContext) + 1,
                           10 * static_cast<int>(kContext)}) {
    const absl::Status status = Validate(WithIds(prompt)).status();
    ASSERT_THAT(status, testing::StatusIs(absl::StatusCode::kInvalidArgument));
    EXPECT_EQ(ReasonOf(status), "CONTEXT_LENGTH_EXCEEDED");
    EXPECT_EQ(FieldOf(status), "token_ids.ids");
    EXPECT_EQ(InfoOf(status).metadata().at("prompt"), absl::StrCat(prompt));
    EXPECT_EQ(InfoOf(status).metadata().at("limit"), "32");
  }
  GenerateRequest min_fits = WithIds(28);
  min_fits.mutable_sampling()->set_min_tokens(4);
  EXPECT_OK(Validate(min_fits));
  min_fits.mutable_sampling()->set_min_tokens(5);
  EXPECT_EQ(ReasonOf(Validate(min_fits).status()), "CONTEXT_LENGTH_EXCEEDED");
}

TEST(RequestValidatorTest, MaxTokensBeyondTheContextIsRefused) {
  GenerateRequest request = WithIds(20);
  request.mutable_sampling()->set_max_tokens(12);
  ASSERT_OK_AND_ASSIGN(const GenerationSpec spec, Validate(request));
  EXPECT_EQ(spec.max_tokens, 12);
  EXPECT_FALSE(spec.max_tokens_is_context);
  request.mutable_sampling()->set_max_tokens(13);
  const absl::Status status = Validate(request).status();
  EXPECT_EQ(ReasonOf(status), "CONTEXT_LENGTH_EXCEEDED");
  EXPECT_EQ(FieldOf(status), "sampling.max_tokens");
  EXPECT_EQ(InfoOf(status).metadata().at("prompt"), "20");
  EXPECT_EQ(InfoOf(status).metadata().at("max_tokens"), "13");
  EXPECT_EQ(InfoOf(status).metadata().at("limit"), "32");
  request.mutable_sampling()->set_max_tokens(2147483647);
  EXPECT_EQ(ReasonOf(Validate(request).status()), "CONTEXT_LENGTH_EXCEEDED");
}

TEST(RequestValidatorTest, UnknownModelNamesWhatIsServed) {
  GenerateRequest request = WithIds(1);
  request.set_model("other");
  const absl::Status status = Validate(request).status();
  EXPECT_THAT(status,
              testing::StatusIs(absl::StatusCode::kNotFound, HasSubstr("tiny, tiny-alias")));
  EXPECT_EQ(ReasonOf(status), "MODEL_NOT_FOUND");
  for (const char* name : {"", "tiny", "tiny-alias"}) {
    request.set_model(name);
    EXPECT_OK(Validate(request)) << name;
  }
}

TEST(RequestValidatorTest, WithoutTokenizerTextIsUnsupported) {
  using R = GenerateRequest*;
  const std::pair<const char*, std::function<void(R)>> cases[] = {
      {"send token_ids", [](R r) { r->set_text("hello"); }},
      {"send token_ids", [](R r) { r->mutable_chat()->add_messages()->set_role("user"); }},
      {"send stop_token_ids", [](R r) { r->mutable_stopping()->add_stop_strings("x"); }},
      {"output.detokenize", [](R r) { r->mutable_output()->set_detokenize(true); }},
      {"output.echo", [](R r) { r->mutable_output()->set_echo(true); }},
  };
  const ServedModel model = MakeModel(/*with_tokenizer=*/false);
  for (const auto& [message, change] : cases) {
    GenerateRequest request = WithIds(2);
    change(&request);
    const absl::Status status = Validate(request, model).status();
    EXPECT_THAT(status, testing::StatusIs(absl::StatusCode::kUnimplemented, HasSubstr(message)));
    EXPECT_EQ(ReasonOf(status), "FEATURE_UNSUPPORTED");
  }
  ASSERT_OK_AND_ASSIGN(const GenerationSpec spec, Validate(WithIds(2), model));
  EXPECT_FALSE(spec.detokenize);
}

TEST(RequestValidatorTest, ExtremeButLegalValuesPass) {
  GenerateRequest request = WithIds(3);
  const float denormal = std::numeric_limits<float>::denorm_min();
  auto* sampling = request.mutable_sampling();
  sampling->set_temperature(denormal);
  sampling->set_top_p(denormal);
  sampling->set_min_p(denormal);
  sampling->set_presence_penalty(-denormal);
  sampling->set_frequency_penalty(denormal);
  sampling->set_repetition_penalty(denormal);
  auto* bias = sampling->add_logit_bias();
  bias->set_token_id(kVocab - 1);
  bias->set_bias(-denormal);
  ASSERT_OK_AND_ASSIGN(const GenerationSpec spec, Validate(request));
  EXPECT_EQ(spec.sampling.temperature(), denormal);
  EXPECT_EQ(spec.sampling.bias_ids(0), kVocab - 1);
  request = WithIds(3);
  for (int i = 0; i < 300000; ++i) request.mutable_sampling()->add_logit_bias()->set_token_id(i);
  EXPECT_EQ(ReasonOf(Validate(request).status()), "LIMIT_EXCEEDED");
  // White space is text like any other.
  request.Clear();
  request.set_text(" \n\t ");
  ASSERT_OK_AND_ASSIGN(const GenerationSpec spaces, Validate(request));
  EXPECT_EQ(spaces.prompt_ids.size(), 4u);
}

TEST(RequestValidatorTest, UnsetMeansDefault) {
  ASSERT_OK_AND_ASSIGN(const GenerationSpec spec, Validate(WithIds(3)));
  EXPECT_EQ(spec.request_id, "fresh");
  EXPECT_THAT(spec.prompt_ids, ElementsAre(0, 1, 2));
  const inference::v1::Sampling& s = spec.effective_sampling;
  EXPECT_EQ(s.temperature(), 1.0f);
  EXPECT_EQ(s.top_k(), 0);
  EXPECT_EQ(s.top_p(), 1.0f);
  EXPECT_EQ(s.repetition_penalty(), 1.0f);
  EXPECT_EQ(s.seed(), 77u);
  EXPECT_EQ(s.n(), 1);
  EXPECT_EQ(s.max_tokens(), kContext - 3);
  EXPECT_TRUE(s.has_min_p() && s.has_presence_penalty() && s.has_frequency_penalty());
  EXPECT_EQ(spec.sampling.num_logprobs(), -1);
  EXPECT_THAT(spec.sampling.stop_ids(), ElementsAre(256, 258));
  EXPECT_TRUE(spec.detokenize);
  EXPECT_TRUE(spec.return_token_ids);
  EXPECT_FALSE(spec.echo);
  EXPECT_EQ(spec.deadline, absl::InfiniteFuture());
  EXPECT_EQ(spec.queue_deadline, absl::InfiniteFuture());
}

TEST(RequestValidatorTest, ExplicitZeroIsZero) {
  GenerateRequest request = WithIds(3);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_seed(0);
  request.mutable_sampling()->set_top_k(0);
  request.mutable_sampling()->set_min_tokens(0);
  request.mutable_output()->set_logprobs(0);
  request.mutable_output()->set_detokenize(false);
  request.mutable_output()->set_return_token_ids(false);
  ASSERT_OK_AND_ASSIGN(const GenerationSpec spec, Validate(request));
  EXPECT_EQ(spec.sampling.temperature(), 0.0f);
  EXPECT_EQ(spec.sampling.seed(), 0u);
  EXPECT_EQ(spec.sampling.num_logprobs(), 0);
  EXPECT_FALSE(spec.detokenize);
  EXPECT_FALSE(spec.return_token_ids);
}

// The deadline of the call ends a request only when the request depends on the call.
TEST(RequestValidatorTest, ADetachableRequestHasNoDeadlineOfACall) {
  const absl::Time now = absl::FromUnixSeconds(1000);
  RequestContext context;
  context.now = now;
  context.rpc_deadline = now + absl::Seconds(1);
  GenerateRequest request;
  request.set_text("Hello");
  request.set_request_id("mine");
  for (const bool detachable : {false, true}) {
    request.set_detachable(detachable);
    request.clear_generation_timeout_ms();
    auto spec = ValidateGenerateRequest(request, MakeModel(), context);
    ASSERT_OK(spec);
    EXPECT_EQ(spec->detachable, detachable);
    EXPECT_EQ(spec->deadline, detachable ? absl::InfiniteFuture() : now + absl::Seconds(1));
    request.set_generation_timeout_ms(5000);
    spec = ValidateGenerateRequest(request, MakeModel(), context);
    ASSERT_OK(spec);
    EXPECT_EQ(spec->deadline, now + absl::Seconds(detachable ? 5 : 1));
  }
}

TEST(RequestValidatorTest, OptionsReachTheSpec) {
  GenerateRequest request;
  request.set_text("Hello world");
  request.set_request_id("mine");
  request.set_priority(-3);
  request.mutable_cache()->set_salt("s");
  request.mutable_cache()->set_bypass(true);
  request.set_queue_timeout_ms(500);
  request.set_generation_timeout_ms(2000);
  auto* sampling = request.mutable_sampling();
  sampling->set_n(2);
  sampling->set_seed(9);
  auto* bias = sampling->add_logit_bias();
  bias->set_token_id(7);
  bias->set_bias(-1.5f);
  request.mutable_stopping()->add_stop_strings(std::string("a\0b", 3));
  request.mutable_stopping()->add_stop_token_ids(11);
  request.mutable_stopping()->set_ignore_eos(true);
  request.mutable_stopping()->set_include_stop_in_output(true);
  request.mutable_output()->set_echo(true);
  ASSERT_OK_AND_ASSIGN(const GenerationSpec spec, Validate(request));
  EXPECT_EQ(spec.request_id, "mine");
  EXPECT_EQ(spec.prompt_text, "Hello world");
  EXPECT_THAT(spec.prompt_ids, ElementsAre(259, 260));
  EXPECT_EQ(spec.n, 2);
  EXPECT_EQ(spec.priority, -3);
  EXPECT_EQ(spec.cache_salt, "s");
  EXPECT_TRUE(spec.cache_bypass);
  EXPECT_EQ(spec.queue_deadline, absl::FromUnixSeconds(1000) + absl::Milliseconds(500));
  EXPECT_EQ(spec.deadline, absl::FromUnixSeconds(1002));
  EXPECT_EQ(spec.stop_strings[0].size(), 3u);
  EXPECT_THAT(spec.eos_token_ids, IsEmpty());
  EXPECT_THAT(spec.sampling.stop_ids(), ElementsAre(11));
  EXPECT_THAT(spec.sampling.bias_ids(), ElementsAre(7));
  EXPECT_THAT(spec.sampling.bias_values(), ElementsAre(-1.5f));
  EXPECT_TRUE(spec.include_stop_in_output);
  EXPECT_TRUE(spec.echo);
}

TEST(RequestValidatorTest, EchoOfIdsDecodesThem) {
  GenerateRequest request;
  request.mutable_token_ids()->add_ids(259);
  request.mutable_token_ids()->add_ids(0xC3);
  request.mutable_output()->set_echo(true);
  ASSERT_OK_AND_ASSIGN(const GenerationSpec spec, Validate(request));
  EXPECT_EQ(spec.prompt_text, "Hello\xEF\xBF\xBD");
}

TEST(RequestValidatorTest, ChatAndNulTextAreTokenized) {
  GenerateRequest chat;
  chat.mutable_chat()->add_messages()->set_role("user");
  chat.mutable_chat()->mutable_messages(0)->set_content("x");
  ServedModel model = MakeModel();
  model.max_context = 1000;
  ASSERT_OK_AND_ASSIGN(const GenerationSpec spec, Validate(chat, model));
  EXPECT_EQ(spec.prompt_ids[0], FakeTokenizer::kImStart);
  model.has_chat_template = false;
  EXPECT_EQ(ReasonOf(Validate(chat, model).status()), "FEATURE_UNSUPPORTED");
  GenerateRequest nul;
  nul.set_text(std::string("\0", 1));
  ASSERT_OK_AND_ASSIGN(const GenerationSpec zero, Validate(nul));
  EXPECT_THAT(zero.prompt_ids, ElementsAre(0));
}

TEST(RequestValidatorTest, DigestIgnoresTheIdOnly) {
  GenerateRequest request = WithIds(3);
  for (int i = 0; i < 8; ++i) (*request.mutable_labels())[absl::StrCat("k", i)] = "v";
  ASSERT_OK_AND_ASSIGN(const GenerationSpec first, Validate(request));
  request.set_request_id("other");
  ASSERT_OK_AND_ASSIGN(const GenerationSpec second, Validate(request));
  EXPECT_EQ(first.body_digest, second.body_digest);
  request.mutable_sampling()->set_top_k(5);
  ASSERT_OK_AND_ASSIGN(const GenerationSpec third, Validate(request));
  EXPECT_NE(first.body_digest, third.body_digest);
}

}  // namespace
}  // namespace lockstep
