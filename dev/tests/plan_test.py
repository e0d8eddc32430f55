#!/usr/bin/env python3
"""--plan against what runs allocate, byte for byte, and against what Collage's paper says of memory.

  TRAIN_GPT=./train_gpt python3 dev/tests/plan_test.py
"""
import os
import re
import subprocess
import unittest

from program import (BINARY, PRECISIONS, ROOT, TINY, VOCAB, ProgramTest, plan, plan_table, planned, run, set_up,
                     tear_down, trained)

CLASSES = ["weights", "gradients", "states", "activations", "workspace"]
PAPER_MODELS = ["gpt3:6.7B", "gpt3:13B", "gpt3:30B"]


def setUpModule():
    set_up()


def tearDownModule():
    tear_down()


class EqualsARun(ProgramTest):
    def equal(self, *flags):
        with self.subTest(flags=flags):
            memory = trained("--steps=1", *flags).run["memory"]
            expected = plan(*TINY, f"--vocab-size={VOCAB}", *flags)
            self.assertEqual({name: expected[name] for name in CLASSES}, memory)

    def test_precisions(self):
        for precision in PRECISIONS:
            self.equal("--precision=" + precision)

    def test_recompute(self):
        for level in ["none", "gelu", "layernorm", "block"]:
            for precision in ["bf16", "fp32"]:
                self.equal("--layers=3", "--recompute=" + level, "--precision=" + precision)

    def test_sizes(self):
        # More than one block of 8,192 elements a tensor, odd sizes, several micro-batches.
        self.equal("--channels=96", "--heads=3", "--batch-size=3", "--seq-len=11")
        self.equal("--batch-size=1", "--total-batch-tokens=64")
        self.equal("--eval-only")

    def test_what_comes_beside_the_optimizer(self):
        for kind in ["bf16", "pair", "fp32"]:
            self.equal("--grad-accum=" + kind)  # one micro-batch: nothing to add up
            self.equal("--grad-accum=" + kind, "--total-batch-tokens=64")
        self.equal("--lockstep=bf16,fp32_master,collage_plus:fused", "--shadow=0")

    def test_shadow(self):
        """Counted as what comes later, one weight in 16 on average, with 8 + 2 bytes each."""
        sampled = (plan("--shadow=16")["later"] - plan()["later"]) / 10
        self.assertLessEqual(abs(sampled - plan()["weights"] / 2 / 16), 1)

    def test_a_switch_needs_room_for_both(self):
        without, both = plan(), plan("--switch=5:fp32_master")
        self.assertEqual(both["states"], without["states"])
        self.assertEqual((both["later"] - without["later"]) / 12, without["states"] / 8)


class Memory(ProgramTest):
    def test_any_size_without_memory(self):
        """gpt3:175B in 200 MB, where its list of blocks alone would take 350."""
        with subprocess.Popen([BINARY, "--plan", "--model=gpt3:175B", "--zero=1", "--plan-ranks=64"],
                              stdout=subprocess.PIPE) as p:
            text = p.stdout.read()
            _, status, usage = os.wait4(p.pid, 0)
            p.returncode = os.waitstatus_to_exitcode(status)
        self.assertEqual(p.returncode, 0)
        self.assertIn(b"parameters 174,604,259,328\n", text)
        self.assertLess(usage.ru_maxrss, 200_000)  # kB

    def test_collage_saves_what_its_paper_says(self):
        """bf16 < light < plus < fp32_master, and light saves 19 to 28 % of fp32_master's total, plus about 15.6 % on
        average: measured there on other models and machines, so the average may be 2 points off. At 8 sequences of
        2,048 tokens with all activations kept; how much it is depends on these."""
        saved_by_plus = []
        for model in PAPER_MODELS:
            rows = plan_table("--precision", "--model=" + model, "--batch-size=8", "--recompute=none")
            total = {name: row["total"] for name, row in rows.items()}
            self.assertLess(total["bf16"], total["collage_light"])
            self.assertLess(total["collage_light"], total["collage_plus"])
            self.assertLess(total["collage_plus"], total["fp32_master"])
            saved = {name: 100 * (1 - t / total["fp32_master"]) for name, t in total.items()}
            self.assertTrue(19 <= saved["collage_light"] <= 28, saved)
            saved_by_plus.append(saved["collage_plus"])
            # 6 and 4 of the 16 bytes a parameter: whatever the rest of the total is.
            self.assertClose(saved["collage_light"] / saved["collage_plus"], 6 / 4, 0.01)
        self.assertLessEqual(abs(sum(saved_by_plus) / 3 - 15.6), 2, saved_by_plus)

    def test_what_fits(self):
        """The largest B is the largest: a plan for it fits, one for the next does not."""
        for flags in [["--model=d12"], ["--model=gpt3:1.3B", "--gpu=4090"],
                      ["--model=gpt3:13B", "--zero=1", "--plan-ranks=8", "--recompute=block"]]:
            with self.subTest(flags=flags):
                largest = int(plan_table("--precision", *flags)["collage_plus"]["largest B"].replace(",", ""))
                self.assertIn("fits", plan(*flags, f"--batch-size={largest}")["notes"]["total"].split()[0])
                self.assertIn("does not fit", plan(*flags, f"--batch-size={largest + 1}")["notes"]["total"])
        self.assertEqual(plan_table("--precision", "--model=gpt3:6.7B")["fp32_master"]["largest B"], "none")

    def test_recompute_rows_are_the_plans_of_their_level(self):
        flags = ["--model=d24", "--batch-size=16"]
        for level, row in plan_table("--recompute", *flags).items():
            self.assertEqual(row["total"], plan_table("--recompute", *flags, "--recompute=" + level)[level]["total"])
            self.assertClose(row["total"], plan(*flags, "--recompute=" + level)["total"], 0.01)  # three digits


class Text(ProgramTest):
    def test_the_docs_show_what_it_prints(self):
        with open(os.path.join(ROOT, "docs/plan.md"), encoding="utf-8") as f:
            blocks = re.findall(r"```\n\$ ./train_gpt --plan (.*)\n([^`]*)```", f.read())
        self.assertEqual(len(blocks), 5)
        for flags, shown in blocks:
            self.assertIn(shown.strip(), planned(*flags.split()), flags)

    def test_lines_are_short(self):
        for flags in [["--model=gpt3:175B", "--plan-ranks=65536", "--zero=1", "--precision=bf16", "--beta2=.9999",
                       "--seq-len=1048576", "--batch-size=900", "--recompute=block", "--gpu=RTX A6000"],
                      ["--layers=1", "--heads=1", "--channels=1", "--seq-len=1", "--batch-size=1"],
                      ["--layers=4096", "--heads=4096", "--channels=262144", "--vocab-size=16777216",
                       "--gpu=0.001,1e-3,1e-3", "--plan-network=0.001"]]:
            done = run("--plan", *flags)
            self.assertEqual((done.returncode, done.stderr), (0, b""))
            for line in done.stdout.decode().splitlines():
                self.assertLess(len(line), 120, line)

    def test_warnings(self):
        done = run("--plan", "--precision=bf16", "--beta2=.999")
        self.assertEqual(re.findall(r"^warning    (--[a-z0-9-]+)", done.stdout.decode(), re.M),
                         ["--beta2", "--weight-decay", "--lr"])
        self.assertNotIn("warning", run("--plan").stdout.decode())
        header = trained("--precision=bf16", "--beta2=.999").stdout
        self.assertEqual(re.findall(r"^warning    (--[a-z0-9-]+)", header, re.M), ["--beta2", "--weight-decay", "--lr"])
        self.assertNotIn("warning    ", trained().stdout)

    def test_bad_flags(self):
        for names, flags in [("--gpu: found 'H101', expected one of", ["--plan", "--gpu=H101"]),
                             ("--gpu: found without --plan", ["--gpu=H100"]),
                             ("--plan-ranks: found without --plan", ["--plan-ranks=2"]),
                             ("--plan-network: found without --plan", ["--plan-network=25"]),
                             ("--plan-ranks: found '0'", ["--plan", "--plan-ranks=0"]),
                             ("--plan-network: found '0'", ["--plan", "--plan-network=0"]),
                             ("x ranks = 2 x 16 x 3 = 96", ["--plan", "--plan-ranks=3", "--total-batch-tokens=100"])]:
            self.refused(2, names, flags)


if __name__ == "__main__":
    unittest.main()
