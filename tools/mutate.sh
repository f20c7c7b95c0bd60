#!/usr/bin/env bash
# Mutates the guards of recovery, one at a time, and shows that each mutation turns a named test red.
#
#   tools/mutate.sh            all of tests/mutations
#   tools/mutate.sh NAME...    only these
#   tools/mutate.sh --check    only that every patch applies (what tools/lint.sh runs)
#
# A patch begins with lines "Test: //target" (red with the mutation) and says in words what it
# breaks. Works in a copy of the tree with a build folder of its own; the tree is left as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD

names=()
check_only=false
for argument in "$@"; do
  if [ "$argument" = --check ]; then check_only=true; else names+=("$argument"); fi
done
if [ "${#names[@]}" -eq 0 ]; then
  for patch in tests/mutations/*.patch; do names+=("$(basename "$patch" .patch)"); done
fi

if $check_only; then
  for name in "${names[@]}"; do
    if ! git apply --check "tests/mutations/$name.patch"; then
      echo "mutate: tests/mutations/$name.patch does not apply: the guard has moved, renew the patch" >&2
      exit 1
    fi
  done
  exit 0
fi

tools/install_deps.sh
# Not under /tmp, which the sandbox of the build hides.
mkdir -p "$HOME/.cache"
copy=$(mktemp -d "$HOME/.cache/lockstep-mutate.XXXXXX")
trap 'bazel shutdown > /dev/null 2>&1 || true; rm -rf "$copy"' EXIT
git ls-files -z | xargs -0 tar -cf - | tar -xf - -C "$copy"
[ ! -f .bazelrc.user ] || cp .bazelrc.user "$copy"
cd "$copy"
git init -q .
killed=0
survived=()
for name in "${names[@]}"; do
  patch=$root/tests/mutations/$name.patch
  mapfile -t targets < <(sed -n 's/^Test: //p' "$patch")
  [ "${#targets[@]}" -gt 0 ] || { echo "mutate: $patch names no test" >&2; exit 1; }
  git apply "$patch"
  echo "== $name: ${targets[*]}" >&2
  code=0
  bazel test --test_output=summary "${targets[@]}" > "$copy/log" 2>&1 || code=$?
  git apply -R "$patch"
  # 3: built, and a test failed.
  if [ "$code" -eq 3 ]; then
    killed=$((killed + 1))
  else
    survived+=("$name (bazel exit code $code)")
    tail -20 "$copy/log" >&2
  fi
done
for name in "${survived[@]:-}"; do [ -z "$name" ] || echo "SURVIVED: $name" >&2; done
echo "$killed mutations turned a test red, ${#survived[@]} did not"
[ "${#survived[@]}" -eq 0 ]
