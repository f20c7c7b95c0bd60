// What a group of ranks is made of and how patient it is.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "proto/worker.pb.h"

namespace lockstep {

struct WorkerGroupOptions {
  std::vector<std::string> addresses;  // rank order; gRPC targets ("127.0.0.1:7000", "unix:/path")
  std::vector<std::string> spares;     // workers that wait to take the place of any rank
  std::string model_path;              // as the workers see it
  uint64_t expected_digest = 0;
  worker::v1::ActivationDType activation_dtype = worker::v1::ACTIVATION_BF16;
  worker::v1::ActivationQuant activation_quant = worker::v1::ACTIVATION_QUANT_NONE;
  absl::Duration connect_timeout = absl::Minutes(10);  // ranks may come up minutes apart
  absl::Duration comm_timeout = absl::Seconds(30);
  int64_t max_message_bytes = 16 << 20;
  bool share_devices = false;  // several ranks on one device are meant

  // Without it the first failure of a step or a rank is final: the group stays broken until Join is
  // called with a higher epoch, and no beats are sent.
  bool recover = false;
  bool prefer_spares = true;  // a waiting spare takes over before a process is restarted
  absl::Duration beat_period = absl::Milliseconds(500);
  absl::Duration lease = absl::Seconds(3);
  // A step is overdue after the larger of this and 20 times the 99th percentile of recent ones; six
  // times that for the first steps of an epoch, which meet new shapes.
  absl::Duration step_timeout = absl::Seconds(10);
  // More faults than this within the window and the group gives up.
  int recovery_budget = 20;
  absl::Duration recovery_window = absl::Minutes(10);
  // Makes an epoch durable before any rank hears of it. Empty: epochs live in the workers alone.
  std::function<absl::Status(uint64_t term, uint64_t epoch)> persist_epoch;
};

}  // namespace lockstep
