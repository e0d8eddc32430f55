#!/usr/bin/env python3
"""Good runs of the real binary on tiny models: every precision, and what must not change the result.

  TRAIN_GPT=./train_gpt python3 dev/tests/training_test.py
"""
import math
import os
import pty
import re
import unittest

from program import (PRECISIONS, T, TINY, VOCAB, ProgramTest, Run, data_flags, path, read_metrics, run, set_up,
                     tear_down, text_ids, trained, write_shard)


def setUpModule():
    set_up()


def tearDownModule():
    tear_down()


class GoodData(ProgramTest):
    def test_exactly_one_sequence(self):
        one = write_shard("data_small/one.bin", text_ids(1), vocab=0)
        steps = trained("--train-data=" + one, "--val-data=" + one, "--vocab-size=257", "--batch-size=1").steps
        self.assertEqual(len(steps), 3)

    def test_wide_ids(self):
        """The same ids in the other token width are the same run."""
        ids = text_ids(24)
        narrow = write_shard("data_width/narrow.bin", ids)
        wide = write_shard("data_width/wide.bin", ids, magic=20240801, version=7, width=4)
        runs = [trained("--train-data=" + p).without_times() for p in (narrow, wide)]
        self.assertEqual(runs[0], runs[1])

    def test_validation_set_smaller_than_a_batch(self):
        r = trained("--batch-size=16", "--val-every=1")
        self.assertEqual(len(r.val_losses()), 3)


class Training(ProgramTest):
    def test_help_and_version(self):
        done = run("--help")
        self.assertEqual((done.returncode, done.stderr), (0, b""))
        self.assertIn(b"--precision", done.stdout)
        self.assertLess(max(map(len, done.stdout.splitlines())), 100)
        done = run("--version")
        self.assertEqual((done.returncode, done.stderr), (0, b""))
        self.assertEqual(done.stdout.count(b"\n"), 1)

    def test_each_precision(self):
        first = {}
        for precision in PRECISIONS:
            with self.subTest(precision=precision):
                r = trained("--precision=" + precision, "--steps=6", "--lr=1e-2", "--lr-schedule=constant")
                self.assertEqual(r.column("step"), [1, 2, 3, 4, 5, 6])
                for key in ["loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_ms", "optimizer_ms"]:
                    for value in r.column(key):
                        self.assertIsInstance(value, (int, float), key)
                        self.assertGreater(value, 0, key)
                self.assertTrue(all(0 <= lost <= 1 for lost in r.column("lost_frac")))
                self.assertTrue(all(-1.01 <= edq <= 1.5 for edq in r.column("edq")))
                # At first all tokens are about as likely. Six steps at this rate teach which bytes there are at all.
                self.assertClose(r.steps[0]["loss"], math.log(VOCAB), 0.05)
                self.assertLess(r.steps[-1]["loss"], r.steps[0]["loss"] - 0.3)
                self.assertEqual(r.run["precision"], precision)
                first[precision] = r.steps[0]["loss"]
        # The same bf16 weights and the same forward pass, so equal bits. fp32 has those weights too, and activations of
        # 24 bits in place of 8: the mean over 32 tokens moves by far less than 2^-8 of the loss.
        self.assertEqual({first[p] for p in PRECISIONS[:-1]}, {first["bf16"]})
        self.assertClose(first["fp32"], first["bf16"], 2**-8)

    def test_run_line(self):
        r = trained()
        for key in ["command", "flags", "version", "device", "threads", "isa", "precision", "bytes_per_param",
                    "parameters"]:
            self.assertIn(key, r.run)
        self.assertEqual(r.run["flags"]["steps"], 3)
        self.assertEqual(r.run["flags"]["precision"], "collage_plus")
        self.assertEqual(r.run["device"], "cpu")
        self.assertEqual(r.run["threads"], 2)
        self.assertIn("--steps=3", r.run["command"])
        for step in r.steps:
            self.assertEqual(next(iter(step)), "step")
            for key, value in step.items():
                self.assertNotIsInstance(value, (dict, list), key)  # flat

    def test_terminal_lines(self):
        r = trained("--val-every=1", "--steps=4")
        lines = r.stdout.splitlines()
        self.assertLessEqual(max(map(len, lines)), 120)
        self.assertEqual(len([line for line in lines if re.match(r"step +\d+/4 \| loss ", line)]), 4)
        self.assertEqual(len([line for line in lines if re.match(r"val +\d+/4 \| loss ", line)]), 4)
        self.assertNotIn("ETA", r.stdout)
        self.assertNotIn("\r", r.stdout)
        self.assertIn("collage_plus", r.stdout)

    def test_a_terminal_gets_an_eta(self):
        ours, theirs = pty.openpty()
        done = run(*TINY, *data_flags(), "--steps=4", "--val-every=0", stdout=theirs)
        os.close(theirs)
        text = b""
        try:
            while chunk := os.read(ours, 65536):  # a run this short fits into the terminal's buffer
                text += chunk
        except OSError:  # how Linux reports the end
            pass
        os.close(ours)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(b"ETA", text)
        for line in text.split(b"\n"):
            self.assertLessEqual(len(line.rstrip(b"\r")), 120, line)

    def test_two_runs_are_equal(self):
        flags = ("--steps=3", "--val-every=2")
        a, b = Run(flags), Run(flags)
        self.assertEqual(a.without_times(), b.without_times())
        self.assertNotEqual(a.steps[0]["loss"], trained("--seed=1").steps[0]["loss"])

    def test_thread_counts_give_equal_bits(self):
        # Sums are cut by position and not by thread, so no tolerance. This shape gives four threads something to share.
        shape = ("--layers=2", "--channels=64", "--heads=4", "--batch-size=4", "--val-every=2")
        for precision in ["collage_plus", "fp32"]:
            one = trained("--threads=1", "--precision=" + precision, *shape).without_times()
            for threads in [2, 4]:
                many = trained(f"--threads={threads}", "--precision=" + precision, *shape).without_times()
                self.assertEqual(one, many, f"{precision}, {threads} threads")

    def test_accumulation(self):
        """4 micro-batches of 2 sequences against 1 of 8: the same tokens, added up in another order."""
        # The first loss: the same weights, and a mean that differs by fp32 rounding. fp32 gradients likewise, over more
        # terms. bf16: each micro-batch's gradient is rounded, 2^-9 of it, and Adam makes full-sized updates of small
        # ones. Measured: norm 1e-8 and 4e-5, last loss 1e-9 and 8e-6.
        for precision, norm, last in [("fp32", 1e-5, 1e-5), ("collage_plus", 2e-3, 1e-3)]:
            flags = ("--precision=" + precision, "--steps=5", "--lr=1e-3")
            four = trained("--batch-size=2", f"--total-batch-tokens={8 * T}", *flags)
            one = trained("--batch-size=8", *flags)
            self.assertClose(four.steps[0]["loss"], one.steps[0]["loss"], 1e-5)
            self.assertClose(four.steps[0]["grad_norm"], one.steps[0]["grad_norm"], norm)
            self.assertClose(four.steps[-1]["loss"], one.steps[-1]["loss"], last)
            self.assertEqual(four.column("tokens"), one.column("tokens"))

    def test_one_epoch(self):
        # 40 sequences of T in the shards, 4 in a step.
        self.assertEqual(len(trained("--steps=0", f"--total-batch-tokens={4 * T}").steps), 10)

    def test_one_step(self):
        for schedule in ["cosine", "linear", "constant", "wsd"]:
            self.assertEqual(len(trained("--steps=1", "--lr-schedule=" + schedule).steps), 1)

    def test_learning_rate(self):
        r = trained("--steps=4", "--warmup-steps=2", "--lr=1e-3", "--lr-schedule=linear", "--final-lr-frac=0")
        for found, expected in zip(r.column("lr"), [5e-4, 1e-3, 5e-4, 0]):
            self.assertAlmostEqual(found, expected, delta=1e-9)  # float keeps 7 digits of 1e-3

    def test_overfit_batch(self):
        r = trained("--overfit-batch", "--steps=60", "--lr=1e-2", "--lr-schedule=constant", "--edq-every=0")
        self.assertLess(r.steps[-1]["loss"], r.steps[0]["loss"] / 2)  # 32 tokens by heart; a stuck run stays near 5.5
        self.assertNotIn("edq", r.steps[-1])

    def test_quality_every_n_steps(self):
        r = trained("--edq-every=2", "--steps=4")
        self.assertEqual(["edq" in step for step in r.steps], [False, True, False, True])

    def test_diverging_run_keeps_valid_json(self):
        trained("--lr=1000", "--grad-clip=0", "--lr-schedule=constant", "--steps=8", "--precision=bf16")

    def test_plain_vector_instructions(self):
        """The products' slow path, on a processor without bf16 instructions."""
        for precision, tolerance in [("fp32", 1e-5), ("collage_plus", 1e-3)]:
            # fp32: sums in another order. bf16: now and then an activation rounds the other way, 2^-8 of it.
            r = Run(("--steps=2", "--val-every=0", "--precision=" + precision), env={"DNNL_MAX_CPU_ISA": "AVX2"})
            self.assertClose(r.steps[0]["loss"], trained("--precision=" + precision).steps[0]["loss"], tolerance)


def only(steps, prefix):
    """What the steps say under keys that begin with this, without it."""
    return [{k[len(prefix):]: v for k, v in step.items() if k.startswith(prefix)} for step in steps]


class Comparing(ProgramTest):
    """Lock-step, shadow, groups, modes, switch, sums of micro-batches."""
    NAMES = ["edq", "edq_hi", "update_norm", "effective_norm", "effective_norm_hi", "lost_frac", "lost_frac_hi",
             "lost_decay_frac", "stale_v_frac", "drift_theta", "drift_m", "drift_v"]

    def test_a_listener_of_the_same_precision_does_the_same(self):
        """The run's own optimizer and one that listens in the same precision: equal to the last bit, every one."""
        for precision in PRECISIONS:
            steps = trained("--precision=" + precision, "--lockstep=" + precision, "--shadow=4").steps
            for step, listener in zip(steps, only(steps, f"lockstep.{precision}.")):
                self.assertEqual(sorted(listener), sorted(self.NAMES))
                self.assertEqual(listener, {name: step[name] for name in self.NAMES}, precision)

    def test_listeners_change_nothing(self):
        others = ",".join(p for p in PRECISIONS if p != "fp32") + ",collage_plus:fused,collage_plus:as-released"
        listened = trained("--lockstep=" + others)
        self.assertEqual([{k: step[k] for k in plain} for plain, step in zip(trained().without_times(), listened.steps)],
                         trained().without_times())
        # Each quality is that of a run in that precision at the first step, where the gradients are still the same.
        for precision in ["bf16", "bf16_sr", "bf16_rem16", "fp32_master"]:
            alone = trained("--precision=" + precision).steps[0]
            self.assertEqual(listened.steps[0][f"lockstep.{precision}.edq"], alone["edq"])
        alone = trained("--mcf=fused").steps[0]
        self.assertEqual(listened.steps[0]["lockstep.collage_plus:fused.update_norm"], alone["update_norm"])

    def test_the_shadow_sees_what_edq_does_not(self):
        """beta2 .999: light's v can't shrink and edq is blind to it. fp32_master is off by fp32's rounding only."""
        flags = ("--precision=fp32_master", "--beta2=.999", "--lockstep=collage_light,collage_plus,bf16", "--steps=60",
                 "--lr=1e-3", "--shadow=4", "--edq-every=60")
        last = trained(*flags).steps[-1]
        self.assertLess(max(last["drift_theta"], last["drift_m"], last["drift_v"]), 1e-5)
        self.assertGreater(last["lockstep.collage_light.edq"], 0.99)
        self.assertGreater(last["lockstep.collage_light.drift_v"], 5 * last["lockstep.collage_plus.drift_v"])
        self.assertGreater(last["lockstep.bf16.drift_theta"], 5 * last["lockstep.collage_plus.drift_theta"])

    def test_groups_add_up(self):
        step = trained().steps[-1]
        groups = ["embeddings", "h0.norms", "h0.attn", "h0.mlp", "ln_f"]
        for name in ["update_norm", "effective_norm"]:  # sums of squares, in another order
            self.assertClose(math.hypot(*(step[f"{g}.{name}"] for g in groups)), step[name], 1e-12)
        self.assertEqual(sorted(k for k in step if k.endswith(".edq")), sorted(g + ".edq" for g in groups))
        # A LayerNorm weight of 1 in bf16 can't move by 3e-4; its biases of 0 do.
        self.assertClose(trained("--precision=bf16").steps[0]["ln_f.lost_frac"], 0.5, 0.05)

    def test_modes(self):
        losses = {mode: trained("--mcf=" + mode, "--steps=5", "--beta2=.9").column("loss")
                  for mode in ["strict", "fused", "as-released"]}
        self.assertEqual(len({tuple(x) for x in losses.values()}), 3)
        strict = trained("--precision=bf16_rem16", "--mcf=strict").without_times()
        self.assertEqual(trained("--precision=bf16_rem16", "--mcf=fused").without_times(), strict)

    def test_a_switch_to_the_same_precision_is_none(self):
        for precision in PRECISIONS:
            plain = trained("--precision=" + precision, "--steps=4").without_times()
            switched = trained("--precision=" + precision, "--steps=4", "--switch=2:" + precision).without_times()
            self.assertEqual(switched[2].pop("switched_to"), precision)
            self.assertEqual(switched, plain)

    def test_a_switch_says_what_it_rounds(self):
        def said(precision, to):
            return trained("--precision=" + precision, "--steps=4", "--switch=2:" + to).stdout
        self.assertIn("weights exact", said("fp32_master", "bf16_rem16"))
        self.assertIn("m rounded in", said("fp32_master", "bf16_rem16"))
        for exact in [("bf16_rem16", "fp32_master"), ("bf16_kahan", "collage_light"), ("collage_light", "collage_plus")]:
            self.assertEqual(said(*exact).count(" exact"), 3, exact)
        self.assertIn("weights rounded in", said("collage_plus", "bf16"))
        self.assertEqual(trained("--precision=bf16_rem16", "--steps=4", "--switch=2:fp32_master").steps[2]["switched_to"],
                         "fp32_master")

    def test_sums_of_micro_batches(self):
        """16 micro-batches: a sum in fp32 or as a pair is nearer to the one gradient of all than a sum in bf16 is."""
        def norms(*flags):
            return trained("--batch-size=1", f"--total-batch-tokens={16 * T}", *flags).column("grad_norm")[0]
        whole = trained("--batch-size=16").column("grad_norm")[0]
        plain, pair, fp32 = norms(), norms("--grad-accum=pair"), norms("--grad-accum=fp32")
        self.assertClose(pair, whole, 1e-4)
        self.assertClose(fp32, whole, 1e-4)
        self.assertLess(abs(pair - whole), abs(plain - whole))
        memory = [trained("--batch-size=1", f"--total-batch-tokens={16 * T}", "--grad-accum=" + kind).run["memory"]
                  for kind in ["bf16", "pair", "fp32"]]
        self.assertEqual([m["gradients"] // memory[0]["gradients"] for m in memory], [1, 3, 3])
        # One micro-batch needs no sum: the same run.
        self.assertEqual(trained("--grad-accum=pair").without_times(), trained().without_times())


class Validation(ProgramTest):
    def test_never(self):
        self.assertEqual(trained("--val-every=0").val_losses(), [])

    def test_every_and_at_the_end(self):
        r = trained("--val-every=2", "--steps=5")
        self.assertEqual([step["step"] for step in r.steps if "val_loss" in step], [2, 4, 5])

    def test_does_not_touch_training(self):
        with_val, without = trained("--val-every=1"), trained("--val-every=0")
        self.assertEqual(with_val.column("loss"), without.column("loss"))

    def test_no_validation_set(self):
        out = path("no_val")
        done = run(*TINY, data_flags()[0], "--steps=2", "--out=" + out)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(all("val_loss" not in line for line in read_metrics(out + "/metrics.jsonl")))

    def test_loss_does_not_depend_on_the_batch_size(self):
        # 11 sequences, or the first 7: no batch size below but 1 divides them. Each token's loss is the same, only the
        # order of the sum over the tokens may differ: fp32 rounding of a mean. 1e-5 leaves a hundredfold margin.
        for precision in ["collage_plus", "fp32"]:
            for sequences in [0, 7]:
                losses = []
                for batch in [1, 3, 4, 16]:
                    r = trained("--eval-only", f"--batch-size={batch}", f"--val-sequences={sequences}",
                                "--precision=" + precision)
                    self.assertEqual(len(r.val_losses()), 1)
                    losses += r.val_losses()
                for loss in losses:
                    self.assertClose(loss, losses[0], 1e-5)

    def test_eval_only_does_not_train(self):
        r = trained("--eval-only")
        self.assertNotIn("grad_norm", r.steps[-1])
        self.assertClose(r.val_losses()[0], math.log(VOCAB), 0.05)  # the untrained model
        done = run("--eval-only", *TINY, data_flags()[1])  # it needs no training data
        self.assertEqual(done.returncode, 0, done.stderr)


class Samples(ProgramTest):
    def test_longer_than_the_context(self):
        r = trained("--sample-every=2", f"--sample-tokens={3 * T}", "--steps=3")
        self.assertGreater(len(r.stdout), len(trained().stdout) + 2 * T)

    def test_sampling_does_not_touch_training(self):
        self.assertEqual(trained("--sample-every=1", "--sample-tokens=4").column("loss"), trained().column("loss"))

    def test_prompt(self):
        for prompt in ["7 and 49", "x" * (3 * T), "\xe9\n", ""]:
            r = trained("--sample-every=3", "--sample-tokens=4", "--prompt=" + prompt)
            self.assertEqual(len(r.steps), 3)
        self.assertIn("7 and 49", trained("--sample-every=3", "--sample-tokens=4", "--prompt=7 and 49").stdout)

    def test_with_eval_only(self):
        trained("--eval-only", "--sample-every=1", "--sample-tokens=4")

    def test_a_sample_is_repeatable(self):
        flags = ("--sample-every=3", "--sample-tokens=40", "--steps=3", "--val-every=0")
        def sample(r):  # what follows the last step's line
            return re.sub(r"\b[\d.,]+ ?(s|ms|min|tok/s)\b|out_\w+", "", r.stdout[r.stdout.index("step     3/3"):])
        self.assertEqual(sample(Run(flags)), sample(Run(flags)))


if __name__ == "__main__":
    unittest.main()
