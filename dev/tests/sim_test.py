#!/usr/bin/env python3
"""The whole GPU path, host half included, on an emulated GPU (dev/tests/simt): TRAIN_GPT is train_gpt_sim.

What it trains must be what --device=cpu of the same binary trains, up to the order of sums.
"""
import os
import unittest

import comm_test
import resume_test
from program import PRECISIONS, ProgramTest, data_flags, read_metrics, run, set_up, tear_down, trained, TINY, Run

GPU = ("--device=cuda", "--edq-every=1")
CPU = ("--device=cpu", "--edq-every=1")


def setUpModule():
    set_up()


def tearDownModule():
    tear_down()


class Training(ProgramTest):
    def test_every_precision_trains_as_on_the_cpu(self):
        """Losses of three steps: fp32 sums in other orders, 1e-5; in bf16 a sum near a tie rounds to the neighbour, which
        moves a loss of 5.5 by less than 1e-3 here. edq and the lost share come from equal arithmetic on such weights."""
        for precision in PRECISIONS:
            with self.subTest(precision=precision):
                flags = ("--precision=" + precision, "--val-every=3")
                gpu, cpu = trained(*flags, *GPU), trained(*flags, *CPU)
                bound = 1e-5 if precision == "fp32" else 1e-3
                for g, c in zip(gpu.column("loss") + gpu.val_losses(), cpu.column("loss") + cpu.val_losses()):
                    self.assertClose(g, c, bound)
                for g, c in zip(gpu.column("grad_norm"), cpu.column("grad_norm")):
                    self.assertClose(g, c, 10 * bound)
                for g, c in zip(gpu.column("edq"), cpu.column("edq")):
                    self.assertLess(abs(g - c), 0.02)
                self.assertEqual(gpu.run["device"], "emulated GPU")

    def test_a_run_repeats_bit_for_bit(self):
        """Also when streams run as late as they may: every wait that the host needs is there."""
        first = trained(*GPU).without_times()
        self.assertEqual(Run(("--steps=3", "--val-every=0") + GPU).without_times(), first)
        lazy = Run(("--steps=3", "--val-every=0") + GPU, env={"SIMT_STREAMS": "lazy"})
        self.assertEqual(lazy.without_times(), first)

    def test_recomputation_changes_no_bit(self):
        runs = [trained(*GPU, "--recompute=" + level).without_times() for level in ("none", "gelu", "layernorm", "block")]
        for other in runs[1:]:
            self.assertEqual(other, runs[0])

    def test_micro_batches_add_up(self):
        """4 sequences at once against 2 + 2: bf16 gradients rounded once more in between."""
        whole = trained(*GPU, "--batch-size=4")
        for kind in ["bf16", "pair", "fp32"]:
            parts = trained(*GPU, "--batch-size=2", "--total-batch-tokens=64", "--grad-accum=" + kind)
            for a, b in zip(whole.column("loss"), parts.column("loss")):
                self.assertClose(a, b, 1e-3)

    def test_listeners_shadow_and_switch(self):
        """As on the CPU, whose gradients differ by the order of sums: drifts are of the same size, exact copies exact."""
        flags = ("--steps=4", "--lockstep=collage_plus,bf16,bf16_int8", "--shadow=4", "--switch=2:fp32_master")
        gpu, cpu = trained(*flags, *GPU), trained(*flags, *CPU)
        self.assertIn("weights exact", gpu.stdout)
        self.assertEqual(gpu.steps[2]["switched_to"], "fp32_master")
        for name in ["collage_plus", "bf16", "bf16_int8"]:
            for what in ["drift_theta", "drift_m", "drift_v", "edq"]:
                key = f"lockstep.{name}.{what}"
                self.assertClose(gpu.steps[-1][key], cpu.steps[-1][key], 0.1)
        first = gpu.steps[1]
        self.assertEqual([first[k] for k in ("edq", "drift_theta", "drift_v")],
                         [first["lockstep.collage_plus." + k] for k in ("edq", "drift_theta", "drift_v")])

    def test_samples_and_odd_shapes(self):
        r = trained(*GPU, "--steps=1", "--sample-every=1", "--sample-tokens=20", "--prompt=The", "--channels=34",
                    "--seq-len=15", "--batch-size=1")
        self.assertIn("The", r.stdout)


class Checkpoints(resume_test.ResumeTest):
    def test_a_resumed_run_is_the_uninterrupted_one(self):
        for flags in [("--lockstep=bf16", "--shadow=4"), ("--precision=fp32",), ("--precision=bf16_int8",)]:
            whole = resume_test.saved_run(*flags, *GPU, steps=4, every=2)
            self.assertResumes(whole, 2, 4, "--device=cuda")

    def test_what_one_device_saved_the_other_goes_on_with(self):
        """The weights are the same; the forward pass adds in another order (see Training)."""
        whole = resume_test.saved_run(*CPU, steps=4, every=2)
        out = resume_test.stopped_at(whole, 2)
        resume_test.resume(out, "--device=cuda", "--precision=fp32_master")
        lines = read_metrics(out + "/metrics.jsonl")
        self.assertClose(lines[3]["loss"], whole.steps[2]["loss"], 1e-3)


class Ranks(comm_test.Ranks):
    """What holds for ranks on CPUs, here on an emulated GPU each: our use of NCCL, on a stand-in for the library. That
    adds as a ring does, each sum rounded to the gradient's type: 3 roundings of 2^-9 at 4 ranks, one on the CPU. The
    bounds have room for it."""
    test_the_same_data = None  # the host's part, proven there
    test_more_than_one_message = None  # NCCL takes any length

    def trained(self, ranks, *more, streams="eager"):
        launcher = "torchrun" if ranks > 1 else None
        return comm_test.trained(ranks, *GPU, *more, launcher=launcher, SIMT_DEVICES="4", SIMT_STREAMS=streams)

    def test_two_runs_are_equal(self):
        """Also when streams run as late as they may, and when NCCL's runs as early as it may: every event is there."""
        for zero in ["--zero=0", "--zero=1"]:
            for streams in ["lazy", "racing"]:
                self.assertEqual(self.trained(2, zero, streams=streams), self.trained(2, zero), zero + " " + streams)

    def test_one_gpu_for_two_ranks_is_refused(self):
        run = comm_test.Torchrun(range(2), comm_test.flags("--device=cuda"), env={"SIMT_DEVICES": "1"})
        self.assertEqual(run.wait(), [1, 1])
        self.assertEqual(run.stderr[1], "")
        self.assertRegex(run.stderr[0], "^train_gpt: error: ranks 0 and 1 both use emulated GPU.*\\n$")

    def test_header(self):
        run = comm_test.Torchrun(range(2), comm_test.flags("--device=cuda", "--steps=1"), env={"SIMT_DEVICES": "2"})
        self.assertEqual(run.wait(), [0, 0], run.stderr)
        self.assertRegex(run.stdout[0], r"ranks +2 over NCCL 2\.28\.0; each with all optimizer states")


class BadMachines(ProgramTest):
    def error(self, env, *flags):
        done = run(*TINY, *data_flags(), "--steps=1", *flags, env={**os.environ, **env})
        stderr = done.stderr.decode()
        self.assertEqual(done.returncode, 1, stderr)
        self.assertEqual(stderr.count("\n"), 1, stderr)
        self.assertTrue(stderr.startswith("train_gpt: error: "), stderr)
        return stderr

    def test_no_gpu_and_no_driver(self):
        self.assertIn("no GPU on this machine", self.error({"SIMT_DEVICES": "0"}, "--device=cuda"))
        self.assertIn("no NVIDIA driver", self.error({"SIMT_DEVICES": "-1"}, "--device=cuda"))

    def test_auto_trains_without_one(self):
        r = Run(("--steps=1", "--val-every=0"), env={"SIMT_DEVICES": "-1"})
        self.assertIn("no NVIDIA driver on this machine: training on the CPU", r.stdout)
        self.assertEqual(r.run["device"], "cpu")

    def test_too_little_memory_says_what_fits(self):
        """The plan refuses before anything is allocated; the batch size that it names must really train."""
        memory = {"SIMT_MEMORY": str(72 << 20)}
        message = self.error(memory, *GPU, "--batch-size=400")
        self.assertIn("--batch-size: 400 needs", message)
        self.assertIn("weights, gradients and states", message)
        fits = message.strip().rsplit("=", 1)[1]
        Run(("--steps=1", "--val-every=0", "--batch-size=" + fits, *GPU), env=memory)
        self.assertIn("no batch size fits", self.error({"SIMT_MEMORY": str(1 << 20)}, *GPU))


if __name__ == "__main__":
    unittest.main()
