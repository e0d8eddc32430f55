"""Runs the real binary for the tests: tiny shards, tiny models, and what a run left behind.

Standard library only. The binary is $TRAIN_GPT, else ./train_gpt in the source tree.
"""
import functools
import json
import os
import re
import shutil
import struct
import subprocess
import tempfile
import unittest
import zlib

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BINARY = os.path.abspath(os.environ.get("TRAIN_GPT", os.path.join(ROOT, "train_gpt")))
PRECISIONS = ["bf16", "bf16_kahan", "bf16_sr", "collage_light", "collage_plus", "fp32_optim", "fp32_master",
              "bf16_rem16", "bf16_int8", "fp32"]
T, VOCAB, END = 16, 257, 256  # bytes, and end-of-text
TINY = ["--layers=1", "--channels=32", "--heads=2", f"--seq-len={T}", "--batch-size=2", "--threads=2"]
WORK = None  # the temporary folder


# Files.

def path(name):
    """Of a file in the temporary folder."""
    return os.path.join(WORK, name)


def write_shard(name, ids, vocab=VOCAB, crc=0, magic=20240520, version=1, count=None, width=2):
    """An llm.c shard of these ids; the header's fields can be wrong on purpose. Returns its path."""
    os.makedirs(os.path.dirname(path(name)), exist_ok=True)
    header = [magic, version, len(ids) if count is None else count, vocab, crc] + [0] * 251
    with open(path(name), "wb") as f:
        f.write(struct.pack("<256i", *header))
        f.write(struct.pack(f"<{len(ids)}{'H' if width == 2 else 'I'}", *ids))
    return path(name)


def write_tokenizer(name):
    """A tokenizer file that maps ids to bytes. Returns its CRC32 as the shards' headers hold it: a signed int."""
    tokens = [bytes([i]) for i in range(256)] + [b"<|endoftext|>"]
    data = struct.pack("<256I", 20240328, 2, len(tokens), END, *[0] * 252)
    data += b"".join(bytes([len(t)]) + t for t in tokens)
    with open(path(name), "wb") as f:
        f.write(data)
    return struct.unpack("<i", struct.pack("<I", zlib.crc32(data)))[0]


def text_ids(sequences, start=0):
    """Ids for exactly so many sequences of T: text that a model can learn, yet no two sequences the same."""
    text = " ".join(f"{n} and {n * n} make {n + n * n};" for n in range(start, start + sequences * T))
    return list(text.encode()[:sequences * T + 1])


def set_up():
    """A temporary folder with two training shards, a validation shard and a tokenizer."""
    global WORK
    WORK = tempfile.mkdtemp(prefix="train_gpt_cli_")
    os.makedirs(path("data"))
    crc = write_tokenizer("data/tokenizer.bin")
    write_shard("data/train_000.bin", text_ids(24), crc=crc)
    write_shard("data/train_001.bin", text_ids(16, start=1000), crc=crc)  # unequal: 40 sequences in all
    write_shard("data/val_000.bin", text_ids(11, start=5000), crc=crc)


def tear_down():
    shutil.rmtree(WORK, ignore_errors=True)


# Runs.

def run(*flags, **kwargs):
    """The program with these flags, in a folder without data."""
    kwargs.setdefault("env", os.environ)
    kwargs.setdefault("stdout", subprocess.PIPE)
    return subprocess.run([BINARY, *flags], cwd=WORK, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=60,
                          **kwargs)


def data_flags():
    return ["--train-data=" + path("data/train_*.bin"), "--val-data=" + path("data/val_*.bin")]


class Run:
    """A finished good run: what it printed, and its metrics: first line `run`, then `steps`."""

    def __init__(self, flags, env=None, **kwargs):
        self.out = tempfile.mkdtemp(dir=WORK, prefix="out_")
        done = run(*TINY, *data_flags(), "--out=" + self.out, *flags, env={**os.environ, **(env or {})}, **kwargs)
        self.status, self.stderr = done.returncode, done.stderr.decode(errors="replace")
        self.stdout = (done.stdout or b"").decode(errors="replace")
        if self.status != 0:
            raise AssertionError(f"{flags}: exit status {self.status}\n{self.stderr}\n{self.stdout}")
        self.lines = read_metrics(os.path.join(self.out, "metrics.jsonl"))
        self.run, self.steps = self.lines[0], self.lines[1:]

    def column(self, key):
        return [step[key] for step in self.steps]

    def val_losses(self):
        return [step["val_loss"] for step in self.steps if "val_loss" in step]

    def without_times(self):
        return without_times(self.steps)


def without_times(steps):
    return [{k: v for k, v in step.items() if not re.search(r"_ms$|_s$|^mfu$", k)} for step in steps]


@functools.lru_cache(maxsize=None)
def trained(*flags):
    """One run per set of flags, shared by the tests that look at it. Three steps unless the flags say otherwise."""
    return Run(("--steps=3", "--val-every=0") + flags)


def read_metrics(file):
    """Every line must be JSON by the standard, which has no NaN."""
    def refuse(word):
        raise AssertionError(f"{file} holds the bare word {word}")
    with open(file, encoding="utf-8") as f:
        text = f.read()
    assert text.endswith("\n"), f"{file} ends in half a line"
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def planned(*flags):
    """What --plan prints with these flags."""
    done = run("--plan", *flags)
    if done.returncode:
        raise AssertionError(f"{flags}: {done.stderr}")
    return done.stdout.decode()


def plan(*flags):
    """Bytes by class and in total; under "notes" the words beside them."""
    rows = re.findall(r"^(\w[\w ]*?) +[\d.]+ [kMGTP]?B +([\d,]+)(?:   (.*))?$", planned(*flags), re.M)
    return {**{name: int(number.replace(",", "")) for name, number, _ in rows},
            "notes": {name: note for name, _, note in rows}}


def plan_table(head, *flags):
    """The table whose first column has this head: {row: {column: text}}; totals in bytes, to three digits."""
    lines = planned(*flags).split("\n" + head, 1)[1].splitlines()
    columns = re.split(r"  +| (?=largest|AdamW)", lines[0].strip())
    rows = {}
    for line in lines[1:]:
        cells = re.split(r" {2,}", line.strip())
        if len(cells) != len(columns) + 1:
            break
        rows[cells[0]] = dict(zip(columns, cells[1:]))
        number, unit = rows[cells[0]]["total"].split()
        rows[cells[0]]["total"] = float(number) * 1000 ** ["B", "kB", "MB", "GB", "TB", "PB"].index(unit)
    return rows


class ProgramTest(unittest.TestCase):
    def refused(self, status, names, flags, may_have_begun=False):
        """These flags must end in one line on stderr that holds `names`, with this exit status (or one of these).

        Unless it may have begun, no run folder may be left.
        """
        out = path("refused")
        replaced = {flag.split("=")[0] for flag in flags}
        given = [f for f in TINY + data_flags() + ["--steps=1", "--out=" + out] if f.split("=")[0] not in replaced]
        with self.subTest(flags=flags):
            done = run(*given, *flags)
            stderr = done.stderr.decode(errors="replace")
            self.assertIn(done.returncode, status if isinstance(status, tuple) else (status,), stderr)
            self.assertTrue(stderr.startswith("train_gpt: error: "), stderr)
            self.assertEqual(stderr.count("\n"), 1, stderr)
            self.assertTrue(stderr.endswith("\n"), stderr)
            self.assertIn(names, stderr)
            self.assertTrue(may_have_begun or not os.path.exists(out), "a run that never began left a run folder")
        shutil.rmtree(out, ignore_errors=True)

    def assertClose(self, a, b, relative):
        self.assertLessEqual(abs(a - b), relative * abs(b), f"{a} against {b}")
