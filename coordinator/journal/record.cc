// Frames of a journal's segment: see record.h.
#include "coordinator/journal/record.h"

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/hash.h"

namespace lockstep {
namespace {

constexpr uint64_t kLengthSeed = 0x4c534c454e;
constexpr uint64_t kPayloadSeed = 0x4c5350415947;

void PutLittleEndian(uint64_t value, int bytes, std::string* out) {
  for (int i = 0; i < bytes; ++i) out->push_back(static_cast<char>(value >> (8 * i)));
}

uint64_t GetLittleEndian(absl::string_view bytes, size_t at, int count) {
  uint64_t value = 0;
  for (int i = 0; i < count; ++i) {
    value |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[at + static_cast<size_t>(i)]))
             << (8 * i);
  }
  return value;
}

uint32_t LengthCheck(uint32_t length) { return static_cast<uint32_t>(Mix64(kLengthSeed ^ length)); }

absl::Status Broken(const std::string& path, size_t offset, absl::string_view what) {
  return absl::DataLossError(
      absl::StrCat("the journal ", path, " is broken at byte ", offset, ": ", what,
                   "; restore the file, or move the folder away to start without its requests"));
}

// The payload of a whole frame at `at`; nothing when there is none.
bool WholeFrame(absl::string_view bytes, size_t at, absl::string_view* payload) {
  if (bytes.size() - at < static_cast<size_t>(kFrameHeaderBytes)) return false;
  const uint32_t length = static_cast<uint32_t>(GetLittleEndian(bytes, at, 4));
  if (GetLittleEndian(bytes, at + 4, 4) != LengthCheck(length)) return false;
  if (bytes.size() - at - kFrameHeaderBytes < length) return false;
  *payload = bytes.substr(at + kFrameHeaderBytes, length);
  return HashBytes(*payload, kPayloadSeed) == GetLittleEndian(bytes, at + 8, 8);
}

}  // namespace

int64_t AppendFrame(const journal::v1::Record& record, std::string* out) {
  const std::string payload = record.SerializeAsString();
  CHECK(payload.size() <= 0xffffffffu);
  const uint32_t length = static_cast<uint32_t>(payload.size());
  PutLittleEndian(length, 4, out);
  PutLittleEndian(LengthCheck(length), 4, out);
  PutLittleEndian(HashBytes(payload, kPayloadSeed), 8, out);
  out->append(payload);
  return kFrameHeaderBytes + static_cast<int64_t>(payload.size());
}

absl::StatusOr<int64_t> ScanSegment(
    absl::string_view bytes, const std::string& path,
    const std::function<absl::Status(const journal::v1::Record& record, int64_t frame_bytes)>&
        take) {
  if (bytes.substr(0, kSegmentMagicBytes) != kSegmentMagic) {
    return Broken(path, 0, "it does not begin as a journal of version 01 does");
  }
  size_t at = kSegmentMagicBytes;
  absl::string_view payload;
  journal::v1::Record record;
  while (at < bytes.size() && WholeFrame(bytes, at, &payload)) {
    const size_t frame = kFrameHeaderBytes + payload.size();
    if (!record.ParseFromArray(payload.data(), static_cast<int>(payload.size()))) {
      return Broken(path, at, "a record has a right checksum but cannot be parsed");
    }
    const absl::Status taken = take(record, static_cast<int64_t>(frame));
    if (!taken.ok()) return Broken(path, at, taken.message());
    at += frame;
  }
  for (size_t later = at + 1; later < bytes.size(); ++later) {
    if (!WholeFrame(bytes, later, &payload)) continue;
    return Broken(path, at,
                  absl::StrCat("a record is damaged, and whole ones follow from byte ", later));
  }
  return static_cast<int64_t>(bytes.size() - at);
}

}  // namespace lockstep
