// PackRows: rows of codes as stored in a checkpoint into the interleaved layout of gemm_args.h.
#pragma once

#include <cstdint>
#include <vector>

namespace lockstep {

// rows[i] points to `units` units of `unit_bytes` (1, 2 or 4) each. Writes rows.size() * units *
// unit_bytes bytes to `out`.
void PackRows(const std::vector<const uint8_t*>& rows, int64_t units, int unit_bytes, void* out);

}  // namespace lockstep
