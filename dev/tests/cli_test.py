#!/usr/bin/env python3
"""Hostile input to the real binary: bad flags, bad shards, run folders that cannot be written.

  TRAIN_GPT=./train_gpt python3 dev/tests/cli_test.py

Each must end in one line on stderr that begins with "train_gpt: error: " and names the flag or the file, with exit
status 2 for a wrong flag and 1 for a file or the machine.
"""
import os
import resource
import unittest

from program import (T, TINY, VOCAB, ProgramTest, Run, data_flags, path, read_metrics, run, set_up, tear_down, text_ids,
                     trained, write_shard)


def setUpModule():
    set_up()


def tearDownModule():
    tear_down()


class BadFlags(ProgramTest):
    def test_numbers(self):
        for name in ["batch-size", "steps", "val-every", "threads", "layers", "vocab-size", "seed"]:
            for value in ["", "abc", "-1", "1.5", "0x10", "99999999999999999999"]:
                self.refused(2, f"--{name}: found", [f"--{name}={value}"])
        for name in ["lr", "beta2", "eps", "grad-clip"]:
            for value in ["", "abc", "1e-3x", "-1", "nan", "inf", " 1", "1e999"]:
                self.refused(2, f"--{name}: found", [f"--{name}={value}"])

    def test_ranges(self):
        for flag in ["--batch-size=0", "--beta1=1", "--beta2=1", "--eps=0", "--seq-len=0", "--heads=0", "--threads=0",
                     "--sample-tokens=0", "--total-batch-tokens=0", "--final-lr-frac=2"]:
            self.refused(2, flag.split("=")[0], [flag])

    def test_words(self):
        self.refused(2, "--nonsense", ["--nonsense=1"])
        self.refused(2, "--batch-size", ["--batch_size=1"])
        self.refused(2, "stray", ["stray"])
        self.refused(2, "'-s'", ["-s", "3"])
        self.refused(2, "--lr: found no value", ["--lr"])
        self.refused(2, "--lr: found no value", ["--lr", "--steps=1"])
        self.refused(2, "--eval-only", ["--eval-only=maybe"])
        self.refused(2, "?", ["line\nbreak"])

    def test_choices(self):
        self.refused(2, "collage_plus", ["--precision=fp8"])
        self.refused(2, "--device", ["--device=tpu"])
        self.refused(2, "--lr-schedule", ["--lr-schedule=step"])
        self.refused(2, "gpt3:175B", ["--model=d7"])
        self.refused(1, "some/checkpoint: cannot be opened", ["--model=./some/checkpoint"])

    def test_combinations(self):
        self.refused(2, "--channels", ["--channels=32", "--heads=3"])
        self.refused(2, "--vocab-size: found 256", ["--vocab-size=256"])
        self.refused(2, "--total-batch-tokens", ["--total-batch-tokens=33"])
        self.refused(2, "--total-batch-tokens", ["--total-batch-tokens=16"])  # less than one micro-batch
        for value in ["bf16", "0:bf16", "4:bf16", "2:foo", "2:bf16:strange", "2", "x:bf16", "-1:bf16"]:
            self.refused(2, "--switch", ["--steps=4", "--switch=" + value])
        self.refused(2, "--switch: fp32 has fp32 weights", ["--steps=4", "--switch=2:fp32"])
        self.refused(2, "--lockstep: bf16 has bf16 weights", ["--precision=fp32", "--lockstep=bf16"])
        self.refused(2, "--lockstep: found 'bf16' twice", ["--lockstep=bf16,bf16"])
        self.refused(2, "--lockstep", ["--lockstep=bf16,,fp32_master"])
        self.refused(2, "--shadow", ["--shadow=8", "--edq-every=0"])
        self.refused(2, "--grad-accum", ["--precision=fp32", "--grad-accum=pair"])
        done = run("--eval-only", *TINY, data_flags()[0])
        self.assertEqual((done.returncode, done.stderr.count(b"\n")), (2, 1), done.stderr)
        self.assertIn(b"--eval-only", done.stderr)

    def test_no_gpu(self):
        if run("--device=cuda", *TINY, *data_flags(), "--steps=1").returncode == 0:
            self.skipTest("there is a GPU")
        self.refused((1, 2), "--device", ["--device=cuda"])

    def test_no_data_says_how_to_get_some(self):
        done = run(*TINY, "--steps=1")
        self.assertIn(done.returncode, (1, 2))
        self.assertTrue(done.stderr.startswith(b"train_gpt: error: "), done.stderr)
        self.assertEqual(done.stderr.count(b"\n"), 1, done.stderr)
        self.assertIn(b"prepare_data", done.stderr)

    def test_run_folder(self):
        with open(path("in_the_way"), "w"):
            pass
        self.refused(1, "in_the_way", ["--out=" + path("in_the_way")])
        self.refused(1, "in_the_way/sub", ["--out=" + path("in_the_way/sub")])
        self.refused(1, "/proc/train_gpt", ["--out=/proc/train_gpt"])  # root cannot write there either


class BadShards(ProgramTest):
    def bad(self, names, file, flag="--train-data", **kwargs):
        self.refused(1, names, [f"{flag}={file}"], **kwargs)

    def test_missing(self):
        for flag in ["--train-data", "--val-data"]:
            self.bad(flag, path("nothing_*.bin"), flag)
            self.bad("no_such", path("no_such/x.bin"), flag)
            self.bad(flag, path("data"), flag)  # a folder

    def test_headers(self):
        ids = text_ids(4)
        bad = {
            "magic": dict(magic=1234), "model": dict(magic=20240326), "version": dict(version=3),
            "one_more": dict(count=len(ids) + 1), "many_more": dict(count=2**31 - 1), "fewer": dict(count=len(ids) - 1),
            "zero": dict(count=0), "negative": dict(count=-5), "width": dict(width=4), "vocab": dict(vocab=-1),
            "magic7": dict(magic=20240801, version=1, width=4), "narrow7": dict(magic=20240801, version=7),
        }
        for name, fields in bad.items():
            self.bad(f"bad/{name}.bin", write_shard(f"bad/{name}.bin", ids, **fields))
        self.bad("bad/magic.bin", path("bad/magic.bin"), "--val-data")

    def test_short_files(self):
        with open(write_shard("bad/whole.bin", text_ids(4)), "rb") as f:
            data = f.read()
        for size in [0, 1, 1023, 1024, 1025, len(data) - 1]:
            with open(path(f"bad/short_{size}.bin"), "wb") as f:
                f.write(data[:size])
            self.bad(f"bad/short_{size}.bin", path(f"bad/short_{size}.bin"))
        self.bad("--train-data", write_shard("bad/one_short.bin", text_ids(1)[:T]))  # T tokens; T + 1 are needed

    def test_not_a_shard(self):
        with open(write_shard("bad/text.bin", []), "w", encoding="utf-8") as f:
            f.write("In the beginning\n" * 200)
        self.bad("bad/text.bin", path("bad/text.bin"))

    def test_ids_beyond_the_vocabulary(self):
        ids = text_ids(1)
        ids[13] = VOCAB
        narrow = write_shard("bad/narrow_id.bin", ids)
        # Ids are checked where they are first read: for the validation set that is after the first step.
        self.bad("narrow_id.bin", narrow, may_have_begun=True)
        self.bad("token 13", narrow, may_have_begun=True)
        self.bad("narrow_id.bin", narrow, "--val-data", may_have_begun=True)
        ids[13] = 2**31 + 5  # negative as an int
        wide = write_shard("bad/wide_id.bin", ids, magic=20240801, version=7, width=4)
        self.bad("wide_id.bin", wide, may_have_begun=True)

    def test_vocabularies_that_disagree(self):
        self.bad("300", write_shard("bad/other_vocab.bin", text_ids(4), vocab=300))
        write_shard("bad/mixed_0.bin", text_ids(4))
        write_shard("bad/mixed_1.bin", text_ids(4), vocab=300)
        self.bad("mixed_1.bin", path("bad/mixed_*.bin"))


class RunFolder(ProgramTest):
    def test_without_out_nothing_is_written(self):
        before = sorted(os.listdir(path("")))
        self.assertEqual(run(*TINY, *data_flags(), "--steps=1").returncode, 0)
        self.assertEqual(sorted(os.listdir(path(""))), before)

    def test_an_earlier_run_is_kept(self):
        out = path("twice/deep")
        for steps in [1, 2]:
            done = run(*TINY, *data_flags(), f"--steps={steps}", "--out=" + out)
            self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(b"metrics.1.jsonl", done.stdout + done.stderr)
        self.assertEqual(len(read_metrics(out + "/metrics.1.jsonl")), 2)
        self.assertEqual(len(read_metrics(out + "/metrics.jsonl")), 3)

    def test_a_full_disk_does_not_end_the_run(self):
        # A limit on file size stands for it; the first write beyond it also sends SIGXFSZ.
        whole = trained("--steps=30")
        size = os.path.getsize(os.path.join(whole.out, "metrics.jsonl"))
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))
        r = Run(("--steps=30", "--val-every=0"), preexec_fn=limit)
        self.assertLess(len(r.steps), 30)
        self.assertEqual(r.stderr.count("cannot write"), 1)
        self.assertIn("30/30", r.stdout)


if __name__ == "__main__":
    unittest.main()
