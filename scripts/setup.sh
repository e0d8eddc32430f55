#!/usr/bin/env bash
# Installs what train_gpt is built with, from the system's packages. Does nothing, and asks no network, if all is there.
#
#   scripts/setup.sh                  with apt (sudo when not root); on other systems it prints what is missing
#   scripts/setup.sh --prefix=.deps   without root: downloads the Debian or Ubuntu packages and unpacks them there;
#                                     the Makefile then uses them (CMake: -DDEPS=$PWD/.deps)
#   scripts/setup.sh --oracle         also what make check makes the golden files with, and runs transformers (PyTorch)
#   scripts/setup.sh --browser        also the headless browser that make check looks at reports with
#   scripts/setup.sh --fuzz           also the compiler that make check builds fuzzers with
set -euo pipefail
cd "$(dirname "$0")/.."

# package | what shows that it is there: a command, a header below include/, a library of clang's or a Python module |
# needed or wanted | for
PACKAGES='
g++                |command g++                   |needed|the compiler
make               |command make                  |needed|the short commands
cmake              |command cmake                 |needed|the build
python3            |command python3               |needed|data preparation and tests
python3-numpy      |module  numpy                 |wanted|scripts/checkpoint.py convert
libcxxopts-dev     |header  cxxopts.hpp           |needed|flags
nlohmann-json3-dev |header  nlohmann/json.hpp     |needed|metrics files
libgtest-dev       |header  gtest/gtest.h         |needed|tests
libdnnl-dev        |header  oneapi/dnnl/dnnl.hpp  |wanted|fast matrix products; without it training is many times slower
bible-kjv          |command bible                 |wanted|the text of make quickstart
libbenchmark-dev   |header  benchmark/benchmark.h |wanted|make bench
libopenmpi-dev     |command mpicxx                |wanted|many processes
openmpi-bin        |command mpirun                |wanted|many processes
git                |command git                   |wanted|the version that logs carry
'
ORACLE='
python3-torch      |module  torch                 |wanted|regenerating the golden files, and transformers
python3-venv       |module  ensurepip             |wanted|loading checkpoints in transformers
'

BROWSER='
chromium-headless-shell|command chromium-headless-shell|wanted|checking the report page in a browser
'
FUZZ='
clang              |command clang++               |wanted|fuzzing the readers of files
libclang-rt-dev    |clang   libclang_rt.fuzzer*.a |wanted|fuzzing the readers of files
'

PREFIX=
for ARG in "$@"; do
  case $ARG in
    --prefix=?*) PREFIX=${ARG#--prefix=} ;;
    --oracle) PACKAGES+=$ORACLE ;;
    --browser) PACKAGES+=$BROWSER ;;
    --fuzz) PACKAGES+=$FUZZ ;;
    -h|--help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "setup.sh: error: unknown argument '$ARG'; expected --prefix=FOLDER, --oracle, --browser or --fuzz" >&2; exit 2 ;;
  esac
done
if [ -n "$PREFIX" ]; then
  mkdir -p "$PREFIX"
  PREFIX=$(cd "$PREFIX" && pwd)
fi

there() {  # package kind name
  case $2 in
    command) command -v "$3" > /dev/null && return ;;
    header) for DIR in /usr/include /usr/local/include; do [ -e "$DIR/$3" ] && return; done ;;
    clang) compgen -G "/usr/lib/llvm-*/lib/clang/*/lib/*/$3" > /dev/null && return
           [ -n "$PREFIX" ] && compgen -G "$PREFIX/usr/lib/llvm-*/lib/clang/*/lib/*/$3" > /dev/null && return ;;
    module) /usr/bin/python3 -c "import importlib.util, sys; sys.exit(not importlib.util.find_spec('$3'))" \
              2> /dev/null && return ;;
  esac
  if [ -n "$PREFIX" ]; then
    [ -e "$PREFIX/usr/bin/$3" ] || [ -e "$PREFIX/usr/include/$3" ]
  else
    dpkg -s "$1" 2> /dev/null | grep -q '^Status: install ok installed'
  fi
}

# Fills NEEDED and WANTED with the packages that are not there, and MISSING with a line for each.
look() {
  NEEDED=() WANTED=() MISSING=
  local PACKAGE PROBE LEVEL REASON KIND NAME
  while IFS='|' read -r PACKAGE PROBE LEVEL REASON; do
    PACKAGE=${PACKAGE// /}
    [ -n "$PACKAGE" ] || continue
    read -r KIND NAME <<< "$PROBE"
    if [ "$KIND" = module ] && [ -n "$PREFIX" ]; then continue; fi  # Python would not find it there; pip has it
    there "$PACKAGE" "$KIND" "$NAME" && continue
    if [ "$LEVEL" = needed ]; then NEEDED+=("$PACKAGE"); else WANTED+=("$PACKAGE"); fi
    MISSING+=$(printf '  %-20s %s (%s)' "$PACKAGE" "$REASON" "$LEVEL")$'\n'
  done <<< "$PACKAGES"
}

# What is still missing decides: needed packages are an error, wanted ones a warning. Where CI is set all are needed: no
# test may be skipped there for want of a package.
finish() {
  look
  if [ -n "${CI:-}" ]; then NEEDED+=("${WANTED[@]}"); fi
  if [ ${#NEEDED[@]} -gt 0 ]; then
    printf 'setup.sh: error: still missing:\n%s' "$MISSING" >&2
    exit 1
  fi
  if [ ${#WANTED[@]} -gt 0 ]; then printf 'setup.sh: warning: goes on without\n%s' "$MISSING" >&2; fi
  exit 0
}

look
[ -n "$MISSING" ] || exit 0

if ! command -v apt-get > /dev/null; then
  printf 'setup.sh: this system has no apt. Missing, by their names in Debian:\n%s' "$MISSING" >&2
  echo "Install them with your package manager (a C++20 compiler, CMake 3.22 or newer, oneDNN, ...) and go on." >&2
  if [ ${#NEEDED[@]} -gt 0 ]; then exit 1; else exit 0; fi
fi

if [ -n "$PREFIX" ]; then
  # apt's own files lie under the prefix if the system's package lists are missing or old: they belong to root.
  APT=()
  own_lists() {
    local DIR=$PREFIX/apt
    mkdir -p "$DIR/lists/partial" "$DIR/archives/partial"
    APT=(-o "Dir::State::lists=$DIR/lists" -o "Dir::Cache=$DIR" -o APT::Sandbox::User=root)
    apt-get "${APT[@]}" -qq update
  }
  # Unpacks packages with everything they depend on that is not installed: what apt would install, it only simulates.
  unpack() {
    local LIST DIR=$PREFIX/debs
    LIST=$(apt-get "${APT[@]}" install -s --no-install-recommends "$@" | awk '$1 == "Inst" { print $2 }') || return
    mkdir -p "$DIR"
    # shellcheck disable=SC2086  # a word a package
    (cd "$DIR" && rm -f ./*.deb && apt-get "${APT[@]}" -qq -o APT::Sandbox::User=root download $LIST) || return
    local DEB
    for DEB in "$DIR"/*.deb; do dpkg -x "$DEB" "$PREFIX"; done
    rm -rf "$DIR"
    local COMMAND  # installing would make these the alternatives mpicxx, mpirun, ...
    for COMMAND in "$PREFIX"/usr/bin/*.openmpi; do
      if [ -e "$COMMAND" ]; then ln -sf "$(basename "$COMMAND")" "${COMMAND%.openmpi}"; fi
    done
  }
  if ! command -v g++ > /dev/null; then
    echo "setup.sh: error: g++ is missing, and does not work unpacked elsewhere: ask for it, then run this again" >&2
    exit 1
  fi
  echo "setup.sh: unpacking into $PREFIX: ${NEEDED[*]} ${WANTED[*]}"
  ls /var/lib/apt/lists/*Packages* > /dev/null 2>&1 || own_lists
  if ! unpack "${NEEDED[@]}" "${WANTED[@]}"; then
    own_lists || true
    if ! unpack "${NEEDED[@]}" "${WANTED[@]}"; then
      if [ ${#NEEDED[@]} -gt 0 ]; then unpack "${NEEDED[@]}" || true; fi
      for PACKAGE in "${WANTED[@]}"; do unpack "$PACKAGE" || true; done
    fi
  fi
  finish
fi

ROOT=()
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo > /dev/null; then
    printf 'setup.sh: missing:\n%s' "$MISSING" >&2
    echo "As root: apt-get install ${NEEDED[*]} ${WANTED[*]}; without root: scripts/setup.sh --prefix=.deps" >&2
    if [ ${#NEEDED[@]} -gt 0 ]; then exit 1; else exit 0; fi
  fi
  ROOT=(sudo)
fi
apt() { "${ROOT[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 "$@"; }
install() { apt install -y --no-install-recommends "$@" > /dev/null; }
echo "setup.sh: installing ${NEEDED[*]} ${WANTED[*]}"
UPDATED=
update() {
  UPDATED=yes
  apt update || true
}
ls /var/lib/apt/lists/*Packages* > /dev/null 2>&1 || update
if ! install "${NEEDED[@]}" "${WANTED[@]}"; then
  # The lists may be old, or a wanted package may not exist here: then the others one by one.
  [ -n "$UPDATED" ] || update
  if ! install "${NEEDED[@]}" "${WANTED[@]}"; then
    if [ ${#NEEDED[@]} -gt 0 ]; then install "${NEEDED[@]}" || true; fi
    for PACKAGE in "${WANTED[@]}"; do install "$PACKAGE" || true; done
  fi
fi
finish
