#!/bin/sh
# Mutation of barriers: skips each __syncthreads, __syncwarp and cp_async_wait in turn, and runs the tests again. A run
# that still passes means that no test needs this barrier: the test is too weak, or the barrier superfluous.
#
#   mutate.sh [-p PATTERN] [-s N] COMMAND...     PATTERN: only places that match this grep expression; N: so many may
#                                                survive (0), for what only ThreadSanitizer sees
#
# Exit status: 0 every place was missed by some test, 1 some was not, 2 the tests fail without any mutation.
pattern=. allowed=0
while [ "$1" = -p ] || [ "$1" = -s ]; do
  if [ "$1" = -p ]; then pattern=$2; else allowed=$2; fi
  shift 2
done
[ $# -gt 0 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2; }

sites=$(mktemp) && log=$(mktemp) || exit 2
trap 'rm -f "$sites" "$log"' EXIT
if ! SIMT_SITES=$sites "$@" > "$log" 2>&1; then
  tail -20 "$log"
  echo "mutate.sh: the tests fail as they are"
  exit 2
fi

total=0 survived=0
# Several processes may note the same place.
for place in $(sort -u "$sites" | grep -e "$pattern" | sed 's/^[^ ]* //'); do
  total=$((total + 1))
  if SIMT_DROP=$place timeout 300 "$@" > "$log" 2>&1; then
    survived=$((survived + 1))
    echo "SURVIVED $place: no test fails without this barrier"
  else
    echo "caught   $place"
  fi
done
echo "$total barriers, $survived not needed by any test"
[ $total -gt 0 ] && [ $survived -le "$allowed" ]
