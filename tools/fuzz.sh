#!/usr/bin/env bash
# Builds the fuzzers (clang-14) and runs each for some seconds, from its committed corpus.
#
#   tools/fuzz.sh [SECONDS [NAME...]]    60 seconds each, all of them
#
# New inputs are kept in /tmp/lockstep-fuzz/NAME and used by the next run. An input that shows an error
# is /tmp/lockstep-fuzz/NAME.crash-...: once the error is fixed it belongs into tests/fuzz/corpus/NAME,
# which //tests/fuzz:NAME_test runs with every compiler. Exit code 0: nothing was found.
set -uo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
[[ $seconds =~ ^[1-9][0-9]*$ ]] || { echo "usage: tools/fuzz.sh [SECONDS [NAME...]]" >&2; exit 2; }
shift || true

# An output base of its own: another compiler would otherwise re-analyse everything, twice.
base=$(bazel info output_base 2>/dev/null)-fuzz
bazel=(bazel "--output_base=$base")
"${bazel[@]}" build --config=fuzz --symlink_prefix=/ //tests/fuzz:fuzzers || exit 1
bin=$("${bazel[@]}" info --config=fuzz bazel-bin 2>/dev/null)
"${bazel[@]}" shutdown

names=("$@")
[ ${#names[@]} -gt 0 ] || names=($(ls tests/fuzz/corpus))
work=/tmp/lockstep-fuzz
bad=0
for name in "${names[@]}"; do
  mkdir -p "$work/$name"
  log=$work/$name.log
  if "$bin/tests/fuzz/${name}_fuzzer" -max_total_time="$seconds" -timeout=30 -rss_limit_mb=4096 \
      -max_len=8192 -print_final_stats=1 "-artifact_prefix=$work/$name." \
      "$work/$name" "tests/fuzz/corpus/$name" > "$log" 2>&1; then
    echo "$name: $(grep -oE 'number_of_executed_units: *[0-9]+' "$log" | grep -oE '[0-9]+$') inputs, nothing found"
  else
    bad=1
    tail -n 40 "$log"
    echo "$name: FAILED, see $log"
  fi
done
exit $bad
