#!/usr/bin/env python3
"""scripts/compare.py: its statistics, and what it makes of real runs, some of which went wrong.

  TRAIN_GPT=./train_gpt python3 dev/tests/compare_test.py
"""
import json
import math
import os
import shutil
import subprocess
import sys
import unittest

from program import BINARY, ROOT, TINY, ProgramTest, Run, data_flags, path, set_up, tear_down

SCRIPT = os.path.join(ROOT, "scripts", "compare.py")
sys.path.insert(0, os.path.dirname(SCRIPT))
import compare  # noqa: E402


def setUpModule():
    set_up()


def tearDownModule():
    tear_down()


def script(*words):
    done = subprocess.run([sys.executable, SCRIPT, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          env={**os.environ, "TRAIN_GPT": BINARY}, timeout=60)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def compared(folder):
    with open(os.path.join(folder, "compare.json"), encoding="utf-8") as f:
        comparison = json.load(f)
    return comparison, {row["label"]: row for row in comparison["table"]}


def page_data(file):
    """The data in a report."""
    with open(file, encoding="utf-8") as f:
        text = f.read()
    return json.loads(text.split('<script type="application/json" id="data">')[1].split("</script>")[0])


def write_run(name, losses, val_every=2, precision="bf16", seed=1, **flags):
    """A run folder with these losses; a validation loss is 1 more than the loss."""
    os.makedirs(path(name))
    line = {"command": "x", "version": "1", "precision": precision, "parameters": 10, "device": "cpu",
            "memory": {"weights": 20, "gradients": 20, "states": 45, "activations": 7, "workspace": 8},
            "flags": {"precision": precision, "seed": seed, "steps": len(losses), "seq-len": 16, "lr": 1e-3,
                      "beta2": 0.95, "total-batch-tokens": 32, **flags}}
    with open(path(name + "/metrics.jsonl"), "w", encoding="utf-8") as f:
        print(json.dumps(line), file=f)
        for step, loss in enumerate(losses, 1):
            row = {"step": step, "loss": loss, "edq": 0.5, "lost_frac": 0.25, "tokens_per_s": 100 * step,
                   "optimizer_ms": 3.0}
            if step % val_every == 0:
                row["val_loss"] = None if loss is None else loss + 1
            print(json.dumps(row), file=f)
    return path(name)


class Statistics(unittest.TestCase):
    def test_student_t(self):
        # Printed tables, two-sided 95 %, three decimals.
        for n, t in [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (10, 2.228), (30, 2.042)]:
            self.assertAlmostEqual(compare.student_quantile(n), t, delta=0.0005)
        # Closed forms: 1 degree of freedom is a Cauchy distribution; for 2, P(|T| < t) = t / sqrt(2 + t^2).
        self.assertAlmostEqual(compare.student_t(1.7, 1), 2 / math.pi * math.atan(1.7), delta=1e-12)
        self.assertAlmostEqual(compare.student_t(1.7, 2), 1.7 / math.sqrt(2 + 1.7**2), delta=1e-12)

    def test_interval(self):
        # By hand: mean 2, variance ((-1)^2 + 0 + 1^2) / 2 = 1, so half = 4.30265 * 1 / sqrt(3).
        mean, half = compare.mean_and_half_width([1.0, 2.0, 3.0])
        self.assertAlmostEqual(mean, 2, delta=1e-12)
        self.assertAlmostEqual(half, 2.48414, delta=1e-5)
        self.assertEqual(compare.mean_and_half_width([1.5]), (1.5, None))
        self.assertEqual(compare.mean_and_half_width([]), (None, None))


class Written(ProgramTest):
    """Run folders with known numbers."""

    def tearDown(self):
        for name in os.listdir(path("")):
            if name.startswith("w_"):
                shutil.rmtree(path(name))

    def test_pairs_by_seed(self):
        folders = []
        for seed, start, worse in [(1, 3.0, 0.1), (2, 5.0, 0.2), (3, 4.0, 0.3)]:
            folders.append(write_run(f"w_ref{seed}", [start] * 4, precision="fp32_master", seed=seed))
            folders.append(write_run(f"w_bf16{seed}", [start + worse] * 4, seed=seed))
        done = script("--out=" + path("w_out"), *folders)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        comparison, table = compared(path("w_out"))
        self.assertEqual((comparison["reference"], comparison["compared_at"], comparison["notes"]),
                         ("fp32_master", 4, []))
        row = table["bf16"]
        # The differences are .1, .2, .3 whatever the level: half = 4.30265 * .1 / sqrt(3).
        for key, value in [("val_loss", 5.2), ("difference", 0.2), ("difference_low", -0.04841),
                           ("difference_high", 0.44841), ("edq", 0.5), ("lost_frac", 0.25), ("bytes_per_param", 8.5),
                           ("tokens_per_s", 300), ("optimizer_ms", 3)]:
            self.assertAlmostEqual(row[key], value, delta=1e-5, msg=key)
        self.assertEqual(row["seeds"], [1, 2, 3])
        self.assertIn("+0.2000 [-0.0484, +0.4484]", done.stdout)
        self.assertLess(max(map(len, done.stdout.splitlines())), 120)

    def test_different_lengths(self):
        folders = [write_run("w_a", [3.0, 3.0, 3.0, 3.0], precision="fp32_master"),
                   write_run("w_b", [3.0, 3.5, 3.0, 3.0, 3.0, 2.5], steps=6)]
        comparison, table = compared_of(folders)
        self.assertEqual(comparison["compared_at"], 4)
        self.assertIn("compared at step 4", comparison["notes"][0])
        self.assertAlmostEqual(table["bf16:steps=6"]["val_loss"], 4.0)

    def test_ended_early(self):
        folders = [write_run("w_a", [3.0] * 6, precision="fp32_master", steps=6), write_run("w_b", [3.0] * 3, steps=6)]
        comparison, table = compared_of(folders)
        self.assertEqual(comparison["compared_at"], 2)
        self.assertEqual(table["bf16"]["notes"], ["ended early at step 3 of 6"])

    def test_diverged(self):
        folders = [write_run("w_a", [3.0] * 4, precision="fp32_master"), write_run("w_b", [3.0, 9.0, None, None]),
                   write_run("w_c", [3.0, 9.0, 9.0, 9.0], precision="bf16_sr")]  # finite, and lost all the same
        comparison, table = compared_of(folders)
        for label in ["bf16", "bf16_sr"]:
            self.assertEqual(table[label]["notes"], ["diverged at step 2"])
            self.assertIsNone(table[label]["val_loss"])
            self.assertIsNone(table[label]["difference"])
        self.assertEqual(table["fp32_master"]["val_loss"], 4)

    def test_one_of_several_seeds_diverged(self):
        folders = [write_run(f"w_a{seed}", [3.0] * 2, precision="fp32_master", seed=seed) for seed in (1, 2)]
        folders += [write_run("w_b1", [3.0, 3.25], seed=1), write_run("w_b2", [3.0, None], seed=2)]
        _, table = compared_of(folders)
        self.assertEqual((table["bf16"]["val_loss"], table["bf16"]["difference"]), (4.25, 0.25))
        self.assertIsNone(table["bf16"]["difference_low"])
        self.assertEqual(table["bf16"]["notes"], ["seed 2 diverged at step 2"])

    def test_no_reference(self):
        comparison, table = compared_of([write_run("w_a", [3.0] * 2)])
        self.assertIsNone(comparison["reference"])
        self.assertIsNone(table["bf16"]["difference"])
        self.assertIn("fp32_master", comparison["notes"][0])

    def test_no_validation(self):
        comparison, table = compared_of([write_run("w_a", [3.0] * 2, val_every=9)])
        self.assertIsNone(comparison["compared_at"])
        self.assertEqual(table["bf16"]["notes"], ["has no validation loss"])

    def test_a_reference_with_the_same_flags(self):
        """A study over beta2: each is compared with the reference of its own beta2."""
        folders = [write_run(f"w_{name}{beta2}", [loss, loss], precision=name, beta2=beta2)
                   for name, beta2, loss in [("fp32_master", 0.9, 3.0), ("fp32_master", 0.99, 2.0), ("bf16", 0.9, 3.5),
                                             ("bf16", 0.99, 2.25)]]
        _, table = compared_of(folders)
        self.assertEqual((table["bf16"]["difference"], table["bf16:beta2=0.99"]["difference"]), (0.5, 0.25))

    def test_bad_folders(self):
        a = write_run("w_a", [3.0] * 2)
        with open(a + "/metrics.jsonl", encoding="utf-8") as f:
            first_line = f.readline()
        files = {"w_other/metrics.jsonl": "no metrics\n", "w_empty/metrics.jsonl": "",
                 "w_list/metrics.jsonl": "[1]\n{}\n", "w_begun/metrics.jsonl": first_line}
        for name, text in files.items():
            os.makedirs(os.path.dirname(path(name)), exist_ok=True)
            with open(path(name), "w", encoding="utf-8") as f:
                f.write(text)
        for words, names in [([path("nothing")], "nothing/metrics.jsonl: No such file"),
                             ([path("w_other")], "found no run in its first line"),
                             ([path("w_empty")], "found no run in its first line"),
                             ([path("w_list")], "found no run in its first line"),
                             ([path("w_begun")], "has no steps yet"), ([a, a], "are the same run"),
                             (["--out=" + a + "/metrics.jsonl", a], "cannot make the folder")]:
            done = script("--out=" + path("w_out"), *words)
            self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (1, "", 1), words)
            self.assertIn(names, done.stderr)
            self.assertTrue(done.stderr.startswith("compare.py: error: "), done.stderr)
        self.assertFalse(os.path.exists(path("w_out")))

    def test_bad_flags(self):
        for words, names in [([], "expected either"), (["--precisions=bf16", "folder"], "expected either"),
                             (["--precisions=bf16", "--seeds=x"], "--seeds: found 'x'"),
                             (["folder", "--", "--lr=1"], "go with --precisions"), (["--what"], "--what")]:
            done = script(*words)
            self.assertEqual((done.returncode, done.stdout), (2, ""), words)
            self.assertIn(names, done.stderr)

    def test_long_runs_are_thinned(self):
        losses = [2 + 100 / (99 + step) for step in range(20000)]
        losses[12345] = 9.0
        folder = write_run("w_a", losses, val_every=500)
        script("--out=" + path("w_out"), folder)
        columns = page_data(path("w_out/report.html"))["runs"][0]["columns"]
        self.assertLessEqual(len(columns["step"]), compare.MAX_ROWS)
        self.assertEqual(sum(x is not None for x in columns["val_loss"]), 40)
        self.assertIn(9.0, columns["loss"])
        step = columns["step"]
        self.assertEqual((step[0], step[-1]), (1, 20000))
        # Everywhere alike: at 2,000 rows or more, two a bucket, a bucket has at most 20 steps, and two lie within two.
        self.assertLessEqual(max(b - a for a, b in zip(step, step[1:])), 40)


def compared_of(folders):
    done = script("--out=" + path("w_out"), *folders)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return compared(path("w_out"))


class Trained(ProgramTest):
    """Runs of the real binary."""

    def test_three_runs(self):
        """One as it should be, one that diverged, one shorter and killed in the middle of a line."""
        good = Run(("--steps=6", "--val-every=2", "--precision=fp32_master"))
        wild = Run(("--steps=6", "--val-every=2", "--precision=bf16", "--lr=1000", "--grad-clip=0",
                    "--lr-schedule=constant"))
        short = Run(("--steps=6", "--val-every=2", "--precision=collage_plus"))
        file = os.path.join(short.out, "metrics.jsonl")
        with open(file, encoding="utf-8") as f:
            lines = f.readlines()
        with open(file, "w", encoding="utf-8") as f:
            f.write("".join(lines[:6]) + lines[6][:25])
        done = script("--out=" + path("three"), good.out, wild.out, short.out)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        comparison, table = compared(path("three"))
        self.assertEqual(comparison["compared_at"], 4)
        self.assertEqual(table["fp32_master"]["val_loss"], good.steps[3]["val_loss"])
        self.assertEqual(table["collage_plus"]["difference"],
                         short.steps[3]["val_loss"] - good.steps[3]["val_loss"])
        self.assertEqual(table["collage_plus"]["notes"], ["ended early at step 5 of 6"])
        [diverged] = [label for label in table if label.startswith("bf16")]
        self.assertIsNone(table[diverged]["val_loss"])
        self.assertIn("diverged at step", table[diverged]["notes"][0])

    def test_the_trainer_and_the_script_embed_the_same(self):
        run = Run(("--steps=4", "--val-every=2"))
        script("--out=" + path("same"), run.out)
        [ours] = page_data(path("same/report.html"))["runs"]
        [its] = page_data(os.path.join(run.out, "report.html"))["runs"]
        for key in ["run", "columns", "groups"]:
            self.assertEqual(ours[key], its[key])

    def test_trains_all_and_goes_on(self):
        flags = ["--out=" + path("all"), "--seeds=1,2", "--", *TINY, *data_flags(), "--steps=3", "--val-every=1"]
        done = script("--precisions=bf16,fp32_master,bf16:lr=1e-2", *flags)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        comparison, table = compared(path("all"))
        self.assertEqual(list(table), ["bf16", "fp32_master", "bf16:lr=0.01"])
        self.assertEqual([row["seeds"] for row in comparison["table"]], [[1, 2]] * 3)
        self.assertTrue(all(row["val_loss"] > 0 for row in comparison["table"]))

        # Again, with one run missing and one that was stopped: only these are trained, and the result is the same.
        shutil.rmtree(path("all/bf16_seed1"))
        file = path("all/fp32_master_seed2/metrics.jsonl")
        with open(file, encoding="utf-8") as f:
            lines = f.readlines()
        with open(file, "w", encoding="utf-8") as f:
            f.write("".join(lines[:-1]) + lines[-1][:9])
        done = script("--precisions=bf16,fp32_master,bf16:lr=1e-2", *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("already there"), 4)
        self.assertEqual(compared(path("all"))[1]["bf16"]["val_losses"], table["bf16"]["val_losses"])
        self.assertEqual(compared(path("all"))[1]["fp32_master"]["val_losses"], table["fp32_master"]["val_losses"])

        # Other flags are other runs.
        done = script("--precisions=bf16", *flags, "--lr=1e-2")
        self.assertNotIn("already there", done.stdout)

    def test_a_run_that_fails(self):
        done = script("--precisions=bf16,bf17,fp32_master", "--seeds=1", "--out=" + path("fails"), "--", *TINY,
                      *data_flags(), "--steps=2")
        self.assertEqual(done.returncode, 1)
        self.assertIn("bf17 seed 1: FAILED: train_gpt: error: --precision: found 'bf17'", done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1)
        self.assertEqual(list(compared(path("fails"))[1]), ["bf16", "fp32_master"])
        done = script("--precisions=bf17", "--seeds=1", "--out=" + path("none"), "--", *TINY)
        self.assertEqual(done.returncode, 1)
        self.assertTrue(done.stderr.endswith("no run succeeded\n"), done.stderr)

    def test_flags_that_the_script_sets(self):
        for flag in ["--seed=1", "--out=x", "--precision=bf16"]:
            done = script("--precisions=bf16", "--", flag)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertIn("found " + flag, done.stderr)


if __name__ == "__main__":
    unittest.main()
