#!/usr/bin/env bash
# Kills workers of a `lockstep serve` in the middle of 8 streams, compares the digest of every stream
# with that of an undisturbed run, and prints the fault records (the time of each phase) as JSON.
#
#   tools/bench/recovery.sh MODEL DEVICE TP KILLS TOKENS PAUSE
#   tools/bench/recovery.sh tests/testdata/qwen3_5-trained-ct-nvfp4-fp8 cuda:0 1 4 1500 0.35
#
# Every kill meets one rank, in turn, PAUSE seconds after the streams of TOKENS tokens began: choose
# it so that they still run. Exit code 0 only when every digest is equal and every kill was recovered
# from. Uses bazel-bin; LOCKSTEP and LOCKSTEP_WORKER name other programs.
set -euo pipefail
[ "$#" -eq 6 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
model=$1 device=$2 tp=$3 kills=$4 tokens=$5 pause=$6
root=$(cd "$(dirname "$0")/../.." && pwd)
lockstep=${LOCKSTEP:-$root/bazel-bin/tools/lockstep}
worker=${LOCKSTEP_WORKER:-$root/bazel-bin/worker/lockstep_worker}
streams=8
work=$(mktemp -d)
server=
finish() {
  if [ -n "$server" ]; then kill -TERM "$server" 2> /dev/null || true; wait "$server" || true; fi
  rm -rf "$work"
}
trap finish EXIT

"$lockstep" serve --model "$model" --device "$device" --tp "$tp" --port 0 --admin-port 0 \
  --address-file "$work/address" --admin-address-file "$work/admin" --worker-binary "$worker" \
  --lease-ms 10000 2> "$work/log" &
server=$!
for _ in $(seq 600); do
  if [ -s "$work/admin" ] && "$lockstep" health --address "$(cat "$work/address")" > /dev/null 2>&1; then break; fi
  kill -0 "$server" 2> /dev/null || { cat "$work/log" >&2; exit 1; }
  sleep 0.2
done
address=$(cat "$work/address")

# start NAME: the streams, in the background; their processes in `running`.
running=()
start() {
  running=()
  for i in $(seq "$streams"); do
    "$lockstep" generate --address "$address" --seed "$i" --temperature 0.9 --presence-penalty 0.3 \
      --ignore-eos --max-tokens "$tokens" --json "Stream number $i says" \
      > "$work/$1.$i" 2> "$work/$1.$i.err" &
    running+=($!)
  done
}
digest() { grep -o '"determinism_digest":"[0-9]*"' "$work/$1" || true; }

start reference
wait "${running[@]}"
different=0
for kill in $(seq "$kills"); do
  rank=$((kill % tp))
  start run
  sleep "$pause"
  victim=$(pgrep -P "$server" -f "/worker-$rank\.")
  kill -KILL "$victim"
  wait "${running[@]}" || true
  for i in $(seq "$streams"); do
    if [ -z "$(digest "run.$i")" ] || [ "$(digest "run.$i")" != "$(digest "reference.$i")" ]; then
      different=$((different + 1))
      echo "kill $kill, stream $i differs: $(tail -1 "$work/run.$i.err")" >&2
    fi
  done
done
"$lockstep" health --address "$address" --wait 60 > /dev/null
faults=$("$lockstep" faults --address "$(cat "$work/admin")" --output json)
recovered=$(grep -o '"outcome":"RECOVERED"' <<< "$faults" | wc -l)
echo "$faults"
echo "$((kills * streams - different)) of $((kills * streams)) digests equal, $recovered of $kills kills recovered from" >&2
[ "$different" -eq 0 ] && [ "$recovered" -eq "$kills" ]
