#!/usr/bin/env bash
# Runs tests and prints, last, "N passed, N failed".
#
#   tools/test.sh              all tests, as built by default
#   tools/test.sh --all        also asan+ubsan, the lint, the layer query, and a build of everything
#                              with CUDA: what CI runs
#   tools/test.sh --extra      asan+ubsan of the rest, tsan, clang's checks of layering and locks:
#                              before a release
#   tools/test.sh //models/... only these targets
#
# Installs what is missing first (tools/install_deps.sh). Exit code 0 only when everything passed.
set -uo pipefail
cd "$(dirname "$0")/.."
tools/install_deps.sh || exit 1

passed=0
failed=0
failures=()

# check NAME COMMAND...: one pass or failure.
check() {
  local name=$1 start=$SECONDS
  shift
  echo "== $name" >&2
  if "$@" >&2; then
    passed=$((passed + 1))
    echo "== $name: passed in $((SECONDS - start)) s" >&2
  else
    failed=$((failed + 1))
    failures+=("$name")
    echo "== $name: FAILED after $((SECONDS - start)) s" >&2
  fi
}

# run_bazel_tests NAME ARGS...: counts the targets that `bazel test ARGS` reports.
run_bazel_tests() {
  local name=$1 log start=$SECONDS
  shift
  log=$(mktemp)
  echo "== $name: bazel test $*" >&2
  bazel test --keep_going "$@" 2>&1 | tee "$log" >&2
  local code=${PIPESTATUS[0]} good bad
  good=$(grep -cE '^//[^ ]+ +(\(cached\) )?PASSED' "$log")
  bad=$(grep -cE '^//[^ ]+ +(\(cached\) )?(FAILED|TIMEOUT|NO STATUS|FLAKY)' "$log")
  passed=$((passed + good))
  failed=$((failed + bad))
  [ "$bad" -eq 0 ] || failures+=("$name: $(grep -E '^//[^ ]+ +(FAILED|TIMEOUT|NO STATUS|FLAKY)' "$log" | cut -d' ' -f1 | tr '\n' ' ')")
  if [ "$code" -ne 0 ] && [ "$bad" -eq 0 ]; then
    failed=$((failed + 1))
    failures+=("$name: bazel exit code $code")
  fi
  if [ "$code" -eq 0 ] && [ "$good" -eq 0 ]; then
    failed=$((failed + 1))
    failures+=("$name: no test ran")
  fi
  rm -f "$log"
  echo "== $name: $good passed, $bad failed in $((SECONDS - start)) s" >&2
}

# Without a CUDA toolkit every CUDA target would be skipped and the build would succeed: the check is
# that a program with device code was linked.
build_cuda() {
  bazel build --config=cuda //... || return 1
  local test
  for test in kernels/norm/rms_norm_test_cuda kernels/gemm/gemm_arm_test_cuda; do
    if [ ! -x "bazel-bin/$test" ]; then
      echo "$test was not linked: is the CUDA toolkit (12.4 or newer) in /usr/local/cuda or CUDA_HOME?"
      return 1
    fi
  done
}

case "${1:-}" in
  --all)
    check lint tools/lint.sh
    check layers tools/check_layers.sh
    run_bazel_tests default //...
    check cuda build_cuda
    # What reads bytes from outside, shares memory between threads or keeps books of memory. The
    # arithmetic of kernels and models takes long to compile with checks in it: --extra.
    run_bazel_tests asan+ubsan --config=asan --config=ubsan --build_tests_only -- \
      //coordinator/... //security/... //worker/... -//worker:worker_main_test //kernels/base/... \
      //kernels/comm/... //kernels/runtime/... //models/weights/... //models/tokenizer/...
    ;;
  --extra)
    check 'layering and locks' bazel build --config=layers //...
    run_bazel_tests asan+ubsan --config=asan --config=ubsan --build_tests_only //kernels/... \
      //models/... //worker/... //tests/fuzz/...
    # The program of worker_main_test has every model in it: half of the time to compile them all.
    run_bazel_tests tsan --config=tsan --build_tests_only -- //coordinator/... //worker/... \
      //kernels/comm/... //kernels/runtime/... -//worker:worker_main_test
    ;;
  "")
    run_bazel_tests default //...
    ;;
  *)
    run_bazel_tests selected "$@"
    ;;
esac

for failure in "${failures[@]:-}"; do
  [ -z "$failure" ] || echo "FAILED: $failure" >&2
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
