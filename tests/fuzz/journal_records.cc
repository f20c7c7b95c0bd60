// A segment of the request journal of any bytes: refused, or every byte is accounted for, and a
// collector takes the records or refuses them. Input: a byte that says whether frames are made
// whole first, then the segment; 1: payloads behind two bytes of length, which get their frames
// here.
#include <google/protobuf/stubs/logging.h>

#include <string>

#include "coordinator/journal/convert.h"
#include "coordinator/journal/record.h"
#include "kernels/base/check.h"
#include "proto/journal.pb.h"
#include "tests/fuzz/fuzz_input.h"

namespace lockstep {
namespace fuzz {
namespace {

std::string Segment(FuzzInput* input) {
  if (input->Byte() != 1) return std::string(input->Rest());
  std::string segment(kSegmentMagic, kSegmentMagicBytes);
  while (!input->empty()) {
    const size_t length = input->Byte() + size_t{256} * input->Byte();
    journal::v1::Record record;
    if (record.ParseFromString(std::string(input->Bytes(length)))) AppendFrame(record, &segment);
  }
  return segment;
}

void Run(FuzzInput input) {
  const std::string segment = Segment(&input);
  RequestCollector collector;
  int64_t bytes = kSegmentMagicBytes;
  const auto dropped =
      ScanSegment(segment, "segment", [&](const journal::v1::Record& record, int64_t frame_bytes) {
        bytes += frame_bytes;
        return collector.Take(record);
      });
  if (!dropped.ok()) {
    CHECK(absl::IsDataLoss(dropped.status())) << dropped.status().ToString();
    return;
  }
  if (static_cast<int64_t>(segment.size()) >= kSegmentMagicBytes) {
    CHECK_EQ(bytes + *dropped, static_cast<int64_t>(segment.size()));
  }
  for (const auto& item : collector.requests()) CHECK(item.first < collector.next_ordinal());
}

}  // namespace
}  // namespace fuzz
}  // namespace lockstep

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const google::protobuf::LogSilencer silencer;  // of strings that are not UTF-8
  lockstep::fuzz::Run(lockstep::fuzz::FuzzInput(data, size));
  return 0;
}
