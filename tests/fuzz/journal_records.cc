// A journal of any bytes: it is read, or refused as DATA_LOSS; what is read can be shown again, and
// is the same when it is written anew.
//
// Input: a byte that says how many bytes are cut off at the end, and one that says which byte is
// changed (0: none); then records, each a serialized journal.v1.Record behind two bytes of its
// length. A "record" that cannot be parsed goes into the segment as it is.
#include <algorithm>
#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "coordinator/generation.h"
#include "coordinator/generation_log.h"
#include "coordinator/journal/convert.h"
#include "coordinator/journal/record.h"
#include "coordinator/restore.h"
#include "kernels/base/check.h"
#include "models/tokenizer/fake_tokenizer.h"
#include "proto/journal.pb.h"
#include "tests/fuzz/fuzz_input.h"

namespace lockstep {
namespace fuzz {
namespace {

constexpr size_t kMostTokens = 4096;

absl::StatusOr<int64_t> Collect(absl::string_view segment, RequestCollector* collector) {
  return ScanSegment(segment, "journal",
                     [collector](const journal::v1::Record& record, int64_t frame_bytes) {
                       CHECK_GE(frame_bytes, kFrameHeaderBytes);
                       return collector->Take(record);
                     });
}

void Show(RestoredRequest request) {
  size_t tokens = 0;
  for (const RestoredRequest::Output& output : request.outputs) {
    CHECK_EQ(output.ids.size(), output.digests.size());
    CHECK_EQ(output.ids.size(), output.logprobs.size());
    CHECK(output.ids.size() <= static_cast<size_t>(request.spec.max_tokens));
    tokens += output.ids.size();
  }
  CHECK_EQ(request.outputs.size(), static_cast<size_t>(request.spec.n));
  if (tokens > kMostTokens) return;
  if (!request.end.has_value()) request.end = absl::OkStatus();
  const FakeTokenizer tokenizer;
  GenerationLog log(request.spec.request_id, request.spec.n);
  ReplayEnded(request, &tokenizer, &log);
  CHECK(log.end().has_value());
}

void CheckSameWhenWrittenAnew(const std::map<uint64_t, RestoredRequest>& requests) {
  std::string again = kSegmentMagic;
  for (const auto& [ordinal, request] : requests) {
    journal::v1::Record record;
    *record.mutable_accept() = ToAccept(ordinal, request.spec, request.accepted, request.submitted);
    AppendFrame(record, &again);
  }
  RequestCollector collector;
  const auto torn = Collect(again, &collector);
  CHECK(torn.ok()) << torn.status().ToString();
  CHECK_EQ(*torn, 0);
  CHECK_EQ(collector.requests().size(), requests.size());
  for (const auto& [ordinal, request] : requests) {
    const RestoredRequest& other = collector.requests().at(ordinal);
    CHECK(
        ToAccept(ordinal, request.spec, request.accepted, request.submitted).SerializeAsString() ==
        ToAccept(ordinal, other.spec, other.accepted, other.submitted).SerializeAsString());
  }
}

}  // namespace
}  // namespace fuzz
}  // namespace lockstep

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;  // NOLINT: an entry point outside of it
  fuzz::FuzzInput input(data, size);
  const size_t cut = input.Byte();
  const size_t changed = input.Byte();
  std::string segment = kSegmentMagic;
  while (!input.empty()) {
    const size_t length = input.Byte() + size_t{256} * input.Byte();
    const std::string bytes(input.Bytes(length));
    journal::v1::Record record;
    if (record.ParseFromString(bytes)) {
      AppendFrame(record, &segment);
    } else {
      segment += bytes;
    }
  }
  segment.resize(segment.size() - std::min(cut, segment.size()));
  if (changed > 0 && !segment.empty()) segment[changed * 7 % segment.size()] ^= 1;
  RequestCollector collector;
  const auto torn = fuzz::Collect(segment, &collector);
  if (!torn.ok()) {
    CHECK(absl::IsDataLoss(torn.status())) << torn.status().ToString();
    return 0;
  }
  CHECK(*torn >= 0 && *torn <= static_cast<int64_t>(segment.size()));
  for (const auto& [ordinal, request] : collector.requests()) fuzz::Show(request);
  fuzz::CheckSameWhenWrittenAnew(collector.requests());
  return 0;
}
