#!/usr/bin/env bash
# From a fresh Debian 12 to an answer: installs what is missing, builds, serves the embedded model over
# two tensor-parallel ranks, and prints the continuation of "The capital of France is".
set -euo pipefail
cd "$(dirname "$0")/.."
tools/install_deps.sh

echo "quickstart: building (the first time takes some minutes)" >&2
bazel build //tools:lockstep //worker:lockstep_worker >&2

model=$PWD/tests/testdata/qwen3_5-trained-ct-nvfp4-fp8
state=$(mktemp -d)
server=
finish() {
  if [ -n "$server" ]; then
    kill -TERM "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
  fi
  rm -rf "$state"
}
trap finish EXIT

echo "quickstart: serving $(basename "$model") with --tp 2" >&2
bazel-bin/tools/lockstep serve --model "$model" --tp 2 --port 0 --address-file "$state/address" \
  2>"$state/log" &
server=$!
for _ in $(seq 300); do
  if ! kill -0 "$server" 2>/dev/null; then
    cat "$state/log" >&2
    echo "quickstart: the server ended" >&2
    exit 1
  fi
  if [ -s "$state/address" ] &&
    bazel-bin/tools/lockstep health --address "$(cat "$state/address")" >/dev/null 2>&1; then
    break
  fi
  sleep 0.2
done

prompt="The capital of France is"
printf '%s' "$prompt"
bazel-bin/tools/lockstep generate --address "$(cat "$state/address")" --temperature 0 --max-tokens 24 \
  "$prompt"
echo
