#!/usr/bin/env bash
# The layers of ARCHITECTURE.md as dependency queries: the coordinator reaches neither CUDA nor NCCL nor
# the workers' side; kernels know no models; models know no gRPC.
set -uo pipefail
cd "$(dirname "$0")/.."
bad=0

# apart A B: no target of A depends on a target of B.
apart() {
  local path
  if ! path=$(bazel query --noshow_progress "somepath($1, $2)" 2>/tmp/check_layers.$$); then
    cat /tmp/check_layers.$$
    bad=1
  elif [ -n "$path" ]; then
    printf 'layers: %s must not depend on %s:\n%s\n' "$1" "$2" "$path"
    bad=1
  fi
  rm -f /tmp/check_layers.$$
}

apart //coordinator/... @local_cuda//...
apart '//coordinator:lockstep_coordinator' '//worker/... + //models/weights/... + //models/quant/... + //kernels/gemm/...'
apart //kernels/... '//models/... + //proto/... + //worker/... + //coordinator/... + @grpc//...'
apart //models/... '//proto/... + //worker/... + //coordinator/... + @grpc//...'
apart //worker/... //coordinator/...
apart //security/... '//models/... + //worker/... + //coordinator/...'
apart '//tools:lockstep' '//worker/...'
exit $bad
