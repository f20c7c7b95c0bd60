#!/usr/bin/env bash
# Exit codes and streams of the CLI that need no running model.
set -uo pipefail
lockstep=$PWD/tools/lockstep
failed=0

# expect CODE PATTERN ARGUMENTS...: exit code and a pattern in stdout and stderr together.
expect() {
  local code=$1 pattern=$2 output got
  shift 2
  output=$("$lockstep" "$@" 2>&1 </dev/null)
  got=$?
  if [ "$got" != "$code" ] || ! grep -qE -- "$pattern" <<<"$output"; then
    printf 'lockstep %s: exit code %s (expected %s), output:\n%s\n' "$*" "$got" "$code" "$output"
    failed=1
  fi
}

nobody=127.0.0.1:1
expect 0 'lockstep serve --model' --help
expect 0 'Exit codes: 0 ok' --help
for verb in serve coordinator generate chat tokenize status health version drain undrain cancel requests \
  workers faults replace-worker reset-prefix-cache log-level server-info; do
  expect 0 'Usage' "$verb" --help
done
expect 0 '--concurrency' bench serve --help
expect 0 '^lockstep [0-9]' version
[ "$("$lockstep" --version)" = "$("$lockstep" version)" ] || { echo '--version differs'; failed=1; }
expect 2 'subcommand' 
expect 2 'frobnicate' frobnicate
expect 2 '--model is required' serve
expect 2 '--workers is required' coordinator --model /nowhere
expect 2 'activations' serve --model /nowhere --activations f16
expect 2 'insecure-listen' serve --model /nowhere --host 0.0.0.0
expect 2 'multiple of 64' coordinator --model /nowhere --workers a:1 --snapshot-interval 65
for address in host:99999 host:0 host:-1 host:7x host: :7000 host 7000 '[::1]7000' unix: ::1:7000; do
  expect 2 "--workers: \"${address//[\[\]]/.}\" is no address" \
    coordinator --model /nowhere --workers "127.0.0.1:1,$address"
done
expect 1 'model /nowhere is no folder' coordinator --model /nowhere --port 0 \
  --workers 'host:65535,[::1]:7000,unix:/x'
expect 2 '--json' generate --address $nobody --n 2 hi
expect 2 '--logprobs.*--json' generate --address $nobody --logprobs 1 hi
expect 2 '--logprobs' chat --address $nobody --logprobs 1
expect 2 '--token-ids' generate --address $nobody --token-ids 1,2 hi
expect 2 '--token-ids.*--chat|--chat.*--token-ids' generate --token-ids 1,2 --chat
expect 2 '--seed' generate --address $nobody --seed -1 hi
expect 2 '--seed' generate --address $nobody --seed=18446744073709551616 hi
expect 1 'no lockstep_worker|ended with|could not be started' serve --model /nowhere --port 0 \
  --worker-binary /bin/false
for verb in generate tokenize status health; do
  expect 3 'cannot connect to 127.0.0.1:1' "$verb" --address $nobody --connect-timeout 0.2
done
expect 3 'cannot connect' bench serve --address $nobody --connect-timeout 0.2
expect 3 'cannot connect' chat --address $nobody --connect-timeout 0.2

expect 3 'rank 0 \(127.0.0.1:1\)' coordinator --model "$TEST_TMPDIR" --workers $nobody --port 0 \
  --connect-timeout 0.3
expect 1 'model /nowhere is no folder' coordinator --model /nowhere --workers $nobody --port 0

# stdout is data: errors leave it empty.
output=$("$lockstep" status --address $nobody --connect-timeout 0.2 2>/dev/null)
[ -z "$output" ] || { echo "an error went to stdout: $output"; failed=1; }

# A coordinator whose workers never come: alive, not ready, and it ends at once on SIGTERM.
address=$TEST_TMPDIR/address
"$lockstep" coordinator --model "$TEST_TMPDIR" --workers $nobody --port 0 --address-file "$address" \
  2>"$TEST_TMPDIR/log" &
server=$!
for _ in $(seq 100); do [ -s "$address" ] && break; sleep 0.1; done
if kill -0 $server 2>/dev/null; then
  at=$(cat "$address")
  expect 0 '^SERVING' health --address "$at" --service liveness
  expect 4 '^NOT_SERVING' health --address "$at"
  expect 4 '^NOT_SERVING' health --address "$at" --service worker/0
  expect 4 'state +LOADING' status --address "$at"
  expect 4 'MODEL_LOADING' generate --address "$at" hi
  expect 4 'MODEL_LOADING' tokenize --address "$at" hi
  expect 1 'port is in use' coordinator --model /nowhere --workers $nobody --port "${at##*:}"
  kill -TERM $server
fi
wait $server
code=$?
[ "$code" = 0 ] || { echo "coordinator: exit code $code, log:"; cat "$TEST_TMPDIR/log"; failed=1; }
exit $failed
