#!/usr/bin/env bash
# Everything that only a real GPU can prove, and what it reaches: for a machine with one, unattended, without a network.
#
#   dev/device_check.sh [--out=FOLDER] [--bin=FOLDER] [--only=PART,...] [--seconds=480] [--quick]
#   dev/device_check.sh --dry-run      on a machine without a GPU: builds everything and says what would run
#
#   --out      logs and device_check.json (default: runs/device_check)
#   --bin      programs that are built already: train_gpt, gpu_test, bench_gpu, bench_ladder (default: builds them in
#              build-device, for the GPU that is here)
#   --only     some parts: tests, parity, repeat, recompute, memcheck, racecheck, attention_adamw, ladder, training
#   --seconds  for all of it: what has no time left counts as failed
#   --quick    tiny benchmarks: whether they run, not what they reach
#
# Needs nvcc, g++, cmake, python3 and two header-only libraries, cxxopts and nlohmann-json. Where those are not
# installed, run scripts/setup.sh --prefix=.deps beforehand, with a network, and bring .deps along. Does without
# GoogleTest, MPI, NCCL and oneDNN. Goes on after a failure; exit status: 0 all passed, 1 something failed, 2 something
# is missing.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

PARTS="tests parity repeat recompute memcheck racecheck attention_adamw ladder training"
OUT=runs/device_check BIN='' ONLY=${PARTS// /,} SECONDS_LEFT=480 DRY_RUN='' QUICK=''
for ARG in "$@"; do
  case $ARG in
    --out=?*) OUT=${ARG#*=} ;;
    --bin=?*) BIN=$(cd "${ARG#*=}" && pwd) || exit 2 ;;
    --only=?*) ONLY=${ARG#*=} ;;
    --seconds=[1-9]*) SECONDS_LEFT=${ARG#*=} ;;
    --dry-run) DRY_RUN=yes ;;
    --quick) QUICK=--quick ;;
    -h|--help) sed -n '2,17s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "device_check.sh: error: unknown argument '$ARG'; see --help" >&2; exit 2 ;;
  esac
done
for PART in ${ONLY//,/ }; do
  [[ " $PARTS " == *" $PART "* ]] && continue
  echo "device_check.sh: error: --only: no part '$PART'; there are $PARTS" >&2
  exit 2
done
START=$SECONDS
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd) || exit 2
JOBS=$(nproc)

# --- What is there --------------------------------------------------------------------------------------------------

DEPS=
if [ -d .deps/usr ]; then
  DEPS=$PWD/.deps
  export PATH="$PATH:$DEPS/usr/bin"
  for DIR in "$DEPS"/usr/lib/*-linux-gnu*; do export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$DIR"; done
fi
export PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
there() {  # a header below one of the usual folders
  local DIR
  for DIR in /usr/include /usr/local/include ${DEPS:+"$DEPS/usr/include"}; do [ -e "$DIR/$1" ] && return; done
  return 1
}
MISSING=()
command -v python3 > /dev/null || MISSING+=("python3 (makes data, reads metrics)")
if [ -z "$BIN" ]; then
  command -v nvcc > /dev/null || MISSING+=("nvcc (the CUDA toolkit, 12 or 13; on the PATH or in CUDA_HOME)")
  command -v g++ > /dev/null || MISSING+=("g++ (the host compiler)")
  command -v cmake > /dev/null || MISSING+=("cmake (3.22 or newer)")
  there cxxopts.hpp || MISSING+=("cxxopts.hpp (header-only; Debian: libcxxopts-dev)")
  there nlohmann/json.hpp || MISSING+=("nlohmann/json.hpp (header-only; Debian: nlohmann-json3-dev)")
fi
if [ ${#MISSING[@]} -gt 0 ]; then
  printf 'device_check.sh: error: missing here:\n' >&2
  printf '  %s\n' "${MISSING[@]}" >&2
  echo "With a network, run scripts/setup.sh --prefix=.deps in this folder first, then bring .deps along." >&2
  exit 2
fi
ask_gpu() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2> /dev/null | head -n 1; }
GPU=$(ask_gpu name) DRIVER=$(ask_gpu driver_version)
REVISION=$(git describe --always --dirty 2> /dev/null)

# --- Parts: each with a time limit of its own, its output in a file -------------------------------------------------

ROWS=() JSON=() FAILED=0
write_json() {
  {
    printf '{"gpu": "%s", "driver": "%s", "date": "%s", "revision": "%s", "quick": %s,\n "parts": [\n' \
      "$GPU" "$DRIVER" "$(date -u +%Y-%m-%d)" "$REVISION" "$([ -n "$QUICK" ] && echo true || echo false)"
    local SEPARATOR='' LINE
    for LINE in "${JSON[@]}"; do printf '%s  %s' "$SEPARATOR" "$LINE"; SEPARATOR=$',\n'; done
    printf '],\n "benchmarks": %s,\n "training": %s}\n' "$(cat "$OUT/benchmarks.json" 2> /dev/null || echo null)" \
      "$(cat "$OUT/training.json" 2> /dev/null || echo null)"
  } > "$OUT/device_check.json"
}
# part NAME LIMIT COMMAND...: exit status 77 of the command means skipped, with the reason as its last line.
part() {
  local NAME=$1 LIMIT=$2 BEGIN=$SECONDS LEFT STATUS NOTE=''
  shift 2
  LEFT=$((SECONDS_LEFT - SECONDS + START))
  if [ -n "$DRY_RUN" ]; then echo "would run $NAME, at most $LIMIT s"; return; fi
  if [ $LEFT -lt "$LIMIT" ]; then LIMIT=$LEFT; fi
  if [ "$LIMIT" -le 0 ]; then
    STATUS=FAILED NOTE="no time left of $SECONDS_LEFT s"
  else
    echo "== $NAME"
    timeout -k 5 "$LIMIT" "$@" > "$OUT/$NAME.log" 2>&1
    case $? in
      0) STATUS=passed ;;
      77) STATUS=skipped NOTE=$(tail -n 1 "$OUT/$NAME.log") ;;
      124|137) STATUS=FAILED NOTE="stopped after $LIMIT s" ;;
      *) STATUS=FAILED NOTE="see $NAME.log" ;;
    esac
    if [ "$STATUS" = FAILED ]; then tail -n 40 "$OUT/$NAME.log"; fi
  fi
  if [ "$STATUS" = FAILED ]; then FAILED=$((FAILED + 1)); fi
  ROWS+=("$(printf '%-16s %-8s %4d s  %s' "$NAME" "$STATUS" $((SECONDS - BEGIN)) "$NOTE")")
  JSON+=("$(printf '{"part": "%s", "status": "%s", "seconds": %d, "note": "%s"}' "$NAME" "$STATUS" \
    $((SECONDS - BEGIN)) "${NOTE//[\"\\]/\'}")")
  write_json
}
wanted() { [[ ",$ONLY," == *",$1,"* ]]; }

# --- The build ------------------------------------------------------------------------------------------------------

# For the GPU that is here. Where there is none, for one architecture that tells most, not all that a release is for.
ARCHITECTURE=$(ask_gpu compute_cap | tr -d .)
ARCHITECTURE=${ARCHITECTURE:-90}
build() {
  cmake -S . -B build-device -DWITH_CUDA=ON -DWITH_TESTS=OFF -DWITH_BENCH=OFF ${DEPS:+-DDEPS="$DEPS"} \
    -DCMAKE_CUDA_ARCHITECTURES="$ARCHITECTURE" &&
    cmake --build build-device --parallel "$JOBS" --target device_programs
}
export -f build
export ARCHITECTURE DEPS JOBS
if [ -z "$BIN" ]; then
  BIN=$PWD/build-device
  if [ -n "$DRY_RUN" ]; then
    echo "== build"
    build > "$OUT/build.log" 2>&1 || { tail -n 100 "$OUT/build.log"; echo "device_check.sh: the build failed"; exit 1; }
  else
    part build 300 bash -c build
    if [ $FAILED -gt 0 ]; then echo "device_check.sh: the build failed; see $OUT/build.log"; exit 1; fi
  fi
fi

# --- What the parts run ---------------------------------------------------------------------------------------------

export BIN OUT QUICK
sanitizer() {  # tool
  local TOOL
  TOOL=$(command -v compute-sanitizer ||
    ls "${CUDA_HOME:-/usr/local/cuda}"/compute-sanitizer/compute-sanitizer 2> /dev/null)
  if [ -z "$TOOL" ]; then echo "compute-sanitizer is not installed"; exit 77; fi
  "$TOOL" --tool "$1" --error-exitcode 9 "$BIN/gpu_test" --small
}
export -f sanitizer
runs() { python3 dev/device_runs.py "$@"; }
export -f runs

rm -f "$OUT/benchmarks.json" "$OUT/training.json"
if wanted tests; then part tests 90 "$BIN/gpu_test" ${QUICK:+--small}; fi
if wanted parity; then part parity 60 bash -c 'runs parity'; fi
if wanted repeat; then part repeat 40 bash -c 'runs repeat'; fi
if wanted recompute; then part recompute 60 bash -c 'runs recompute'; fi
if wanted attention_adamw; then
  part attention_adamw 90 "$BIN/bench_gpu" --json="$OUT/benchmarks.json" $QUICK
fi
if wanted training; then part training 150 bash -c 'runs training'; fi
if wanted ladder; then part ladder 60 "$BIN/bench_ladder" $QUICK; fi
# Last, as they slow everything down a hundredfold.
if wanted memcheck; then part memcheck 90 bash -c 'sanitizer memcheck'; fi
if wanted racecheck; then part racecheck 120 bash -c 'sanitizer racecheck'; fi

if [ -n "$DRY_RUN" ]; then echo "device_check.sh: all programs are built; nothing was run"; exit 0; fi
write_json
for NAME in attention_adamw training ladder; do
  if [ -s "$OUT/$NAME.log" ] && wanted "$NAME"; then printf '\n%s\n' "$(cat "$OUT/$NAME.log")"; fi
done
printf '\n%s, driver %s, %s, %s\n' "${GPU:-unknown GPU}" "${DRIVER:-unknown}" "$(date -u +%Y-%m-%d)" "$REVISION"
printf '%s\n' "${ROWS[@]}"
echo "$((SECONDS - START)) s; written to $OUT/device_check.json"
[ $FAILED -eq 0 ]
