#!/usr/bin/env python3
"""What a checkpoint costs: the stall against a copy of the state in memory, the speed of a run that saves at a tenth of
its steps against one that does not, and the load against reading the files.

  dev/bench/checkpoint.py [--rounds=3] [--steps=20] [--model=gpt2:124M] [--seq-len=256] [--batch-size=4] [--out=FOLDER]

Runs with and without checkpoints are interleaved; medians, and their ratios.
"""
import argparse
import glob
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def run(flags):
    done = subprocess.run([os.path.join(ROOT, "train_gpt"), *flags], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "OMP_WAIT_POLICY": "passive"})
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def copy_seconds(size):
    """Of so many bytes of memory into others, by one thread; the median of five."""
    a, b, times = bytearray(os.urandom(1 << 20) * (size >> 20)), bytearray(size >> 20 << 20), []
    for _ in range(5):
        begin = time.perf_counter()
        memoryview(b)[:] = a
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in [("rounds", 3), ("steps", 20), ("model", "gpt2:124M"), ("seq-len", 256), ("batch-size", 4),
                          ("out", None)]:
        parser.add_argument("--" + name, default=default, type=type(default) if default else str)
    args = parser.parse_args()
    out = tempfile.mkdtemp(prefix="bench_checkpoint_", dir=args.out)
    flags = [f"--model={args.model}", f"--seq-len={args.seq_len}", f"--batch-size={args.batch_size}", "--val-every=0",
             "--vocab-size=50257", "--edq-every=0", f"--steps={args.steps}", "--out=" + out]
    speeds, stalls, step_ms = {"without": [], "with": []}, [], []
    for _ in range(args.rounds):
        for name, more in [("without", []), ("with", ["--checkpoint-every=10"])]:
            run(flags + more)
            with open(out + "/metrics.jsonl", encoding="utf-8") as f:
                steps = [json.loads(line) for line in f][2:]  # the first step makes the library's primitives
            # step_ms does not hold the stall, and what a save in the background takes lies in the steps after it.
            ms = [s["step_ms"] + s.get("checkpoint_ms", 0) for s in steps[:-1]]
            speeds[name].append(1e3 * len(ms) * steps[0]["tokens"] / steps[0]["step"] / sum(ms))
            stalls += [s["checkpoint_ms"] for s in steps if "checkpoint_ms" in s]
            step_ms += ms
    folder = sorted(glob.glob(out + "/checkpoints/step_*"))[-1]
    files = sum(os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder))
    copy = copy_seconds(files) * 1e3
    without, with_ = (statistics.median(speeds[name]) for name in ["without", "with"])
    print(f"state               {files / 1e9:.2f} GB on the disk; a step {statistics.median(step_ms):.0f} ms")
    print(f"stall               {statistics.median(stalls):.0f} ms (of {len(stalls)}: {min(stalls):.0f} to {max(stalls):.0f}),"
          f" {100 * statistics.median(stalls) / copy:.0f} % of a copy by one thread, {copy:.0f} ms")
    print(f"saving every 10th   {with_:.1f} of {without:.1f} tokens/s: {100 * (1 - with_ / without):+.1f} % lost")
    begin = time.perf_counter()
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb", buffering=0) as f:
            while f.read(1 << 24):
                pass
    read = time.perf_counter() - begin
    ready = {}
    for name, more in [("new", []), ("resumed", ["--resume", "--checkpoint-every=0"])]:
        text = run(flags[:-2] + [f"--steps={args.steps + 1}", "--out=" + (out if more else out + "/new")] + more)
        ready[name] = float(re.search(r"ready in ([\d.]+)s", text)[1])
    print(f"load                ready in {ready['resumed']:.1f} s, a new run in {ready['new']:.1f} s;"
          f" its files read once more take {read:.2f} s")
    shutil.rmtree(out)


if __name__ == "__main__":
    main()
