// The RankLink of production: one gRPC channel to one worker. Calls are asynchronous; answers come
// from gRPC's threads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "coordinator/group/rank_link.h"
#include "grpcpp/grpcpp.h"

namespace lockstep {

// A channel to a worker. `credentials` null: plaintext.
std::shared_ptr<grpc::Channel> ConnectWorker(
    const std::string& address, int64_t max_message_bytes,
    const std::shared_ptr<grpc::ChannelCredentials>& credentials);

// `sink` is called by any thread, and never once the link is destroyed.
std::unique_ptr<RankLink> MakeGrpcRankLink(std::shared_ptr<grpc::Channel> channel, int32_t link,
                                           RankEventSink sink);

}  // namespace lockstep
