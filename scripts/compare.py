#!/usr/bin/env python3
"""Compares precisions: trains each with each seed, or reads existing run folders. Standard library only.

  scripts/compare.py --precisions=bf16,collage_plus,fp32_master --seeds=1,2,3 --out=runs/compare -- --steps=200
  scripts/compare.py [--out=FOLDER] RUN_FOLDER ...

What follows -- are flags of train_gpt, the same for all. A precision may carry more: collage_plus:lr=1e-4:beta2=0.99.
Equal seeds give equal initial weights and equal data order, so runs are compared in pairs: each with the reference,
fp32_master, of its seed. A run that is complete is not repeated; after an interruption the same command goes on.

Prints a table and writes report.html (opens in any browser, needs no network) and compare.json into --out.
"""
import argparse
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time

REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TEMPLATE = os.path.join(REPOSITORY, "runtime", "report.html")
REFERENCE = "fp32_master"
LAST = 50  # edq and lost_frac are means over the last so many measurements
MAX_ROWS, MAX_GROUP_ROWS = 4000, 200  # of one run in the report, about
# Flags that change what is measured and printed, where it goes or how fast it is, but no weight: runs that differ in
# these are the same experiment. And the two that runs are grouped by.
NO_DIFFERENCE = {"out", "threads", "recompute", "zero", "val-every", "edq-every", "shadow", "lockstep", "sample-every",
                 "sample-tokens", "prompt"} | {"precision", "seed"}


class Problem(Exception):
    """What the user did or the machine has: one line, no traceback."""


# ---------------------------------------------------------------------------------------------------------------------
# Statistics.

def student_t(t, n):
    """P(|T| < t) for Student's t with n degrees of freedom, a whole number: exact (Abramowitz & Stegun 26.7.3, .4)."""
    angle = math.atan(t / math.sqrt(n))
    sine, cosine = math.sin(angle), math.cos(angle)
    term = cosine if n % 2 else 1.0
    total = term if n > 1 else 0.0
    for k in range(2 + n % 2, n - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if n % 2 else sine * total


def student_quantile(n, confidence=0.95):
    """The t for which student_t(t, n) = confidence, by bisection."""
    low, high = 0.0, 1.0
    while student_t(high, n) < confidence:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student_t(middle, n) < confidence else (low, middle)
    return high


def mean_and_half_width(values):
    """The mean and half the width of its 95 % confidence interval; None for what cannot be known from so few."""
    if not values:
        return None, None
    if len(values) == 1:
        return values[0], None
    half = student_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), half


def finite(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


# ---------------------------------------------------------------------------------------------------------------------
# Runs.

class Run:
    """A run folder: the first line of its metrics.jsonl, and its rows, one a step."""

    def __init__(self, folder):
        self.folder = folder
        file = os.path.join(folder, "metrics.jsonl")
        try:
            with open(file, encoding="utf-8", errors="replace") as f:
                text = f.read()
        except OSError as e:
            raise Problem(f"{file}: {e.strerror}; expected a run folder, what train_gpt --out=FOLDER writes")
        lines = []
        for line in text.split("\n"):
            try:
                lines.append(json.loads(line))
            except ValueError:
                pass  # a run that is still going or was killed ends in half a line
        known = [line for line in lines if isinstance(line, dict)]
        self.line = known[0] if known else {}
        self.rows = [row for row in known[1:] if isinstance(row.get("step"), int)]
        self.flags = self.line.get("flags")
        if not isinstance(self.flags, dict) or "precision" not in self.line:
            raise Problem(f"{file}: found no run in its first line, expected the metrics of train_gpt")
        if not self.rows:
            raise Problem(f"{file}: the run has no steps yet")
        self.precision, self.seed = self.line["precision"], self.flags.get("seed")
        self.label = self.precision
        self.at_step = {row["step"]: row for row in self.rows}

    def last_step(self):
        return self.rows[-1]["step"]

    def val_steps(self):
        return {row["step"] for row in self.rows if "val_loss" in row}

    def sound(self, loss):
        """Not of a run that diverged: a number (metrics.jsonl has null where it was none), and no more than twice the
        loss of the untrained model."""
        start = self.rows[0].get("loss")
        return finite(loss) and not (finite(start) and loss > 2 * start)

    def diverged_at(self):
        """The first step whose loss is not sound, or None."""
        return next((row["step"] for row in self.rows if "loss" in row and not self.sound(row["loss"])), None)

    def values(self, key, last_step):
        return [row[key] for row in self.rows if row["step"] <= last_step and finite(row.get(key))]

    def bytes_per_param(self):
        """What weights, gradients and optimizer states take, as allocated."""
        memory = self.line.get("memory", {})
        sizes = [memory.get(key) for key in ("weights", "gradients", "states")]
        return sum(sizes) / self.line["parameters"] if all(map(finite, sizes)) else None


def name_runs(runs):
    """Labels: the precision, and each flag that differs from what most of the runs have."""
    keys = {key for run in runs for key in run.flags} - NO_DIFFERENCE
    usual = {}
    for key in sorted(keys):
        values = [run.flags.get(key) for run in runs]
        usual[key] = max(values, key=values.count)
    for run in runs:
        differs = {key: run.flags.get(key) for key in usual if run.flags.get(key) != usual[key]}
        run.label = run.precision + "".join(f":{key}={value:g}" if isinstance(value, float) else f":{key}={value}"
                                            for key, value in differs.items())
    seen = {}
    for run in runs:
        if (run.label, run.seed) in seen:
            raise Problem(f"{seen[run.label, run.seed]} and {run.folder} are the same run, {run.label} with seed "
                          f"{run.seed}; expected each once")
        seen[run.label, run.seed] = run.folder


def find_references(runs):
    """Gives each run the reference of its seed: that with most other flags in common. Returns the reference's label."""
    for run in runs:
        candidates = [other for other in runs if other.precision == REFERENCE and other.seed == run.seed]
        run.reference = max(candidates, default=None, key=lambda other: sum(
            run.flags.get(key) == value for key, value in other.flags.items() if key not in NO_DIFFERENCE))
        if run.reference is None:
            continue
        for row in run.rows:
            other = run.reference.at_step.get(row["step"], {})
            for key, difference in [("loss", "difference"), ("val_loss", "val_difference")]:
                if run.sound(row.get(key)) and run.reference.sound(other.get(key)):
                    row[difference] = row[key] - other[key]
    return REFERENCE if any(run.reference for run in runs) else None


# ---------------------------------------------------------------------------------------------------------------------
# The comparison.

def compare(runs):
    """What compare.json holds: the table, a row a label, and what the reader must know to trust it."""
    name_runs(runs)
    reference = find_references(runs)
    notes = []
    with_val = [run for run in runs if run.val_steps()]
    common = set.intersection(*(run.val_steps() for run in with_val)) if with_val else set()
    compared_at = max(common, default=None)
    if compared_at is None:
        notes.append("No validation step that all runs have: no validation losses are compared.")
    elif any(run.last_step() > compared_at for run in runs):
        notes.append(f"The runs are of different length: compared at step {compared_at:,}, the last validation that "
                     f"all of them have.")
    if reference is None:
        notes.append(f"No run with {REFERENCE}: no differences to a reference.")

    table = []
    for label in dict.fromkeys(run.label for run in runs):
        same = [run for run in runs if run.label == label]
        table.append(table_row(label, same, compared_at))
    return {"reference": reference, "compared_at": compared_at, "notes": notes, "table": table}


def table_row(label, runs, compared_at):
    end = compared_at if compared_at is not None else max(run.last_step() for run in runs)
    of_runs = lambda key, last: [x for run in runs for x in run.values(key, end)[last]]
    mean = lambda values: statistics.fmean(values) if values else None
    median = lambda values: statistics.median(values) if values else None

    at_end = [run.at_step.get(compared_at, {}) for run in runs]
    differences = [row["val_difference"] for row in at_end if "val_difference" in row]
    difference, half = mean_and_half_width(differences)
    notes = []
    for run in runs:
        seed = f"seed {run.seed} " if len(runs) > 1 else ""
        skipped = sum(row.get("skipped") is True for row in run.rows)
        if run.diverged_at() is not None:
            notes.append(f"{seed}diverged at step {run.diverged_at()}")
        if skipped:
            notes.append(f"{seed}skipped {skipped} step{'s' if skipped > 1 else ''}")
        if run.last_step() and run.last_step() < run.flags.get("steps", 0):
            notes.append(f"{seed}ended early at step {run.last_step()} of {run.flags['steps']}")
        if not run.val_steps():
            notes.append(f"{seed}has no validation loss")
        if run.flags.get("lockstep"):
            notes.append(f"{seed}has the states of the optimizers in lock-step too")
    return {"label": label, "seeds": [run.seed for run in runs],
            "val_loss": mean([row["val_loss"] for run, row in zip(runs, at_end) if run.sound(row.get("val_loss"))]),
            "val_losses": [row.get("val_loss") for row in at_end],
            "difference": difference,
            "difference_low": None if half is None else difference - half,
            "difference_high": None if half is None else difference + half,
            "edq": mean(of_runs("edq", slice(-LAST, None))),
            "lost_frac": mean(of_runs("lost_frac", slice(-LAST, None))),
            "bytes_per_param": runs[0].bytes_per_param(),
            # Without a run's first step, which pays for set-up.
            "tokens_per_s": median(of_runs("tokens_per_s", slice(1, None))),
            "optimizer_ms": median(of_runs("optimizer_ms", slice(1, None))),
            "notes": notes}


def text_table(comparison):
    """The table for a terminal, within 120 columns; notes below it."""
    text = lambda value, form: form.format(value) if finite(value) else "-"
    lines = [["precision", "seeds", "val loss", "difference [95 % interval]", "EDQ", "lost", "B/param", "tokens/s",
              "opt ms"]]
    for row in comparison["table"]:
        difference = text(row["difference"], "{:+.4f}")
        if row["label"] == comparison["reference"]:
            difference = "reference"
        elif finite(row["difference_low"]):
            difference += f" [{row['difference_low']:+.4f}, {row['difference_high']:+.4f}]"
        elif finite(row["difference"]):
            difference += " (one seed)"
        lines.append([row["label"], str(len(row["seeds"])), text(row["val_loss"], "{:.4f}"), difference,
                      text(row["edq"], "{:.3f}"), text(row["lost_frac"], "{:.1%}"),
                      text(row["bytes_per_param"], "{:.2f}"), text(row["tokens_per_s"], "{:,.0f}"),
                      text(row["optimizer_ms"], "{:.2f}")])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    widths[0] = min(widths[0], 119 - sum(widths[1:]) - 2 * (len(widths) - 1))
    out = []
    for line in lines:
        if len(line[0]) > widths[0]:
            line[0] = line[0][:widths[0] - 3] + "..."
        cells = [line[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]
        out.append("  ".join(cells))
    notes = comparison["notes"] + [f"{row['label']}: {'; '.join(row['notes'])}" for row in comparison["table"]
                                   if row["notes"]]
    return "\n".join(out + [textwrap.fill(note, 119, subsequent_indent="  ") for note in notes])


# ---------------------------------------------------------------------------------------------------------------------
# The report.

# A long run is thinned, everywhere alike, as runtime/report.cpp thins it.

def keep(rows):
    """Those with the lowest and the highest loss, so that a spike stays, and each with a validation loss or skipped."""
    order = sorted(rows, key=lambda row: row["loss"] if finite(row.get("loss")) else math.inf)
    return [row for row in rows if row is order[0] or row is order[-1] or "val_loss" in row or "skipped" in row]


def thinned(rows):
    """What stays of the rows, one bucket of `stride` after the other; where it becomes too much, the stride doubles."""
    stride, limit, begin, kept = 2, MAX_ROWS, 0, []
    while begin + stride <= len(rows):
        kept += keep(rows[begin:begin + stride])
        begin += stride
        if len(kept) > limit:
            kept = [row for i in range(0, len(kept), 4) for row in keep(kept[i:i + 4])]
            stride *= 2
            limit = max(limit, len(kept) * 3 // 2)  # where most rows must stay
    return kept + rows[begin:]


def thinned_groups(rows):
    """What the page draws of single tensor groups, of one in `stride` of the rows that have it."""
    drawn = lambda key: of_group(key) and key.endswith((".edq", ".lost_frac"))
    found = [(row["step"], {key: value for key, value in row.items() if drawn(key)}) for row in rows]
    found = [{**values, "step": step} for step, values in found if values]
    stride = 1
    while len(found) > MAX_GROUP_ROWS * stride:
        stride *= 2
    return found[::stride]


def of_group(key):
    """h0.attn.edq is of one tensor group; lockstep.bf16.edq is of a whole model."""
    return "." in key and not key.startswith("lockstep.")


def columns(rows, wanted=lambda key: True):
    """The rows as {key: [a value a row, or None]}, numbers with 7 digits."""
    short = lambda x: float(f"{x:.7g}") if isinstance(x, float) and math.isfinite(x) else x
    keys = dict.fromkeys(key for row in rows for key in row if wanted(key))
    return {key: [short(row.get(key)) for row in rows] for key in keys}


def report(runs, comparison):
    """The page: the template with the data in it."""
    with open(TEMPLATE, encoding="utf-8") as f:
        template = f.read()
    data = {"runs": [{"label": run.label, "folder": run.folder, "seed": run.seed, "run": run.line,
                      "columns": columns(thinned(run.rows), lambda key: not of_group(key))} for run in runs],
            **comparison}
    if len(runs) == 1:
        data["runs"][0]["groups"] = columns(thinned_groups(runs[0].rows))
    # "<" could end the element that holds the data; in JSON it stands in strings only.
    return template.replace('"REPORT_DATA"', json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


def write_file(path, text):
    """Whole or not at all."""
    try:
        with open(path + ".new", "w", encoding="utf-8") as f:
            f.write(text)
        os.replace(path + ".new", path)
    except OSError as e:
        raise Problem(f"cannot write {path}: {e.strerror}; choose another --out")


# ---------------------------------------------------------------------------------------------------------------------
# Training.

def split_precision(text):
    """'collage_plus:lr=1e-4' -> its flags. A value may hold a colon (model=gpt2:124M): only ':name=' begins a flag."""
    name, *more = re.split(r":(?=[a-z0-9-]+=)", text)
    return ["--precision=" + name] + ["--" + flag for flag in more]


def seconds(s):
    return f"{s:.0f} s" if s < 100 else f"{s / 60:.0f} min"


class Trainer:
    """Trains one run after the other, and says how long all will take."""

    def __init__(self, binary, runs):
        self.binary, self.total = binary, runs
        self.done = self.trained = 0
        self.start = time.monotonic()
        try:
            self.version = subprocess.run([binary, "--version"], capture_output=True, text=True).stdout.split()[-1]
        except (OSError, IndexError):
            raise Problem(f"cannot run {binary}; build it with make")

    def complete(self, folder, flags):
        """Is this very run there, to its last step?"""
        try:
            run = Run(folder)
            same = shlex.split(run.line["command"])[1:] == flags and run.line["version"] == self.version
            return same and run.last_step() == run.flags["steps"]
        except (Problem, KeyError, ValueError):
            return False

    def train(self, what, folder, flags):
        """Returns whether the run is there and complete. Its error has been shown if not."""
        flags = flags + ["--out=" + folder]
        name = f"{self.done + 1}/{self.total} {what}"
        self.done += 1
        if self.complete(folder, flags):
            print(f"{name}: already there", flush=True)
            return True
        begin = time.monotonic()
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            with subprocess.Popen([self.binary, *flags], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=errors, text=True, errors="replace") as process:
                try:
                    for line in process.stdout:
                        if line.startswith("step") and sys.stdout.isatty():
                            print(f"\r{name}: {line.strip()}"[:118] + "\x1b[K", end="", flush=True)
                except KeyboardInterrupt:
                    process.terminate()
                    raise
            if sys.stdout.isatty():
                print("\r\x1b[K", end="")
            errors.seek(0)
            error = errors.read().strip()
        took = time.monotonic() - begin
        if process.returncode != 0:
            last = error.splitlines()[-1] if error else f"killed by signal {-process.returncode}"
            print(f"{name}: FAILED: {last}", file=sys.stderr, flush=True)
            return False
        self.trained += 1
        left = (self.total - self.done) * (time.monotonic() - self.start) / self.trained
        print(f"{name}: {seconds(took)}" + (f", about {seconds(left)} left" if left else ""), flush=True)
        return True


def train_all(binary, precisions, seeds, out, flags):
    """Returns the folders of the runs that are there, and whether some failed."""
    for flag in flags:
        if re.match(r"--(precision|seed|out)(=|$)", flag):
            raise Problem(f"found {flag} after --; the script sets it itself, from --precisions, --seeds and --out")
    trainer = Trainer(binary, len(precisions) * len(seeds))
    folders = []
    for seed in seeds:
        for precision in precisions:
            folder = os.path.join(out, re.sub(r"[^\w.=+-]", "_", precision) + f"_seed{seed}")
            if trainer.train(f"{precision} seed {seed}", folder,
                             flags + split_precision(precision) + [f"--seed={seed}"]):
                folders.append(folder)
    return folders, len(folders) < trainer.total


# ---------------------------------------------------------------------------------------------------------------------

def parse_arguments(words):
    train_flags = words[words.index("--") + 1:] if "--" in words else []
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("--precisions", help="separated by commas")
    parser.add_argument("--seeds", default="1,2,3", help="separated by commas [1,2,3]")
    parser.add_argument("--out", default="runs/compare", help="folder for the runs and the report [runs/compare]")
    parser.add_argument("folders", nargs="*", metavar="RUN_FOLDER", help="existing runs, instead of --precisions")
    a = parser.parse_args(words[:words.index("--")] if "--" in words else words)
    if bool(a.precisions) == bool(a.folders):
        parser.error("expected either --precisions=LIST (and flags for train_gpt after --) or run folders")
    if a.folders and train_flags:
        parser.error("found flags for train_gpt and run folders; flags go with --precisions only")
    split = lambda text: list(dict.fromkeys(word for word in text.split(",") if word))
    a.precisions, a.seeds, a.train_flags = split(a.precisions or ""), split(a.seeds), train_flags
    if not all(seed.isdigit() for seed in a.seeds) or not a.seeds:
        parser.error(f"--seeds: found '{','.join(a.seeds)}', expected whole numbers such as 1,2,3")
    return a


def main(words):
    a = parse_arguments(words)
    failed = False
    if a.precisions:
        binary = os.path.abspath(os.environ.get("TRAIN_GPT", os.path.join(REPOSITORY, "train_gpt")))
        a.folders, failed = train_all(binary, a.precisions, a.seeds, a.out, a.train_flags)
        if not a.folders:
            raise Problem("no run succeeded")
    runs = [Run(folder) for folder in a.folders]
    comparison = compare(runs)
    try:
        os.makedirs(a.out, exist_ok=True)
    except OSError as e:
        raise Problem(f"cannot make the folder {a.out}: {e.strerror}; choose another --out")
    write_file(os.path.join(a.out, "compare.json"), json.dumps(comparison, indent=1) + "\n")
    write_file(os.path.join(a.out, "report.html"), report(runs, comparison))
    print(text_table(comparison))
    print(f"report: {os.path.join(a.out, 'report.html')}")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Problem as problem:
        sys.exit(f"compare.py: error: {problem}")
    except KeyboardInterrupt:
        sys.exit("\ncompare.py: stopped; the same command goes on from here, complete runs are kept")
