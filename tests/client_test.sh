#!/usr/bin/env bash
# Starts `lockstep serve` on the embedded model and runs the Python client against it.
set -euo pipefail
stubs=$PWD/tests/python
address=$TEST_TMPDIR/address
tools/lockstep serve --model tests/testdata/qwen3_5-trained-ct-nvfp4-fp8 --tp 2 --port 0 \
  --address-file "$address" &
server=$!
trap 'kill -TERM $server 2>/dev/null; wait $server 2>/dev/null' EXIT
for _ in $(seq 600); do
  kill -0 $server
  if [ -s "$address" ] && tools/lockstep health --address "$(cat "$address")" >/dev/null 2>&1; then
    break
  fi
  sleep 0.1
done
PYTHONPATH=$stubs PYTHONDONTWRITEBYTECODE=1 /usr/bin/python3 tests/client_test.py "$(cat "$address")"
