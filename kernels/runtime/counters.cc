#include "kernels/runtime/counters.h"

namespace lockstep {

const char* Name(Traffic kind) {
  switch (kind) {
    case Traffic::kWeightsToDevice:
      return "weights_to_device";
    case Traffic::kPlanToDevice:
      return "plan_to_device";
    case Traffic::kResultsToHost:
      return "results_to_host";
    case Traffic::kLogitsToHost:
      return "logits_to_host";
    case Traffic::kDiagnosticsToHost:
      return "diagnostics_to_host";
    case Traffic::kCollectivesSent:
      return "collectives_sent";
    case Traffic::kNumKinds:
      break;
  }
  return "unknown";
}

}  // namespace lockstep
