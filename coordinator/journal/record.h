// How records lie in a segment: 8 bytes that name the format and its version, then frames:
//   u32 length of the payload, u32 check of the length, u64 XXH3 of the payload, payload
// (little endian; the payload is a serialized journal.v1.Record). The length has a check of its
// own, so that a broken length is told from an unfinished write.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/journal.pb.h"

namespace lockstep {

constexpr char kSegmentMagic[] = "LSJRNL01";
constexpr int64_t kSegmentMagicBytes = 8;
constexpr int64_t kFrameHeaderBytes = 16;

// Appends a frame; its size.
int64_t AppendFrame(const journal::v1::Record& record, std::string* out);

// Gives the records of a segment in order to `take`. What the last write left unfinished is
// skipped: the bytes from the first frame that is not whole, when no whole frame comes after it.
// Their number is returned. DATA_LOSS with `path` and offset when a frame is broken that others
// follow, when the file is no segment, or when `take` gives an error.
absl::StatusOr<int64_t> ScanSegment(
    absl::string_view bytes, const std::string& path,
    const std::function<absl::Status(const journal::v1::Record& record, int64_t frame_bytes)>&
        take);

}  // namespace lockstep
