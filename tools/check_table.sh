#!/usr/bin/env bash
# Every check has one row in tests/CHECKS.md, and every test named there is in the tree. Prints what is
# not so.
set -uo pipefail
cd "$(dirname "$0")/.."
table=tests/CHECKS.md

ids="01 03 06 08 13 15 16 24 25 29 30 40 43 45 52 54 56 59 60 61 63 65 66 68 69 80 84 85 87 91 93 94 95
100 101 105 107 113 120 121 124 125 126 130 131 132 134 150 153 155"
for id in $ids; do
  rows=$(grep -c "^| T$id |" "$table")
  [ "$rows" -eq 1 ] || echo "T$id has $rows rows"
done
grep -E '^\| T' "$table" | grep -vE '`//|\*missing\*|`tools/' | sed 's/^/names no test: /'

grep -oE '`//[^`]+`' "$table" | tr -d '`' | sort -u | while read -r label test; do
  package=${label#//}
  package=${package%%:*}
  target=${label##*:}
  # Some macros add an ending to the name.
  grep -qE "\"($target|${target%_cpu}|${target%_test})\"" "$package/BUILD" || echo "no target $label"
  [ -n "$test" ] || continue
  grep -qE "^TEST(_F|_P)?\(${test%%.*}, ${test##*.}\)" "$package"/*_test.cc || echo "no test $test in $package"
done
