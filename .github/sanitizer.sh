#!/usr/bin/env bash
# Runs a small subset of every op's cases on the card under compute-sanitizer: memcheck, then racecheck. A line each.
#
#   .github/sanitizer.sh TEST_BINARY OUT [OP...]
#
# TEST_BINARY is what `cargo test --no-run --test it` names; OP as `moe` [default: every op that has tests on the card]. OUT gets
# a log each. Exit code: 0 no tool found anything; 1 one did, or could not run.
set -euo pipefail

if (($# < 2)); then
  printf 'usage: sanitizer.sh TEST_BINARY OUT [OP...]\n' >&2
  exit 2
fi
binary=$1 out=$2
shift 2
ops=("$@")
command -v compute-sanitizer > /dev/null || { printf 'sanitizer: no compute-sanitizer; it comes with the CUDA toolkit\n' >&2 && exit 2; }
[[ -x $binary ]] || { printf 'sanitizer: no program %s\n' "$binary" >&2 && exit 2; }
if ((${#ops[@]} == 0)); then
  # Whole models, and the bytes of large ones, launch what the ops' own cases launch.
  mapfile -t ops < <("$binary" --list 2> /dev/null | sed -n 's/^cuda::\([a-z0-9_]*\)::.*: test$/\1/p' | grep -vx 'model\|parity' | sort -u)
fi
if ((${#ops[@]} == 0)); then
  printf 'sanitizer: %s has no tests cuda::OP::\n' "$binary" >&2
  exit 2
fi
mkdir -p -- "$out"
bad=0
for tool in memcheck racecheck; do
  for op in "${ops[@]}"; do
    log=$out/$tool-$op.log
    # A card must be there: a test that skips itself has shown nothing.
    if REQUIRE_GPU=1 SMALL_CASES=1 compute-sanitizer --tool "$tool" --error-exitcode 9 "$binary" "cuda::$op::" --test-threads=1 > "$log" 2>&1; then
      verdict=clean
    else
      verdict='FAILED' bad=1
    fi
    printf '%s %s: %s (%s)\n' "$tool" "$op" "$verdict" "$(grep -a 'ERROR SUMMARY\|RACECHECK SUMMARY' "$log" | tail -n 1 | sed 's/^=* *//')"
  done
done
exit "$bad"
