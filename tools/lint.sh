#!/usr/bin/env bash
# Lint: formatting, file sizes, and rules that a compiler does not know. Prints every finding and fails
# when there is one.
set -uo pipefail
cd "$(dirname "$0")/.."

sources=$(git ls-files --cached --others --exclude-standard | grep -E '\.(h|cc|cu|cuh)$' | grep -v testdata)
scripts=$(git ls-files --cached --others --exclude-standard | grep -E '\.(py|sh|bzl|proto)$' | grep -v testdata)
bad=0

# found TITLE LINES: reports findings.
found() {
  [ -n "$2" ] || return 0
  printf 'lint: %s\n%s\n' "$1" "$2"
  bad=1
}
# only TITLE PATTERN ALLOWED: PATTERN may occur only in files that match ALLOWED.
only() {
  found "$1" "$(printf '%s\n' $sources | grep -vE "$3" | xargs -r grep -nE "$2" /dev/null)"
}

format=clang-format-14
command -v $format >/dev/null || format=clang-format
found 'not formatted (run clang-format -i)' \
  "$(printf '%s\n' $sources | xargs -r $format --dry-run -Werror 2>&1 | grep -E 'error:' | cut -d: -f1 | sort -u)"

found 'longer than 800 lines (tests 1000)' \
  "$(printf '%s\n' $sources $scripts | xargs -r wc -l | awk '$2 != "total" && $1 > ($2 ~ /_test\.cc$/ ? 1000 : 800)')"

only 'getenv outside main.cc' '\bgetenv\(' '(^|/)main\.cc$|_main\.cc$'
only 'std::cout outside tools' 'std::cout' '^tools/|_bench\.cc$|(^|/)main\.cc$'
only 'catch (...)' 'catch \(\.\.\.\)' '^$'
only 'work left for later' '\b(TODO|FIXME|XXX)\b' '^$'
only 'skipped tests' 'GTEST_SKIP|DISABLED_' '^$'
only 'device synchronization' 'cudaDeviceSynchronize' '_test\.cc$|^tools/|/testing/'
only 'nccl.h outside kernels/comm/nccl_*' 'include [<"]nccl\.h' '^kernels/comm/nccl_'
only 'CUDA headers outside kernels and benchmarks' 'include [<"]cuda(_runtime)?(_api)?\.h' '^(kernels|tools/bench)/.*(\.cu|\.cuh)$|^kernels/runtime/(.*_cuda\.cc|cuda_status\.h)$|^kernels/comm/(nccl|push)_'
only 'CUDA allocation or copies outside kernels/runtime, kernels/comm and benchmarks' 'cuda(Malloc|Memcpy|StreamSynchronize)' '^kernels/(runtime|comm)/|^tools/bench/.*\.cu$'
only 'cublasLt.h outside benchmarks' 'include [<"]cublas' '^tools/bench/'
only 'grpcpp outside service and client adapters' 'include [<"]grpcpp/' '^(coordinator|worker|security|tests|tools)/'
only 'gRPC, protobuf or coordinator headers in kernels' 'include "(proto|coordinator|worker|models)/' '^(coordinator|worker|security|tests|tools|models|proto)/'
only 'gRPC, protobuf, worker or coordinator headers in models' 'include "(proto|coordinator|worker)/' '^(coordinator|worker|security|tests|tools|kernels)/'
only 'worker, kernels or model headers in the coordinator' 'include "(worker|models/(weights|quant|layers|model)|kernels/(gemm|attention|comm|runtime))' '^(worker|tests|tools|kernels|models)/'

tests=$(git ls-files --cached --others --exclude-standard | grep -E '_test\.(cc|sh|py)$|^tests/|_test_util\.|fake_')
found 'ports of their own in tests: the system chooses them (port 0)' \
  "$(printf '%s\n' $tests | grep -E '\.(cc|h|sh|py)$' | xargs -r grep -nE \
    'AddListeningPort\("[^"]*:[1-9]|--listen[", =]+[^ "]*:[1-9]|--([a-z]+-)?port[", =]+"?[1-9]' /dev/null)"
found 'tests/CHECKS.md' "$(tools/check_table.sh)"
found 'mutations of tests/mutations that do not apply' "$(tools/mutate.sh --check 2>&1)"

exit $bad
