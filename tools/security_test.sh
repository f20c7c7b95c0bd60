#!/usr/bin/env bash
# The ports of a server process and the CLI as its client: TLS, tokens, unix socket, admin service,
# metrics, logs. The server has no workers, so it stays alive and not ready.
set -uo pipefail
lockstep=$PWD/tools/lockstep
dir=$(mktemp -d /tmp/security.XXXXXX)  # short: paths of sockets hold 107 characters
failed=0
cd "$dir" || exit 1

fail() {
  printf 'FAILED: %s\n' "$*"
  failed=1
}
# expect CODE PATTERN ARGUMENTS...: exit code and a pattern in stdout and stderr together.
expect() {
  local code=$1 pattern=$2 output got
  shift 2
  output=$("$lockstep" "$@" 2>&1 </dev/null)
  got=$?
  if [ "$got" != "$code" ] || ! grep -qE -- "$pattern" <<<"$output"; then
    fail "lockstep $*: exit code $got (expected $code), output: $output"
  fi
}
wait_for() {
  for _ in $(seq 300); do [ -s "$1" ] && return 0; sleep 0.1; done
  fail "$1 was not written"
}

# A CA and certificates by the tool that operators use.
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=ca \
  -keyout ca.key -out ca.pem 2>/dev/null || fail "openssl req"
issue() {
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$1" -keyout "$1.key" \
    -out "$1.csr" 2>/dev/null
  openssl x509 -req -in "$1.csr" -CA ca.pem -CAkey ca.key -CAcreateserial -days 1 -out "$1.pem" \
    -extfile <(echo "subjectAltName=$2") 2>/dev/null || fail "openssl x509 $1"
}
issue server IP:127.0.0.1,DNS:localhost
issue client DNS:client
printf 'user-token\n' > tokens
printf 'operator-token\n' > admin-tokens
printf 'wrong-token\n' > wrong

expect 1 '--tls-key .* is not the key of the certificate' coordinator --model "$dir" --port 0 \
  --workers 127.0.0.1:1 --tls-cert server.pem --tls-key client.key
expect 1 '--auth-token-file none cannot be read' coordinator --model "$dir" --port 0 \
  --workers 127.0.0.1:1 --auth-token-file none
expect 2 'worker-tls-key' coordinator --model "$dir" --workers 127.0.0.1:1 --worker-tls-cert server.pem
expect 2 'metrics-host 0.0.0.0 .*insecure-listen' coordinator --model "$dir" --workers 127.0.0.1:1 \
  --metrics-host 0.0.0.0 --metrics-port 0 --tls-cert server.pem --tls-key server.key

"$lockstep" coordinator --model "$dir" --workers 127.0.0.1:1 --port 0 --address-file address \
  --tls-cert server.pem --tls-key server.key --tls-ca ca.pem --auth-token-file tokens \
  --admin-port 0 --admin-address-file admin --admin-token-file admin-tokens \
  --metrics-port 0 --metrics-address-file metrics --log-format json 2> log.json &
server=$!
wait_for metrics
tls=(--tls-ca ca.pem --tls-cert client.pem --tls-key client.key --connect-timeout 2)
at=(--address "$(cat address)")
expect 3 'cannot connect' status "${at[@]}" --connect-timeout 0.5
expect 3 'cannot connect' status "${at[@]}" --tls-ca ca.pem --connect-timeout 0.5
expect 0 '^SERVING' health "${at[@]}" "${tls[@]}" --service liveness
expect 1 'UNAUTHENTICATED TOKEN_MISSING' status "${at[@]}" "${tls[@]}"
expect 1 'UNAUTHENTICATED TOKEN_INVALID' status "${at[@]}" "${tls[@]}" --token-file wrong
expect 4 'state +LOADING' status "${at[@]}" "${tls[@]}" --token-file tokens
expect 4 '"state":"LOADING"' status "${at[@]}" "${tls[@]}" --token-file tokens --output json
expect 2 'File does not exist' status "${at[@]}" --token-file none
mv wrong tokens.new && mv tokens.new tokens
expect 4 'LOADING' status "${at[@]}" "${tls[@]}" --token-file tokens

admin=(--address "$(cat admin)" "${tls[@]}" --token-file admin-tokens)
expect 1 'UNAUTHENTICATED' drain --address "$(cat admin)" "${tls[@]}" --token-file tokens
expect 0 'draining: 0 requests' drain "${admin[@]}" --wait 5
expect 0 'takes requests again, but is not ready' undrain "${admin[@]}"
expect 0 '"requests_left":"0"' drain "${admin[@]}" --output json
expect 1 'NOT_FOUND REQUEST_NOT_FOUND' cancel "${admin[@]}" some-id
expect 4 'MODEL_LOADING' requests "${admin[@]}"
expect 0 '^0 +127.0.0.1:1 +UNKNOWN +no ' workers "${admin[@]}"
expect 0 '^ID +START +CAUSE' faults "${admin[@]}"
expect 1 'WORKER_NOT_FOUND' replace-worker "${admin[@]}" 7
expect 0 '^--auth-token-file +tokens' server-info "${admin[@]}"
expect 0 'info -> warning' log-level "${admin[@]}" warning
expect 2 'loud' log-level "${admin[@]}" loud
expect 3 'cannot connect' faults --address 127.0.0.1:1 --connect-timeout 0.2

IFS=: read -r host port < metrics
exec 3<>"/dev/tcp/$host/$port"
printf 'GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n' >&3
grep -q '^lockstep_worker_up{rank="0"} 0' <&3 || fail "no metrics"
exec 3>&-

kill -TERM $server
wait $server || fail "the server ended with $?"
# Every line of the log is one JSON object; no token is in it.
/usr/bin/python3 -c '
import json, sys
lines = [json.loads(line) for line in open("log.json")]
assert lines and all({"time", "severity", "role", "message"} <= set(l) for l in lines), lines
assert not any("-token\"" in str(l) or "user-token" in str(l) for l in lines), lines
' || fail "log: $(cat log.json)"

"$lockstep" coordinator --model "$dir" --workers 127.0.0.1:1 --unix-socket "$dir/socket" \
  --address-file unix 2> unix.log &
server=$!
wait_for unix
[ "$(cat unix)" = "unix:$dir/socket" ] || fail "address of the unix socket: $(cat unix)"
expect 0 '^SERVING' health --address "$(cat unix)" --service liveness
kill -TERM $server
wait $server || fail "the server on a unix socket ended with $?"
cd / && rm -r "$dir"
exit $failed
