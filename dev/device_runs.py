#!/usr/bin/env python3
"""Runs of train_gpt for device_check.sh, on random tokens: device_runs.py parity|repeat|recompute|training.

  parity     10 steps on the CPU and on the GPU: losses and gradient norms agree
  repeat     the same GPU run twice: the same bits
  recompute  every --recompute level on the GPU: the same bits
  training   d12 at B = 32, T = 1024 in each precision: step time and MFU; written to training.json
Environment: BIN (folder of train_gpt), OUT (folder for what is written), QUICK (not empty: tiny runs).
Standard library only.
"""
import array
import json
import os
import random
import re
import statistics
import struct
import subprocess
import sys
import tempfile

BINARY = os.path.join(os.environ["BIN"], "train_gpt")
OUT = os.environ["OUT"]
QUICK = bool(os.environ.get("QUICK"))
PRECISIONS = ["bf16", "collage_light", "collage_plus", "fp32_master", "fp32"]
# Heads of 64, as most models have: kernels on tensor cores. Odd lengths, so that every tile has a tail.
SMALL = ["--layers=2", "--channels=128", "--heads=2", "--seq-len=61", "--batch-size=3", "--total-batch-tokens=366",
         "--steps=10", "--lr=1e-3", "--warmup-steps=2", "--edq-every=1"]
if QUICK:
    SMALL = ["--layers=1", "--channels=64", "--heads=2", "--seq-len=17", "--batch-size=2", "--total-batch-tokens=68",
             "--steps=3", "--lr=1e-3", "--warmup-steps=1", "--edq-every=1"]


def write_shard(path, tokens, vocab):
    """Random ids of a skewed distribution, so that there is something to learn and some tokens are frequent."""
    generator = random.Random(1)
    ids = array.array("H", (int(vocab * generator.random() ** 3) for _ in range(tokens)))
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", 20240520, 1, tokens, vocab, *[0] * 252))
        ids.tofile(f)
    return path


def train(work, name, *flags):
    """The metrics lines of a run, without the first, which describes it."""
    out = os.path.join(work, name)
    done = subprocess.run([BINARY, "--out=" + out, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"{name}: exit status {done.returncode}\n{done.stdout}")
    with open(os.path.join(out, "metrics.jsonl"), encoding="utf-8") as f:
        return [json.loads(line) for line in f][1:]


def without_times(steps):
    return [{k: v for k, v in step.items() if not re.search(r"_ms$|_s$|^mfu$", k)} for step in steps]


def parity(work, data):
    """fp32 differs by the order of additions, about 1e-6 in a gradient. Where a gradient is as small as that, AdamW may
    turn its sign, which moves a weight by the learning rate: 1e-5 of the loss. In bf16 activations round to neighbours,
    2^-8 away, here and there, which average out over the batch: 1e-3. (On the emulated GPU: 1e-8 and 4e-5.)"""
    failed = False
    for precision in PRECISIONS:
        cpu, gpu = (train(work, f"{precision}_{device}", *SMALL, data, "--precision=" + precision, "--device=" + device)
                    for device in ("cpu", "cuda"))
        allowed = 1e-5 if precision == "fp32" else 1e-3
        loss = max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in zip(cpu, gpu))
        norm = max(abs(a["grad_norm"] - b["grad_norm"]) / a["grad_norm"] for a, b in zip(cpu, gpu))
        good = loss <= allowed and norm <= 10 * allowed and len(cpu) == len(gpu)
        failed |= not good
        print(f"{'ok' if good else 'FAILED':6} {precision:14} {len(gpu)} steps, largest relative difference: loss "
              f"{loss:.1e} (allowed {allowed:.0e}), gradient norm {norm:.1e} (allowed {10 * allowed:.0e})")
    return failed


def equal_runs(work, data, variants):
    """variants: name -> flags. All must leave the same numbers, but for times."""
    failed = False
    for precision in PRECISIONS:
        runs = {name: without_times(train(work, f"{precision}_{name}", *SMALL, data, "--precision=" + precision,
                                          "--device=cuda", *flags)) for name, flags in variants.items()}
        first = next(iter(runs))
        for name, steps in runs.items():
            differ = [a["step"] for a, b in zip(runs[first], steps) if a != b]
            failed |= bool(differ)
            print(f"{'FAILED' if differ else 'ok':6} {precision:14} {name}" +
                  (f": step {differ[0]} differs from {first}" if differ else ""))
    return failed


def training(work, _):
    """Step time: the median of the steps after the first few, which choose algorithms and fill caches."""
    B, T, warm, steps = (2, 16, 1, 3) if QUICK else (32, 1024, 5, 25)
    vocab = 257 if QUICK else 50257
    shard = write_shard(os.path.join(work, "train_large.bin"), steps * B * T + 1, vocab)
    model = ["--layers=1", "--channels=64", "--heads=2"] if QUICK else ["--model=d12"]
    rows, failed = [], False
    print(f"{'d12' if not QUICK else 'tiny'}, B = {B}, T = {T}, medians of {steps - warm} steps")
    print(f"{'precision':14} {'step ms':>9} {'adamw ms':>9} {'tokens/s':>10} {'MFU':>7}")
    for precision in PRECISIONS:
        try:
            lines = train(work, "speed_" + precision, *model, f"--batch-size={B}", f"--seq-len={T}", f"--steps={steps}",
                          "--train-data=" + shard, "--precision=" + precision, "--device=cuda")[warm:]
        except SystemExit as error:
            print(f"FAILED {precision}: {error}")
            failed = True
            continue
        row = {"precision": precision, "B": B, "T": T}
        for key in ("step_ms", "optimizer_ms", "tokens_per_s", "mfu"):
            values = [line[key] for line in lines if key in line]
            row[key] = statistics.median(values) if values else None
        mfu = "unknown" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %"
        print(f"{precision:14} {row['step_ms']:9.2f} {row['optimizer_ms']:9.3f} {row['tokens_per_s']:10.0f} {mfu:>7}",
              flush=True)
        rows.append(row)
        with open(os.path.join(OUT, "training.json"), "w", encoding="utf-8") as f:
            json.dump(rows, f)
    return failed


def main():
    recompute = {level: ["--recompute=" + level] for level in ("none", "gelu", "layernorm", "block")}
    what = {"parity": parity, "training": training,
            "repeat": lambda work, data: equal_runs(work, data, {"first run": [], "second run": []}),
            "recompute": lambda work, data: equal_runs(work, data, recompute)}
    if len(sys.argv) != 2 or sys.argv[1] not in what:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory(prefix="device_runs_") as work:
        shard = write_shard(os.path.join(work, "train_000.bin"), 10000, 1000)
        sys.exit(1 if what[sys.argv[1]](work, "--train-data=" + shard) else 0)


if __name__ == "__main__":
    main()
