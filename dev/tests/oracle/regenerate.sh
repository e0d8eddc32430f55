#!/bin/sh
# Writes the golden files of dev/tests/golden anew. With --check it writes them to a temporary folder and compares with
# the committed ones: bit for bit what NumPy made, within stated tolerances (compare.py) what PyTorch made.
# Needs a Python with NumPy and PyTorch (Debian: python3-torch), taken from $PYTHON or found; --check skips what it
# lacks, which is an error where that would go unnoticed (CI).
set -eu
oracle=$(cd "$(dirname "$0")" && pwd)
golden=$oracle/../golden
check=false
case "${1:-}" in
  "") ;;
  --check) check=true ;;
  *) echo "usage: $0 [--check]" >&2; exit 2 ;;
esac

# The first Python that has a module.
find_python() {
  for python in "${PYTHON:-}" python3 /usr/bin/python3; do
    if [ -n "$python" ] && "$python" -c "import $1" 2>/dev/null; then
      echo "$python"
      return
    fi
  done
}
numpy=$(find_python numpy)
torch=$(find_python "numpy, torch")
if ! $check && [ -z "$torch" ]; then
  echo "$0: no Python with numpy and torch found (Debian: apt install python3-torch), or set PYTHON" >&2
  exit 1
fi

export PYTHONDONTWRITEBYTECODE=1
new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT
[ -z "$numpy" ] || "$numpy" "$oracle/adamw.py" "$new"
if [ -n "$torch" ]; then
  "$torch" "$oracle/layers.py" "$new"
  "$torch" "$oracle/model.py" "$new"
else
  echo "no Python with torch: the golden files of layers and model are not checked (Debian: python3-torch)"
  [ -z "${CI:-}" ] || exit 1
fi
if ! $check; then
  cp "$new"/*.safetensors "$golden/"
  exit 0
fi

status=0
for file in "$golden"/*.safetensors; do
  name=$(basename "$file")
  case $name in adamw_*) how=--exact ;; *) how=--close ;; esac
  if [ -f "$new/$name" ]; then
    "$numpy" "$oracle/compare.py" "$file" "$new/$name" $how || status=1
  elif { [ $how = --exact ] && [ -n "$numpy" ]; } || [ -n "$torch" ]; then
    echo "$file: no generator writes it"
    status=1
  fi
done
[ $status = 0 ] && echo "golden files: as regenerated"
exit $status
