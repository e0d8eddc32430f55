#!/usr/bin/env python3
"""Runs of the real binary that stop and go on: a resumed run is the uninterrupted one, bit for bit; what may change
and what may not; other precisions.

  TRAIN_GPT=./train_gpt python3 dev/tests/resume_test.py
"""
import filecmp
import json
import os
import shutil
import tempfile
import unittest

import program
from model_writer import Model
from program import (PRECISIONS, T, TINY, ProgramTest, Run, data_flags, path, read_metrics, run, set_up, tear_down,
                     text_ids, trained, without_times, write_shard)

MODES = PRECISIONS + [p + ":fused" for p in ["bf16", "bf16_kahan", "collage_light", "collage_plus"]] + [
    "collage_plus:as-released"]


def setUpModule():
    set_up()


def tearDownModule():
    tear_down()


def flags_of(mode):
    precision, _, mcf = mode.partition(":")
    return ["--precision=" + precision] + (["--mcf=" + mcf] if mcf else [])


def step_folder(out, step):
    return os.path.join(out, "checkpoints", f"step_{step:08d}")


def state(out, step):
    with open(step_folder(out, step) + "/state.json", encoding="utf-8") as f:
        return json.load(f)


def saved_run(*flags, steps=6, every=3):
    """A run whose checkpoints are all kept, shared by the tests that look at it."""
    return trained(f"--steps={steps}", f"--checkpoint-every={every}", "--keep-checkpoints=0", "--lr=1e-2", "--val-every=2",
                   *flags)


def stopped_at(whole, step):
    """A copy of a run as it was when killed some time after it had saved this step."""
    out = tempfile.mkdtemp(dir=program.WORK, prefix="stopped_")
    shutil.copytree(whole.out, out, dirs_exist_ok=True)
    for name in os.listdir(os.path.join(out, "checkpoints")):
        if int(name[5:]) > step:
            shutil.rmtree(os.path.join(out, "checkpoints", name))
    with open(out + "/metrics.jsonl", "a", encoding="utf-8") as f:
        f.write('{"step":')  # half a line
    return out


def resume(out, *flags, expect=0):
    done = run("--resume", "--out=" + out, *flags)
    if expect is not None and done.returncode != expect:
        raise AssertionError(f"{flags}: exit status {done.returncode}\n{done.stderr.decode()}\n{done.stdout.decode()}")
    return done


class ResumeTest(ProgramTest):
    def assertSameFolder(self, a, b):
        """Equal bytes in every file."""
        self.assertEqual(sorted(os.listdir(a)), sorted(os.listdir(b)))
        for name in os.listdir(a):
            self.assertTrue(filecmp.cmp(os.path.join(a, name), os.path.join(b, name), shallow=False), (a, b, name))

    def assertResumes(self, whole, step, last, *flags):
        out = stopped_at(whole, step)
        resume(out, *flags)
        lines = read_metrics(out + "/metrics.jsonl")
        self.assertEqual(without_times(lines[1:]), whole.without_times())
        self.assertSameFolder(step_folder(out, last), step_folder(whole.out, last))
        return out


class BitExact(ResumeTest):
    def test_every_precision_and_mode(self):
        for mode in MODES:
            with self.subTest(mode=mode):
                self.assertResumes(saved_run(*flags_of(mode)), 3, 6)

    def test_from_each_step(self):
        whole = saved_run(every=1)
        for step in range(1, 6):
            self.assertResumes(whole, step, 6)

    def test_with_micro_batches(self):
        for kind in ["bf16", "pair", "fp32"]:
            self.assertResumes(saved_run("--batch-size=1", f"--total-batch-tokens={4 * T}", "--grad-accum=" + kind), 3, 6)

    def test_inside_the_second_of_two_unequal_shards(self):
        # 24 and 16 sequences, 2 a step: in whatever order the epoch takes them, step 14 of 20 is inside the second one,
        # and step 26 in the next epoch.
        self.assertResumes(saved_run(steps=30, every=2), 14, 30)
        self.assertResumes(saved_run(steps=30, every=2), 26, 30)

    def test_with_shadow_and_lockstep(self):
        whole = saved_run("--shadow=4", "--lockstep=bf16,collage_light:fused,fp32_master")
        self.assertIn("lockstep.bf16.drift_v", whole.steps[-1])
        self.assertResumes(whole, 3, 6)

    def test_with_a_switch(self):
        whole = saved_run("--precision=bf16", "--switch=3:collage_plus", every=1)
        for step in [2, 3, 4]:  # before it, right before it, after it
            out = self.assertResumes(whole, step, 6)
            self.assertEqual(state(out, 6)["precision"], "collage_plus")

    def test_with_spikes_looked_for(self):
        # A third of a standard deviation is no spike; but so some steps are skipped as soon as the window is full.
        whole = saved_run("--skip-spikes=0.3", "--lr=3e-4", steps=160, every=70)
        self.assertIn("loss_z", whole.steps[-1])
        skipped = [s["step"] for s in whole.steps if "skipped" in s]
        self.assertTrue(skipped and skipped[0] > 128, skipped)
        self.assertResumes(whole, 140, 160)

    def test_threads_and_recomputation_do_not_matter(self):
        self.assertResumes(saved_run(), 3, 6, "--threads=1")
        out = stopped_at(saved_run(), 3)
        done = resume(out, "--recompute=block")
        self.assertIn("--recompute gelu -> block", done.stdout.decode())
        self.assertEqual(without_times(read_metrics(out + "/metrics.jsonl")[1:]), saved_run().without_times())

    def test_the_run_line_stays(self):
        out = self.assertResumes(saved_run(), 3, 6)
        self.assertEqual(read_metrics(out + "/metrics.jsonl")[0]["command"], saved_run().run["command"])


class Flags(ResumeTest):
    def test_nothing_left_to_do(self):
        out = stopped_at(saved_run(), 6)
        with open(out + "/metrics.jsonl", encoding="utf-8") as f:
            before = f.read()
        done = resume(out)
        self.assertIn("nothing left to do", done.stdout.decode())
        with open(out + "/metrics.jsonl", encoding="utf-8") as f:
            self.assertEqual(f.read(), before)
        self.assertSameFolder(step_folder(out, 6), step_folder(saved_run().out, 6))

    def test_more_steps(self):
        # With a constant learning rate the longer run is the one that was meant to be longer.
        whole = saved_run("--lr-schedule=constant", "--val-every=3", steps=9)
        out = stopped_at(saved_run("--lr-schedule=constant", "--val-every=3", steps=6), 6)
        done = resume(out, "--steps=9")
        self.assertIn("--steps 6 -> 9", done.stdout.decode())
        self.assertEqual(without_times(read_metrics(out + "/metrics.jsonl")[1:]), whole.without_times())

    def test_nothing_to_resume_starts_anew(self):
        out = path("nothing_yet")
        done = run(*TINY, *data_flags(), "--steps=2", "--out=" + out, "--resume", "--checkpoint-every=1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("no checkpoint", done.stdout.decode())
        self.assertEqual(sorted(os.listdir(out + "/checkpoints")), ["step_00000001", "step_00000002"])

    def test_a_new_run_moves_the_old_one_aside(self):
        out = stopped_at(saved_run(), 6)
        done = run(*TINY, *data_flags(), "--steps=1", "--out=" + out)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("checkpoints.1", done.stdout.decode())
        self.assertSameFolder(os.path.join(out, "checkpoints.1", "step_00000006"), step_folder(saved_run().out, 6))
        self.assertFalse(os.path.exists(out + "/checkpoints"))

    def test_another_run_is_refused_with_both_values(self):
        out = stopped_at(saved_run(), 3)
        for flag, was, found in [
                ("model", "d6", "d12"), ("layers", 1, 2), ("channels", 32, 64), ("heads", 2, 4), ("seq-len", T, 8),
                ("batch-size", 2, 4), ("total-batch-tokens", 2 * T, 4 * T), ("seed", 1337, 1), ("beta1", 0.9, 0.8),
                ("beta2", 0.95, 0.99), ("eps", "1e-8", "1e-6"), ("vocab-size", 257, 300), ("grad-accum", "bf16", "pair"),
                ("shadow", 0, 4), ("lockstep", "none", "bf16"), ("overfit-batch", "false", "true")]:
            done = resume(out, f"--{flag}={found}", expect=2)
            message = done.stderr.decode()
            self.assertEqual(message.count("\n"), 1, message)
            for word in ["--" + flag, str(was), str(found)]:
                self.assertIn(word, message)

    def test_other_data_are_refused_and_the_same_elsewhere_are_not(self):
        out = stopped_at(saved_run(), 3)
        os.makedirs(path("moved"), exist_ok=True)
        for name in ["train_000.bin", "train_001.bin", "tokenizer.bin"]:
            shutil.copy(path("data/" + name), path("moved/" + name))
        self.assertIn("--train-data", resume(out, "--train-data=" + path("moved/train_*.bin")).stdout.decode())
        out = stopped_at(saved_run(), 3)
        other = write_shard("other/train_000.bin", text_ids(40, start=77))
        message = resume(out, "--train-data=" + other, expect=2).stderr.decode()
        self.assertIn("--train-data: found 1 shard, ", message)
        self.assertIn("trained on '2 shards, ", message)

    def test_what_resume_needs(self):
        done = run(*TINY, *data_flags(), "--resume")
        self.assertEqual(done.returncode, 2)
        self.assertIn("--resume: found without --out", done.stderr.decode())
        done = run(*TINY, *data_flags(), "--resume", "--eval-only", "--out=" + path("x"))
        self.assertEqual(done.returncode, 2)

    def test_an_evaluation_leaves_the_run_alone(self):
        done = run(*data_flags(), "--eval-only", "--model=" + step_folder(saved_run().out, 6), "--out=" + saved_run().out)
        self.assertEqual(done.returncode, 2)
        self.assertIn("--out: found a run with checkpoints", done.stderr.decode())

    def test_keep_checkpoints(self):
        for keep, steps in [(1, [6]), (2, [4, 6]), (0, [2, 4, 6])]:
            r = trained("--steps=6", "--checkpoint-every=2", f"--keep-checkpoints={keep}")
            self.assertEqual(sorted(os.listdir(r.out + "/checkpoints")), [f"step_{s:08d}" for s in steps])

    def test_the_stall_is_logged(self):
        steps = saved_run().steps
        self.assertEqual([s["step"] for s in steps if "checkpoint_ms" in s], [3, 6])


class Conversion(ResumeTest):
    def test_to_every_other_precision(self):
        for old in PRECISIONS:
            for new in PRECISIONS:
                if old == new:
                    continue
                with self.subTest(old=old, new=new):
                    out = stopped_at(saved_run(*flags_of(old)), 3)
                    done = resume(out, "--precision=" + new)
                    said = done.stdout.decode()
                    self.assertIn(f"--precision {old} -> {new}", said)
                    self.assertIn(f"from {old}", said)
                    self.assertEqual(state(out, 6)["precision"], new)
                    lines = read_metrics(out + "/metrics.jsonl")
                    self.assertEqual([s["step"] for s in lines[1:]], [1, 2, 3, 4, 5, 6])
                    # The step right after: the same data and, but for a rounding, the same weights.
                    self.assertClose(lines[4]["loss"], saved_run(*flags_of(old)).steps[3]["loss"], 2**-7)

    def test_lossless_there_and_back(self):
        """What can hold it all gives it back: the next steps are those of the run that never changed."""
        for old, new in [("collage_light", "collage_plus"), ("bf16", "fp32_master"), ("bf16_rem16", "fp32_master"),
                         ("bf16_kahan", "collage_light"), ("bf16", "collage_plus"), ("fp32_optim", "fp32_master")]:
            with self.subTest(old=old, new=new):
                whole = saved_run(*flags_of(old), "--checkpoint-every=1", "--val-every=0", steps=6, every=3)
                out = stopped_at(whole, 3)
                said = resume(out, "--precision=" + new, "--steps=4").stdout.decode()
                self.assertEqual(said.count(" exact"), 3, said)

    def test_a_mode_is_no_conversion_of_bytes(self):
        out = stopped_at(saved_run("--precision=collage_plus"), 3)
        said = resume(out, "--mcf=fused").stdout.decode()
        self.assertIn("--mcf strict -> fused", said)
        self.assertNotIn("rounded", said)


class BadNumbers(ResumeTest):
    def trained_from(self, name, change, *flags):
        """A run from a model file with a weight changed, which must fail; its folder, stdout and stderr."""
        model = Model()
        change(model.weights)
        folder, out = model.write_folder(path(name), "F32"), tempfile.mkdtemp(dir=program.WORK, prefix="bad_")
        done = run("--model=" + folder, *data_flags(), "--batch-size=2", "--steps=12", "--val-every=0", "--out=" + out,
                   "--checkpoint-every=2", *flags)
        return out, done.returncode, done.stdout.decode(), done.stderr.decode()

    def test_weights_that_are_not_finite_are_not_saved(self):
        def spoil(weights):
            weights["h.0.mlp.c_fc.weight"][5] = float("nan")
        out, status, stdout, stderr = self.trained_from("nan_weights", spoil)
        self.assertEqual(status, 1)
        self.assertEqual(stderr.count("\n"), 1)
        self.assertIn("step 5: 5 steps in a row", stderr)
        self.assertIn("no checkpoint", stderr)
        self.assertIn("first in the weights h.0.mlp.c_fc.weight", stdout)
        steps = read_metrics(out + "/metrics.jsonl")[1:]
        self.assertEqual([(s["step"], s["loss"], s["skipped"], s["skipped_steps"]) for s in steps],
                         [(n, None, True, n) for n in range(1, 6)])
        self.assertFalse(os.path.exists(out + "/checkpoints"))
        self.assertIn("step 2: 2 steps", self.trained_from("nan_weights", spoil, "--max-bad-steps=2")[3])
        _, status, stdout, _ = self.trained_from("nan_weights", spoil, "--max-bad-steps=0")
        self.assertEqual((status, stdout.count("update skipped")), (0, 12))

    def test_the_last_good_state_is_saved(self):
        def spoil(weights):  # finite, but the logits' sums of products with it are not
            weights["ln_f.weight"][:] = [2.0**127] * len(weights["ln_f.weight"])
        out, status, stdout, stderr = self.trained_from("huge_weights", spoil)
        self.assertEqual(status, 1)
        self.assertIn("step 5: 5 steps in a row", stderr)
        self.assertIn("first in the gradient of wte.weight", stdout)
        self.assertEqual(state(out, 5)["updates"], 0)
        done = resume(out, expect=1)  # it has five more
        self.assertIn("step 10: 5 steps in a row", done.stderr.decode())
        # Nothing of it has changed since the file was read.
        model = Model()
        spoil(model.weights)
        with open(step_folder(out, 10) + "/model.safetensors", "rb") as f:
            saved = f.read()
        for _, _, _, data in model.tensors("BF16"):
            self.assertIn(data, saved)


if __name__ == "__main__":
    unittest.main()
