// What the gRPC library logs of itself, as lines of ours: one format on stderr, and repetitions (a
// port scanner makes one for each handshake) are counted.
#pragma once

namespace lockstep {

// Of this process, from now on. The library's errors become warnings; it logs nothing less by
// default.
void SendGrpcLogsToOurs();

}  // namespace lockstep
