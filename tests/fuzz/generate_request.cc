// A GenerateRequest of any bytes: refused as a fault of the client, with everything that a client
// needs, or turned into what the engine and the workers accept.
#include <google/protobuf/stubs/logging.h>

#include <memory>
#include <string>

#include "coordinator/errors.h"
#include "coordinator/request_validator.h"
#include "kernels/base/check.h"
#include "models/tokenizer/fake_tokenizer.h"
#include "models/tokenizer/utf8.h"
#include "proto/inference.pb.h"
#include "tests/fuzz/fuzz_input.h"
#include "worker/slot_table.h"

namespace lockstep {
namespace fuzz {
namespace {

constexpr int64_t kVocab = 300;
constexpr int64_t kContext = 64;

ServedModel MakeModel() {
  ServedModel model;
  model.name = "tiny";
  model.vocab_size = kVocab;
  model.max_context = kContext;
  model.eos_token_ids = {FakeTokenizer::kEndOfText, FakeTokenizer::kImEnd};
  model.tokenizer = std::make_shared<FakeTokenizer>();
  model.has_chat_template = true;
  return model;
}

void CheckRefusal(const absl::Status& status) {
  CHECK(absl::IsInvalidArgument(status) || absl::IsNotFound(status) ||
        absl::IsUnimplemented(status))
      << status.ToString();
  CHECK(!ReasonOf(status).empty()) << status.ToString();
  CHECK(!DetailsOf(status).empty());
  CHECK(IsValidUtf8(status.message(), nullptr));
}

void CheckSpec(const GenerationSpec& spec) {
  CHECK(!spec.prompt_ids.empty());
  for (const int32_t id : spec.prompt_ids) CHECK(id >= 0 && id < kVocab) << id;
  CHECK(spec.max_tokens >= 1);
  CHECK(static_cast<int64_t>(spec.prompt_ids.size()) + spec.max_tokens <= kContext);
  CHECK(spec.min_tokens >= 0 && spec.min_tokens <= spec.max_tokens);
  CHECK(spec.n >= 1 && spec.n <= RequestLimits().max_outputs);
  CHECK(!spec.request_id.empty());
  for (const std::string& stop : spec.stop_strings) {
    CHECK(!stop.empty() && IsValidUtf8(stop, nullptr));
  }
  CHECK_OK(ParseSampling(spec.sampling, kVocab).status());
}

}  // namespace
}  // namespace fuzz
}  // namespace lockstep

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;  // NOLINT: an entry point outside of it
  static const ServedModel model = fuzz::MakeModel();
  static const google::protobuf::LogSilencer silencer;  // of strings that are not UTF-8
  inference::v1::GenerateRequest request;
  if (!request.ParseFromArray(data, static_cast<int>(size))) return 0;
  RequestContext context;
  context.now = absl::FromUnixSeconds(1000);
  context.fresh_request_id = "fresh";
  context.fresh_seed = 77;
  const auto spec = ValidateGenerateRequest(request, model, context);
  if (spec.ok()) {
    fuzz::CheckSpec(*spec);
  } else {
    fuzz::CheckRefusal(spec.status());
  }
  return 0;
}
