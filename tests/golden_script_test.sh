#!/usr/bin/env bash
# tools/golden.py: what is within bounds, what is not, and what cannot be run are told apart.
set -uo pipefail
data=tests/testdata
failed=0

# expect CODE PATTERN ARGUMENTS...: exit code and a pattern in the output.
expect() {
  local code=$1 pattern=$2 output got
  shift 2
  output=$(tools/golden.py --lockstep tools/lockstep --activations f32 "$@" 2>&1)
  got=$?
  if [ "$got" != "$code" ] || ! grep -qE -- "$pattern" <<<"$output"; then
    printf 'golden.py %s: exit code %s (expected %s), output:\n%s\n' "$*" "$got" "$code" "$output"
    failed=1
  fi
}

model=qwen3_5-trained-ct-nvfp4-fp8
reference=$data/qwen3_5-trained-text/perplexity.json
expect 0 'all within bounds' --tp 1,2 $data/qwen3-fp8-block
expect 0 'not legal; legal: 1, 2' --tp 4 $data/qwen3-fp8-block
expect 0 'perplexity .*expected 84\.2.* ok' --tp 2 --perplexity $reference $data/$model

# Reference outputs of other weights, and another perplexity.
wrong=$TEST_TMPDIR/$model
mkdir "$wrong"
cp -L $data/$model/* "$wrong"
python3 - "$wrong/golden.safetensors" <<'END'
import json, struct, sys

path = sys.argv[1]
data = bytearray(open(path, "rb").read())
header = 8 + struct.unpack("<Q", data[:8])[0]
begin, end = json.loads(data[8:header])["weight_only.prompt1.logits"]["data_offsets"]
data[header + begin : header + end] = struct.pack("<f", 1.0) * ((end - begin) // 4)
open(path, "wb").write(data)
END
expect 5 'weight_only .*OUT OF BOUNDS' --tp 1 "$wrong"
cp -L $data/qwen3_5-trained-text/eval.txt "$TEST_TMPDIR"
sed 's/84\.2/84.5/' $reference >"$TEST_TMPDIR/perplexity.json"
expect 5 'perplexity .*expected 84\.5.*OUT OF BOUNDS' --tp 1 \
  --perplexity "$TEST_TMPDIR/perplexity.json" $data/$model
rm "$wrong/model.safetensors"
expect 5 'model.safetensors' --tp 1 "$wrong"
exit $failed
