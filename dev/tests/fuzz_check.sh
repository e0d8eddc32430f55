#!/usr/bin/env bash
# Fuzzes each reader of files that may hold anything: token shards, tokenizers, safetensors, llm.c's models, the folders
# of transformers, state.json. Two at a time, each for so many seconds.
#
#   dev/tests/fuzz_check.sh [SECONDS]      default 30
#
# What a run finds new stays in build-fuzz/corpus, where the next begins. Exit status: 0 nothing found, 1 a finding (the
# input's path is printed; build-fuzz/fuzz_TARGET PATH runs it again) or a failed build. Without a clang that has
# libFuzzer nothing is fuzzed: an error where that would go unnoticed (CI), a line elsewhere.
set -euo pipefail
cd "$(dirname "$0")/../.."
TIME=${1:-30}
BUILD=build-fuzz
mkdir -p $BUILD/corpus $BUILD/found

# A clang that can link a fuzz target: the runtime library is a package of its own.
CLANG=
for C in clang++ clang++-{14..22}; do
  command -v "$C" > /dev/null || continue
  if echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' |
     "$C" -x c++ - -fsanitize=fuzzer,address -o $BUILD/probe 2> /dev/null; then CLANG=$C; break; fi
done
if [ -z "$CLANG" ]; then
  echo "no clang++ that links -fsanitize=fuzzer: the readers of files are not fuzzed (scripts/setup.sh --fuzz)" >&2
  [ -z "${CI:-}" ]
  exit
fi
INCLUDE=
if [ -d .deps/usr/include ]; then INCLUDE="-isystem .deps/usr/include"; fi
env -u MAKEFLAGS -u MAKELEVEL make -s -j2 -f dev/tests/fuzz/Makefile CLANG="$CLANG" BUILD=$BUILD INCLUDE="$INCLUDE"
rm -rf $BUILD/seeds
python3 dev/tests/fuzz/seeds.py $BUILD/seeds

# Inputs are small: a reader that allocates 64 MiB for one trusts a number in it.
fuzz() {
  local TARGET=$1 LOG=$BUILD/found/$1.log STATUS=0
  mkdir -p "$BUILD/corpus/$TARGET"
  UBSAN_OPTIONS=print_stacktrace=1 "$BUILD/fuzz_$TARGET" -max_total_time="$TIME" -timeout=10 -rss_limit_mb=2048 \
    -malloc_limit_mb=64 -max_len=8192 -dict=dev/tests/fuzz/words.dict -print_final_stats=1 \
    -artifact_prefix="$BUILD/found/$TARGET." "$BUILD/corpus/$TARGET" "$BUILD/seeds/$TARGET" > "$LOG" 2>&1 || STATUS=$?
  local RUNS COVERAGE CORPUS
  RUNS=$(sed -n 's/^stat::number_of_executed_units: *//p' "$LOG")
  COVERAGE=$(grep -o 'cov: [0-9]*' "$LOG" | tail -n 1)
  CORPUS=$(grep -o 'corp: [0-9]*' "$LOG" | tail -n 1)
  printf '%-14s %10s runs   %-10s %s\n' "$TARGET" "${RUNS:-no}" "$COVERAGE" "$CORPUS"
  if [ $STATUS -ne 0 ]; then
    grep -E -m 3 'CHECK|ERROR|runtime error|SUMMARY' "$LOG" || tail -n 5 "$LOG"
    grep -o 'Test unit written to .*' "$LOG" || true
    return 1
  fi
}
export -f fuzz
export BUILD TIME
for SOURCE in dev/tests/fuzz/*.cpp; do basename "$SOURCE" .cpp; done | xargs -P 2 -I{} bash -c 'fuzz {}' || exit 1
