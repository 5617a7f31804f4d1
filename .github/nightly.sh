#!/usr/bin/env bash
# The nightly run: sweeps a list of cells, and with --bench times the kernels, holds each to the baseline of this card, driver
# and method, runs what regressed once more, and writes what was found. It commits nothing and opens nothing: whoever calls it does, from the files in OUT.
#
#   .github/nightly.sh --cells FILE --out OUT [--bin highwater] [--baselines results/baselines] [--bench]
#                      [--bench-args 'ARGS'] [--against DIR --force]
#
# FILE has a sweep a line: a name, then the arguments of `highwater sweep`, split at spaces; # begins a comment. ARGS are of
# `highwater bench`, split the same way.
#
# OUT/run/NAME, OUT/confirm/NAME   the sweeps
# OUT/bench/{run,confirm}          the kernels' times, all of them and those that regressed; OUT/bench/*.{md,log} beside them
# OUT/gate/{run,confirm}/NAME.md   what the gate said; OUT/log/{run,confirm}/NAME.log what the sweeps did
# OUT/summary.md                   one line a sweep, and one for the bench
# OUT/proposed/CARD/DRIVER-mM/NAME a baseline for whoever reviews it, where there was none; CARD/DRIVER-kM/bench of kernels
# OUT/issue.title, OUT/issue.md    only after a regression was found twice
# OUT/outcome                      code=N and confirmed=true|false
#
# Exit code: 4 memory or a lost fit, 3 speed, both only if found twice; 1 a tool or a cell failed; 5 nothing can be said:
# no baseline, inconclusive, or other conditions; 0 nothing is worse. The gravest of all sweeps, in this order.
set -euo pipefail

usage() {
  printf 'nightly: %s\n' "$1" >&2
  printf 'usage: nightly.sh --cells FILE --out OUT [--bin BIN] [--baselines DIR] [--bench] [--bench-args ARGS] [--against DIR --force]\n' >&2
  exit 2
}

cells='' out='' bin=highwater baselines=results/baselines bench=false bench_args='' against='' force=false
while (($# > 0)); do
  case $1 in
    --cells | --out | --bin | --baselines | --against)
      (($# > 1)) || usage "$1 needs a value"
      declare "${1#--}=$2"
      shift 2
      ;;
    --bench-args)
      (($# > 1)) || usage "$1 needs a value"
      bench_args=$2
      shift 2
      ;;
    --bench) bench=true && shift ;;
    --force) force=true && shift ;;
    *) usage "unknown argument $1" ;;
  esac
done
[[ -n $cells ]] || usage '--cells is missing'
[[ -n $out ]] || usage '--out is missing'
[[ -f $cells && -r $cells ]] || usage "no list of cells at $cells"
command -v -- "$bin" > /dev/null || usage "no program $bin"
# Another card's, driver's or method's numbers say nothing here unless somebody insists.
if [[ -n $against ]] && ! $force; then usage '--against chooses a baseline of another key: it needs --force'; fi
if $force && [[ -z $against ]]; then usage '--force is for --against'; fi
if [[ -e $out ]] && [[ -n $(ls -A -- "$out") ]]; then usage "$out is not empty: one run, one folder"; fi
# The list is read whole before anything is written.
names=' ' sweeps=()
while read -r -a words || ((${#words[@]} > 0)); do
  if ((${#words[@]} == 0)) || [[ ${words[0]} == '#'* ]]; then continue; fi
  if [[ ! ${words[0]} =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]]; then usage "$cells: ${words[0]} is no name of letters, digits, . _ and -"; fi
  if [[ $names == *" ${words[0]} "* ]]; then usage "$cells: ${words[0]} is there twice"; fi
  names+="${words[0]} "
  sweeps+=("${words[*]}")
done < "$cells"
if ((${#sweeps[@]} == 0)); then usage "$cells lists no sweep"; fi
if [[ -n $bench_args ]] && ! $bench; then usage '--bench-args is for --bench'; fi
read -r -a bench_words <<< "$bench_args"
baselines=${baselines%/}
mkdir -p -- "$out"/{run,confirm} "$out"/{gate,log}/{run,confirm}

# Codes from grave to harmless; what a sweep ends with is the graver of what was seen.
gravest=0
rank() {
  case $1 in 4) echo 4 ;; 3) echo 3 ;; 0) echo 0 ;; 5) echo 1 ;; *) echo 2 ;; esac
}
count() {
  if (($(rank "$1") > $(rank "$gravest"))); then gravest=$1; fi
}

note() {
  printf '%s\n' "$1"
  printf '%s\n' "$1" >> "$out/summary.md"
}

# Runs a command, its output in a log and here; leaves its exit code in $code.
code=0
try() {
  local log=$1
  shift
  set +e
  "$@" 2>&1 | tee -- "$log"
  code=${PIPESTATUS[0]}
  set -e
}

# The gate of one run against one baseline, with further flags; 2 and whatever is no verdict are tool failures.
gate() {
  local base=$1 judged=$2 report=$3 extra=("${@:4}")
  if $force; then extra+=(--force); fi
  try "$report.log" "$bin" gate "$base" "$judged" --strict --markdown "$report.md" "${extra[@]}"
  case $code in 0 | 1 | 3 | 4 | 5) ;; *) code=1 ;; esac
}

# What the gate wrote, for the issue: its Markdown, or the end of its log.
# shellcheck disable=SC2016 # the backquotes are Markdown
said() {
  if [[ -s $1.md ]]; then cat -- "$1.md"; else printf '```\n%s\n```\n' "$(tail -n 50 -- "$1.log")"; fi
}

# Where the files of what is judged are: its run, the run that confirms it, what the gate said of either, a log.
places() {
  local name=$1
  run=$out/run/$name again=$out/confirm/$name first_said=$out/gate/run/$name second_said=$out/gate/confirm/$name log=$out/log/confirm/$name.log
}

# Judges what $run holds; the arguments after the name are the command that made it, but for --out.
judge() {
  local name=$1 base folder
  shift
  if ! folder=$("$bin" baseline "$run" --in "$baselines"); then
    note "- $name: **failed**: its rows do not say which baseline they are held to"
    count 1
    return
  fi
  base=$folder/$name
  if [[ -n $against ]]; then base=$against/$name; fi
  if [[ ! -d $base ]]; then
    local proposed=$out/proposed/${folder#"$baselines"/}/$name
    mkdir -p -- "$(dirname -- "$proposed")"
    cp -R -- "$run" "$proposed"
    note "- $name: **no baseline** at $base. This run is proposed as one in ${proposed#"$out"/}: look at it, copy it there and commit it"
    count 5
    return
  fi
  gate "$base" "$run" "$first_said"
  local first=$code subset=()
  case $first in
    0) note "- $name: nothing is worse than $base" ;;
    1) note "- $name: **failed**: the gate could not judge it or a cell failed, see ${first_said#"$out"/}.log" ;;
    5) note "- $name: **inconclusive** against $base, see ${first_said#"$out"/}.md" ;;
    3 | 4)
      # Once is noise until it is seen twice, in another process, a while later.
      note "- $name: regression (code $first) against $base: run once more"
      local command=("$@") row
      if [[ $1 == bench ]]; then
        # Of hundreds of kernels some are slow by chance, other ones each time: only the same rows confirm.
        while IFS= read -r row; do
          command+=(--row "$row")
          subset=(--subset)
        done < <(sed -n 's/^SLOWER: \(.* M=[0-9]*\) [a-z]*: time .*/\1/p' "$first_said.log")
      fi
      try "$log" "$bin" "${command[@]}" --out "$again"
      if ((code != 0)); then
        note "- $name: **failed** when it was run once more (code $code)"
        count 1
        return
      fi
      gate "$base" "$again" "$second_said" "${subset[@]}"
      if ((code == 3 || code == 4)); then
        note "- $name: **regression confirmed** (code $code)"
        issue "$name" "$base" "$first" "$*"
      else
        note "- $name: **not confirmed**: the second run ended with code $code"
      fi
      ;;
  esac
  count "$code"
}

# Adds one confirmed regression to the issue.
# shellcheck disable=SC2016 # the backquotes are Markdown
issue() {
  local name=$1 base=$2 first=$3 args=$4 kind='slower'
  if ((code == 4)); then kind='more memory, or a fit lost'; fi
  if [[ ! -s $out/issue.title ]]; then printf 'Nightly regression: %s' "$name" > "$out/issue.title"; else printf ', %s' "$name" >> "$out/issue.title"; fi
  {
    printf '## %s: %s\n\n' "$name" "$kind"
    printf 'Commit %s. Found twice (codes %s and %s), in two processes, against `%s`.\n\n' "${GITHUB_SHA:-$(git rev-parse HEAD 2> /dev/null || echo unknown)}" "$first" "$code" "$base"
    printf 'To run it again: `highwater %s --out run`, then `highwater gate %s run`.\n\n' "$args" "$base"
    printf '### First run\n\n'
    said "$first_said"
    printf '\n### Second run\n\n'
    said "$second_said"
    printf '\n'
  } >> "$out/issue.md"
}

printf '# Nightly\n\n' > "$out/summary.md"
for line in "${sweeps[@]}"; do
  read -r -a args <<< "$line"
  name=${args[0]}
  args=("${args[@]:1}")
  # Nobody is there to answer what a program asks.
  try "$out/log/run/$name.log" "$bin" sweep "${args[@]}" --out "$out/run/$name" < /dev/null
  if ((code != 0)); then
    note "- $name: **failed**: the sweep ended with code $code, see log/run/$name.log"
    count 1
    continue
  fi
  places "$name"
  judge "$name" sweep "${args[@]}" < /dev/null
done

if $bench; then
  # In folders of their own: a sweep may be called bench.
  mkdir -p -- "$out/bench"
  run=$out/bench/run again=$out/bench/confirm first_said=$out/bench/gate-run second_said=$out/bench/gate-confirm log=$out/bench/confirm.log
  try "$out/bench/run.log" "$bin" bench "${bench_words[@]}" --out "$run" < /dev/null
  if ((code != 0)); then
    note "- bench: **failed** with code $code, see bench/run.log"
    count 1
  else
    judge bench bench "${bench_words[@]}" < /dev/null
  fi
fi

confirmed=false
if [[ -s $out/issue.md ]]; then confirmed=true; fi
printf 'code=%s\nconfirmed=%s\n' "$gravest" "$confirmed" > "$out/outcome"
exit "$gravest"
