#!/bin/bash
# The worker binary as a process: address file, port conflicts, flags that are refused, signals.
set -u
worker=worker/lockstep_worker
dir=$(mktemp -d /tmp/worker.XXXXXX)  # short: paths of sockets hold 107 characters

fail() {
  echo "FAILED: $*" >&2
  cat "$dir"/*.log >&2
  exit 1
}

wait_for() {
  for _ in $(seq 1000); do
    [ -s "$1" ] && return 0
    sleep 0.02
  done
  fail "$1 was not written"
}

"$worker" --listen 127.0.0.1:0 --address-file "$dir/address" 2> "$dir/first.log" &
first=$!
wait_for "$dir/address"
address=$(cat "$dir/address")
[[ $address =~ ^127\.0\.0\.1:[1-9][0-9]*$ ]] || fail "address is '$address'"
grep -q "lockstep_worker 0\.1\.0 on cpu (.*) listens on $address" "$dir/first.log" ||
  fail "no start line"

"$worker" --listen "$address" 2> "$dir/second.log"
[ $? -eq 1 ] || fail "a port in use did not give exit code 1"
grep -q "cannot listen on $address" "$dir/second.log" || fail "no message about the port"

"$worker" --listen 0.0.0.0:0 2> "$dir/plain.log"
[ $? -eq 1 ] || fail "a reachable address was accepted"
grep -q -- "--insecure-listen" "$dir/plain.log" || fail "no message about --insecure-listen"

"$worker" --listen 127.0.0.1:0 --address-file "$dir/none/address" 2> "$dir/file.log"
[ $? -eq 1 ] || fail "an address file that cannot be written was accepted"
grep -q "cannot write --address-file" "$dir/file.log" || fail "no message about the file"

"$worker" --listen 0.0.0.0:0 --tls-ca "$dir/address" > "$dir/tls.log" 2>&1
[ $? -eq 2 ] || fail "TLS without a certificate was accepted"
grep -q -- "missing: --tls-cert, --tls-key" "$dir/tls.log" || fail "no message about TLS"
"$worker" --tls-cert "$dir/address" --tls-key "$dir/address" --tls-ca "$dir/address" \
  --log-format json > "$dir/pem.log" 2>&1
[ $? -eq 1 ] || fail "a file that is no certificate was accepted"
grep -q '"severity":"error","role":"worker","message":"--tls-cert .* has no certificate' \
  "$dir/pem.log" || fail "no message about the certificate"

for device in tpu cuda:x cuda:-1; do
  "$worker" --device "$device" > "$dir/device.log" 2>&1
  [ $? -eq 2 ] || fail "device $device did not give exit code 2"
  grep -q -- "--device $device is none of cpu, cuda, cuda:N" "$dir/device.log" ||
    fail "no message about device $device"
done
"$worker" --device cuda:99 > "$dir/absent.log" 2>&1
[ $? -eq 1 ] || fail "a device that is not there did not give exit code 1"
grep -qE -- "--device cuda:99: (this build has no cuda|cuda:99: no CUDA device|cuda:99 does not exist)" \
  "$dir/absent.log" || fail "no reason for the absent device"
[ "$("$worker" --version)" = "lockstep_worker 0.1.0" ] || fail "--version"

kill -TERM "$first"
wait "$first"
[ $? -eq 0 ] || fail "SIGTERM did not end in exit code 0"
grep -q "draining" "$dir/first.log" || fail "no line about draining"

"$worker" --listen "unix:$dir/socket" --address-file "$dir/unix" 2> "$dir/unix.log" &
unix=$!
wait_for "$dir/unix"
[ "$(cat "$dir/unix")" = "unix:$dir/socket" ] || fail "unix address"
kill -TERM "$unix"
wait "$unix" || fail "unix worker"

# One that nobody ever calls stops by itself.
"$worker" --listen 127.0.0.1:0 --orphan-timeout 0.2 2> "$dir/alone.log"
[ $? -eq 0 ] || fail "an orphan did not end with exit code 0"
grep -q "no coordinator was heard of for 200ms: stopping" "$dir/alone.log" ||
  fail "no line about the orphan"
"$worker" --orphan-timeout -1 > "$dir/negative.log" 2>&1
[ $? -eq 2 ] || fail "a negative --orphan-timeout was accepted"

# A worker whose parent dies goes too.
bash -c "$worker --listen 127.0.0.1:0 --parent-death --address-file $dir/orphan 2> $dir/orphan.log &
         echo \$! > $dir/pid; while [ ! -s $dir/orphan ]; do sleep 0.02; done"
orphan=$(cat "$dir/pid")
for _ in $(seq 500); do
  kill -0 "$orphan" 2> /dev/null || exit 0
  sleep 0.02
done
fail "the orphan lives on"
