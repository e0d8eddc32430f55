#!/usr/bin/env bash
# Trains a small GPT on the King James Bible and shows what it learned; `make quickstart` runs it after building.
# scripts/quickstart.sh [steps]; without steps it takes about two minutes on 2 cores.
set -euo pipefail
cd "$(dirname "$0")/.."
STEPS=${1:-300}
OUT=runs/quickstart

python3 scripts/prepare_data.py kjv
echo
./train_gpt --precision=collage_plus --train-data='data/kjv/train_*.bin' --val-data='data/kjv/val_*.bin' \
  --model=d6 --layers=4 --channels=256 --heads=4 --seq-len=256 --batch-size=8 \
  --steps="$STEPS" --lr=1e-3 --warmup-steps=20 --val-every=50 --val-sequences=64 \
  --sample-every="$STEPS" --sample-tokens=200 --prompt="In the beginning" --out="$OUT"

echo
python3 - "$OUT/metrics.jsonl" << 'PYTHON'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])][1:]
val = [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]
print("validation loss: " + ", ".join(f"{loss:.3f} at step {step}" for step, loss in val))
PYTHON
cat << TEXT
The log of each step: $OUT/metrics.jsonl
Next, the same with plain BF16, to compare losses and lost updates (lost_frac):
  ./train_gpt --precision=bf16 --model=d6 --layers=4 --channels=256 --heads=4 --seq-len=256 --batch-size=8 \\
    --steps=$STEPS --lr=1e-3 --warmup-steps=20 --val-every=50 --val-sequences=64 --out=runs/quickstart_bf16
On your own text:
  python3 scripts/prepare_data.py --name mytext a.txt b.txt
  ./train_gpt --train-data='data/mytext/train_*.bin' --val-data='data/mytext/val_*.bin' --out=runs/mytext
All flags: ./train_gpt --help
TEXT
