#!/usr/bin/env bash
# Models go to Hugging Face's transformers and come back. Installs the library into a virtual environment in the build
# folder, on top of the system's PyTorch (Debian: python3-torch), then runs transformers_test.py.
#
#   dev/tests/transformers_check.sh BUILD      BUILD has train_gpt and logits
#
# Exit status: 0 as it should be, 1 it is not. Where PyTorch or the library cannot be had nothing is tested: an error
# where that would go unnoticed (CI), a line elsewhere.
set -euo pipefail
cd "$(dirname "$0")/../.."
BUILD=$(cd "$1" && pwd)
VENV=$BUILD/transformers
RELEASE=4.35.2  # one that supports PyTorch 1.13, Debian 12's

without() {
  echo "$1: that models load in transformers is not tested" >&2
  [ -z "${CI:-}" ]
  exit
}
/usr/bin/python3 -c 'import torch, numpy' 2> /dev/null || without "no PyTorch (scripts/setup.sh --oracle)"
"$VENV/bin/python" -c 'import transformers' 2> /dev/null || {
  echo "installing transformers $RELEASE into $VENV"
  rm -rf "$VENV"
  /usr/bin/python3 -m venv --system-site-packages "$VENV" > "$BUILD/transformers.log" 2>&1 ||
    without "no virtual environment (Debian: python3-venv; $BUILD/transformers.log)"
  "$VENV/bin/pip" install -q --disable-pip-version-check "transformers==$RELEASE" >> "$BUILD/transformers.log" 2>&1 ||
    without "transformers could not be installed ($BUILD/transformers.log)"
}
# Nothing is to be fetched by name: all models are folders.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1 OMP_WAIT_POLICY=passive
TRAIN_GPT=$BUILD/train_gpt LOGITS=$BUILD/logits "$VENV/bin/python" dev/tests/transformers_test.py
