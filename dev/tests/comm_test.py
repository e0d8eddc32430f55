#!/usr/bin/env python3
"""Several ranks of the real binary on the CPU, over MPI and over TCP: the same data and losses for every number of
ranks, equal bits for both ZeRO levels, and an end with one line when a rank fails, dies, stops or never comes.

  TRAIN_GPT=./train_gpt python3 dev/tests/comm_test.py
"""
import glob
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import program
from program import (BINARY, PRECISIONS, T, VOCAB, ProgramTest, Run, data_flags, path, plan, read_metrics, set_up,
                     tear_down, text_ids, write_shard)

# No thread of a rank spins while another wants the core.
ENV = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
       "OMP_WAIT_POLICY": "passive"}
for variable in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TRAIN_GPT_TIMEOUT"]:
    ENV.pop(variable, None)
SHAPE = ["--layers=2", "--channels=64", "--heads=4", f"--seq-len={T}", "--batch-size=2", "--threads=1", "--device=cpu"]
BATCH = 8 * T  # tokens in a step: 4 micro-batches
TIMEOUT = 60


def setUpModule():
    set_up()


def tearDownModule():
    tear_down()


def with_mpi():
    if not shutil.which("mpirun"):
        return False
    done = mpirun(2, ["--version"], expect=None)
    return "has no MPI" not in done.stderr


def mpirun(ranks, flags, expect=0, env=None, binary=BINARY):
    command = ["mpirun", "-n", str(ranks), "--oversubscribe", "--allow-run-as-root", binary, *flags]
    done = subprocess.run(command, cwd=program.WORK, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=TIMEOUT, env={**ENV, **(env or {})}, encoding="utf-8")
    if expect is not None and done.returncode != expect:
        raise AssertionError(f"{command}: exit status {done.returncode}\n{done.stderr}\n{done.stdout}")
    return done


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Torchrun:
    """Processes started as torchrun starts them. ranks: for each process its rank, or (rank, flags, folder)."""

    def __init__(self, ranks, flags, world=None, env=None, port=None):
        self.port = port or free_port()
        self.processes = []
        for entry in ranks:
            rank, own_flags, folder = entry if isinstance(entry, tuple) else (entry, [], program.WORK)
            variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world or len(ranks)),
                         "MASTER_ADDR": "localhost", "MASTER_PORT": str(self.port)}
            self.processes.append(subprocess.Popen(
                [BINARY, *flags, *own_flags], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, encoding="utf-8", env={**ENV, **variables, **(env or {})}))

    def wait(self):
        """Waits for all; returns the exit statuses, and keeps what they wrote."""
        self.stdout, self.stderr = [None] * len(self.processes), [None] * len(self.processes)

        def read(i):
            self.stdout[i], self.stderr[i] = self.processes[i].communicate(timeout=TIMEOUT)
        threads = [threading.Thread(target=read, args=(i,)) for i in range(len(self.processes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        hung = [i for i, p in enumerate(self.processes) if p.poll() is None]
        for i in hung:
            self.processes[i].kill()
        if hung:
            raise AssertionError(f"processes {hung} are still there after {TIMEOUT} s")
        return [p.returncode for p in self.processes]

    def until_trained(self, out, steps):
        """Until metrics.jsonl shows so many steps."""
        end = time.time() + TIMEOUT
        while time.time() < end:
            if os.path.exists(out + "/metrics.jsonl"):
                with open(out + "/metrics.jsonl", encoding="utf-8") as f:
                    if len(f.readlines()) > steps:
                        return
            time.sleep(0.02)
        raise AssertionError("no step in time")


def flags(*more):
    return [*SHAPE, *data_flags(), "--steps=5", "--val-every=2", "--lr=1e-3", *more]


def without_times(out):
    lines = read_metrics(out + "/metrics.jsonl")
    return [{k: v for k, v in step.items() if not re.search(r"_ms$|_s$|^mfu$", k)} for step in lines[1:]]


CACHE = {}


def trained(ranks, *more, launcher="mpirun", **variables):
    """The steps of a good run, without times. variables: of the environment. One run per set of all these."""
    key = (ranks, launcher, *more, *variables.items())
    if key not in CACHE:
        out = tempfile.mkdtemp(dir=program.WORK, prefix="ranks_")
        given = flags(f"--total-batch-tokens={BATCH}", "--out=" + out, *more)
        if launcher == "torchrun":
            run = Torchrun(range(ranks), given, env=variables)
            statuses = run.wait()
            if any(statuses):
                raise AssertionError(f"{more}: {statuses}\n{run.stderr}\n{run.stdout}")
        elif ranks == 1:
            done = subprocess.run([BINARY, *given], cwd=program.WORK, env={**ENV, **variables}, capture_output=True,
                                  timeout=TIMEOUT)
            if done.returncode:
                raise AssertionError(done.stderr)
        else:
            mpirun(ranks, given, env=variables)
        CACHE[key] = without_times(out)
    return CACHE[key]


class Ranks(ProgramTest):
    launcher = "torchrun"
    precisions = ["collage_plus", "fp32"]

    def trained(self, ranks, *more):
        return trained(ranks, *more, launcher=self.launcher if ranks > 1 else None)

    def test_the_same_data(self):
        """At a learning rate of 0 the weights stay, so each step's loss is a function of its sequences alone. It is
        added up over the micro-batches in the order of the stream, whoever computed them: equal bits. Twelve steps of
        8 sequences pass the end of the epoch of 40. Validation likewise: 11 sequences, 6 batches for 1, 2, 4 ranks."""
        for zero in ["--zero=0", "--zero=1"]:
            more = ("--lr=0", "--steps=12", zero)
            one = [(s["loss"], s.get("val_loss")) for s in self.trained(1, *more)]
            self.assertEqual(len(set(one)), 12)
            for ranks in [2, 4]:
                self.assertEqual([(s["loss"], s.get("val_loss")) for s in self.trained(ranks, *more)], one, ranks)

    def test_losses_over_the_number_of_ranks(self):
        """What changes is where gradients are rounded: bf16, after each micro-batch's addition on one rank (2^-9 of
        it), once after the sum over ranks. Adam turns small gradients into full-sized updates. The bounds are those of
        accumulation in training_test.py, for the same reason."""
        for precision in self.precisions:
            norm, last = (1e-5, 1e-5) if precision == "fp32" else (2e-3, 1e-3)
            one = self.trained(1, "--precision=" + precision)
            for ranks in [2, 4]:
                many = self.trained(ranks, "--precision=" + precision)
                with self.subTest(precision=precision, ranks=ranks):
                    self.assertEqual(many[0]["loss"], one[0]["loss"])  # nothing has been rounded yet
                    self.assertClose(many[0]["grad_norm"], one[0]["grad_norm"], norm)
                    self.assertClose(many[-1]["loss"], one[-1]["loss"], last)
                    self.assertClose(many[-1]["val_loss"], one[-1]["val_loss"], last)
                    self.assertEqual([s["tokens"] for s in many], [s["tokens"] for s in one])

    def test_one_rank_with_the_whole_batch(self):
        """--batch-size=8 in one piece against 4 ranks of 2: sums over other tokens, so fp32 rounding from the start."""
        whole, many = self.trained(1, "--batch-size=8"), self.trained(4)
        self.assertClose(many[0]["loss"], whole[0]["loss"], 1e-5)
        self.assertClose(many[-1]["loss"], whole[-1]["loss"], 1e-3)

    def test_zero_levels_are_equal(self):
        """One reduce-scatter under both, and sums by block: every metric of every step has the same bits."""
        for precision in self.precisions:
            for ranks in [2, 4]:
                levels = [self.trained(ranks, "--precision=" + precision, f"--zero={zero}") for zero in [0, 1]]
                self.assertIn("edq", levels[0][0])
                self.assertEqual(levels[0], levels[1], f"{precision}, {ranks} ranks")

    def test_three_ranks(self):
        """An uneven cut of blocks, validation batches and micro-batches."""
        levels = [self.trained(3, f"--total-batch-tokens={6 * T}", f"--zero={zero}") for zero in [0, 1]]
        self.assertEqual(levels[0], levels[1])
        one = self.trained(1, f"--total-batch-tokens={6 * T}")
        self.assertEqual(levels[0][0]["loss"], one[0]["loss"])
        self.assertClose(levels[0][-1]["loss"], one[-1]["loss"], 1e-3)

    def test_more_than_one_message(self):
        """A model that is cut into several messages: 13 million elements, where one carries 4 million of gradients or
        16 MiB of a rank's weights. fp32, so that the norm of the gradient is that of one rank but for fp32 rounding."""
        more = ("--precision=fp32", "--vocab-size=50000", "--channels=256", "--layers=1", "--steps=2", "--val-every=0")
        one = self.trained(1, *more)
        for zero in [0, 1]:
            two = self.trained(2, *more, f"--zero={zero}")
            self.assertEqual(two[0]["loss"], one[0]["loss"])
            self.assertClose(two[0]["grad_norm"], one[0]["grad_norm"], 1e-5)
            self.assertClose(two[1]["loss"], one[1]["loss"], 1e-5)

    def test_two_runs_are_equal(self):
        first = self.trained(4, "--zero=1")
        CACHE.pop((4, self.launcher, "--zero=1"))
        self.assertEqual(self.trained(4, "--zero=1"), first)

    def test_eval_only_and_samples(self):
        one = self.trained(1, "--eval-only", "--sample-every=1", "--sample-tokens=4")
        many = self.trained(2, "--eval-only", "--sample-every=1", "--sample-tokens=4")
        self.assertEqual(one, many)
        self.assertEqual(self.trained(2, "--sample-every=2", "--sample-tokens=4"), self.trained(2))


@unittest.skipUnless(shutil.which("mpirun"), "no mpirun")
class RanksOverMpi(Ranks):
    launcher = "mpirun"
    precisions = PRECISIONS

    @classmethod
    def setUpClass(cls):
        if not with_mpi():
            raise unittest.SkipTest("the binary has no MPI")

    def test_transports_are_equal(self):
        """The sum is the program's own, so what carries it changes no bit."""
        for zero in ["--zero=0", "--zero=1"]:
            self.assertEqual(trained(4, zero, launcher="mpirun"), trained(4, zero, launcher="torchrun"))

    def test_header_and_run_line(self):
        out = tempfile.mkdtemp(dir=program.WORK)
        done = mpirun(2, flags("--steps=1", "--zero=1", "--out=" + out))
        self.assertEqual(done.stdout.count("step     1/1"), 1)  # rank 0 alone speaks
        self.assertRegex(done.stdout, r"ranks +2 over MPI; optimizer states are shared out")
        self.assertRegex(done.stdout, r"ranks 0-1 on \S+: CPU, 1 thread")
        self.assertEqual(sorted(os.listdir(out)), ["metrics.jsonl", "report.html"])  # and rank 0 alone writes
        run = read_metrics(out + "/metrics.jsonl")[0]
        self.assertEqual((run["ranks"], run["flags"]["zero"]), (2, 1))
        self.assertEqual(run["flags"]["total-batch-tokens"], 2 * 2 * T)  # B * T * ranks
        alone = Run(("--steps=1", *SHAPE, "--val-every=0")).run["memory"]
        # Half the elements, give or take a block of 8192 with the 8 bytes an element of collage_plus's states.
        self.assertLessEqual(abs(run["memory"]["states"] - alone["states"] / 2), 8192 * 8 + 4096)
        self.assertEqual(run["memory"]["gradients"], alone["gradients"])
        planned = plan(*flags(f"--vocab-size={VOCAB}"), "--zero=1", "--plan-ranks=2")
        self.assertEqual({name: planned[name] for name in run["memory"]}, run["memory"])

    def test_one_rank_never_calls_mpi(self):
        """MPI_Init fails under this setting: 2 ranks notice, 1 must not."""
        no_mpi = {"OMPI_MCA_pml": "no_such_thing", "OMPI_MCA_btl": "no_such_thing"}
        done = mpirun(1, flags("--steps=1"), env=no_mpi)
        self.assertNotIn("ranks ", done.stdout)
        self.assertNotEqual(mpirun(2, flags("--steps=1"), env=no_mpi, expect=None).returncode, 0)

    def test_failures(self):
        for status, text, more in [(2, "--lr", ["--lr=abc"]), (2, "--zero", ["--zero=2"]),
                                   (1, "--train-data", ["--train-data=nothing_there_*.bin"]),
                                   (2, "batch-size x seq-len x ranks = 2 x 16 x 2 = 64; try 128",
                                    [f"--total-batch-tokens={6 * T}"])]:
            done = mpirun(2, flags(*more), expect=None)
            errors = [line for line in done.stderr.splitlines() if line.startswith("train_gpt: error: ")]
            self.assertEqual(len(errors), 1, done.stderr)
            self.assertIn(text, errors[0])
            self.assertEqual(done.returncode, status, done.stderr)

    def test_killed_and_stopped_ranks(self):
        for number, pattern in [(signal.SIGKILL, r"rank 1\b"),
                                (signal.SIGSTOP, r"train_gpt: error: .*rank 1 .*has sent nothing for 3 s")]:
            out = tempfile.mkdtemp(dir=program.WORK)
            command = ["mpirun", "-n", "2", "--oversubscribe", "--allow-run-as-root", BINARY,
                       *flags("--steps=1000000", "--val-every=0", "--out=" + out)]
            process = subprocess.Popen(command, cwd=program.WORK, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                       env={**ENV, "TRAIN_GPT_TIMEOUT": "3"}, encoding="utf-8")
            Torchrun.until_trained(None, out, 2)
            victim = [pid for pid in children(process.pid) if environment(pid).get("OMPI_COMM_WORLD_RANK") == "1"]
            self.assertEqual(len(victim), 1)
            os.kill(victim[0], number)
            stderr = process.communicate(timeout=TIMEOUT)[1]
            self.assertNotEqual(process.returncode, 0)
            self.assertRegex(stderr, pattern)


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as f:
        return [int(child) for child in f.read().split()]


def environment(pid):
    with open(f"/proc/{pid}/environ", "rb") as f:
        return dict(v.decode().split("=", 1) for v in f.read().split(b"\0") if b"=" in v)


class Failures(ProgramTest):
    """Over TCP, where no launcher cleans up."""

    def errors(self, run):
        return [line for text in run.stderr for line in text.splitlines() if line]

    def expect_one_line(self, run, statuses, pattern):
        found = run.wait()
        self.assertEqual(found, statuses, run.stderr)
        errors = self.errors(run)
        self.assertEqual(len(errors), 1, run.stderr)
        self.assertRegex(errors[0], "^train_gpt: error: .*" + pattern)
        for text in run.stdout[1:]:
            self.assertEqual(text, "")

    def test_an_error_that_all_meet(self):
        self.expect_one_line(Torchrun(range(3), flags("--lr=abc")), [2, 2, 2], "--lr: found 'abc'")
        self.expect_one_line(Torchrun(range(3), flags("--train-data=nothing_*.bin")), [1, 1, 1], "--train-data: ")

    def test_bad_data_on_one_rank(self):
        """Each rank reads a.bin of its own folder. One's has an id that no vocabulary has: found when that shard is
        first read, in the middle of a step of the others."""
        folders = [path("good"), path("bad")]
        for folder in folders:
            ids = text_ids(24)
            if folder == path("bad"):
                ids[-1] = 60000
            write_shard(os.path.relpath(folder, program.WORK) + "/a.bin", ids)
        for order in [[0, 1], [1, 0]]:
            run = Torchrun([(r, [], folders[order[r]]) for r in range(2)],
                           [*SHAPE, "--train-data=a.bin", "--steps=100"])
            bad = order.index(1)
            self.expect_one_line(run, [1, 1], ("rank 1: " if bad else "") + ".*60000")

    def test_data_or_flags_that_differ(self):
        for folder, sequences in [("long", 24), ("short", 20)]:
            write_shard(folder + "/a.bin", text_ids(sequences))
        run = Torchrun([(0, [], path("long")), (1, [], path("short"))], [*SHAPE, "--train-data=a.bin", "--steps=100"])
        self.expect_one_line(run, [1, 1], "rank 1 .* has other data than rank 0")
        run = Torchrun([0, (1, ["--lr=2e-3"], program.WORK)], flags())
        self.expect_one_line(run, [1, 1], "rank 1 .* has other flags than rank 0.*0.002")

    def start_endless(self, ranks, env=None):
        out = tempfile.mkdtemp(dir=program.WORK)
        run = Torchrun(range(ranks), flags("--steps=1000000", "--val-every=0", "--out=" + out), env=env)
        run.until_trained(out, 2)
        return run

    def test_killed_rank(self):
        for victim in [2, 1, 0]:
            run = self.start_endless(3)
            process = run.processes[victim]
            process.send_signal(signal.SIGKILL)
            statuses = [1, 1, 1]
            statuses[victim] = -signal.SIGKILL
            self.assertEqual(run.wait(), statuses, run.stderr)
            errors = self.errors(run)
            self.assertEqual(len(errors), 1, run.stderr)
            self.assertRegex(errors[0], rf"^train_gpt: error: rank {victim}\b.*process {process.pid}\b.*gone")

    def test_stopped_rank(self):
        for victim in [1, 2]:
            run = self.start_endless(3, env={"TRAIN_GPT_TIMEOUT": "3"})
            process = run.processes[victim]
            process.send_signal(signal.SIGSTOP)
            for r, other in enumerate(run.processes):
                if r != victim:
                    other.wait(TIMEOUT)
            process.kill()  # it cannot end itself
            statuses = run.wait()
            self.assertEqual([s for r, s in enumerate(statuses) if r != victim], [1, 1], run.stderr)
            self.assertRegex(self.errors(run)[0], rf"rank {victim} .*has sent nothing for 3 s")
            self.assertEqual(len(self.errors(run)), 1, run.stderr)

    def test_missing_rank(self):
        run = Torchrun([0, 2], flags(), world=4, env={"TRAIN_GPT_TIMEOUT": "1"})
        self.expect_one_line(run, [1, 1], r"2 of 4 ranks are there after 1 s, missing: rank 1, 3;")

    def test_missing_rank_0(self):
        run = Torchrun([1], flags(), world=2, env={"TRAIN_GPT_TIMEOUT": "1"})
        self.expect_one_line(run, [1], "rank 1 found no rank 0 at localhost port .* in 1 s: Connection refused")

    def test_duplicates(self):
        run = Torchrun([0, 1, 1], flags(), world=3)
        self.expect_one_line(run, [1, 1, 1], "two processes are rank 1: ")
        run = Torchrun([0, 0], flags(), world=2, env={"TRAIN_GPT_TIMEOUT": "2"})
        self.assertEqual(run.wait(), [1, 1])
        self.assertRegex("\n".join(self.errors(run)), r"rank 0 cannot listen on port \d+: Address already in use")

    def test_other_number_of_ranks(self):
        run = Torchrun([0], flags(), world=3)
        other = Torchrun([1], flags(), world=2, port=run.port)
        self.assertEqual(run.wait() + other.wait(), [1, 1])
        self.assertRegex(run.stderr[0], "says that there are 2 ranks, rank 0 that there are 3")
        self.assertEqual(other.stderr, [""])

    def test_strangers_at_the_port(self):
        """Who says something else, or nothing, is ignored."""
        run = Torchrun([0], flags(), world=2)
        end = time.time() + 20
        sockets = []
        while len(sockets) < 2 and time.time() < end:
            try:
                sockets.append(socket.create_connection(("localhost", run.port)))
            except OSError:
                time.sleep(0.05)
        sockets[0].sendall(b"W" * 400)
        sockets[1].close()
        other = Torchrun([1], flags(), world=2, port=run.port)
        self.assertEqual(run.wait() + other.wait(), [0, 0], run.stderr + other.stderr)
        sockets[0].close()

    def test_environment(self):
        for variables, text in [({"RANK": "1"}, "WORLD_SIZE: not in the environment, but RANK is"),
                                ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: found '2'"),
                                ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR: not in the environment"),
                                ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1",
                                  "TRAIN_GPT_TIMEOUT": "soon"}, "TRAIN_GPT_TIMEOUT: found 'soon'")]:
            done = subprocess.run([BINARY, *flags()], cwd=program.WORK, env={**ENV, **variables}, capture_output=True,
                                  timeout=TIMEOUT, encoding="utf-8")
            self.assertEqual((done.returncode, done.stderr.count("\n")), (2, 1), done.stderr)
            self.assertIn(text, done.stderr)
        done = subprocess.run([BINARY, *flags("--steps=1")], cwd=program.WORK, capture_output=True, timeout=TIMEOUT,
                              env={**ENV, "RANK": "0", "WORLD_SIZE": "1"})
        self.assertEqual(done.returncode, 0, done.stderr)


class Resumed(ProgramTest):
    """Checkpoints of several ranks, resumed by as many and by others."""

    def saved(self, *more, ranks=2):
        out = tempfile.mkdtemp(dir=program.WORK, prefix="saved_")
        run = Torchrun(range(ranks), flags(f"--total-batch-tokens={BATCH}", "--out=" + out, "--checkpoint-every=2",
                                           "--keep-checkpoints=0", "--edq-every=1", "--shadow=8", *more))
        self.assertEqual(run.wait(), [0] * ranks, run.stderr)
        return out

    def resumed(self, whole, *more, ranks=2):
        """The same from step 2 on."""
        out = tempfile.mkdtemp(dir=program.WORK, prefix="resumed_")
        shutil.copytree(whole, out, dirs_exist_ok=True)
        for step in [4, 5]:
            shutil.rmtree(out + f"/checkpoints/step_0000000{step}")
        run = Torchrun(range(ranks), ["--resume", "--out=" + out, "--device=cpu", "--threads=1", *more])
        self.assertEqual(run.wait(), [0] * ranks, run.stderr)
        return out

    def files(self, out):
        folder, found = out + "/checkpoints/step_00000005/", {}
        for name in sorted(os.listdir(folder)):
            with open(folder + name, "rb") as f:
                found[name] = f.read()
        return found

    def test_as_many_ranks(self):
        for zero in ["--zero=0", "--zero=1"]:
            whole = self.saved(zero, "--lockstep=bf16")
            self.assertEqual(len([n for n in self.files(whole) if n.startswith("optimizer.")]), 1 + (zero == "--zero=1"))
            again = self.resumed(whole)
            self.assertEqual(without_times(again), without_times(whole))
            self.assertEqual(self.files(again), self.files(whole))

    def test_shared_out_and_brought_together(self):
        """Both ZeRO levels do the same sums, so what one saved the other goes on with, bit for bit."""
        split, one = self.saved("--zero=1"), self.saved("--zero=0")
        for whole, flag, other in [(split, "--zero=0", one), (one, "--zero=1", split)]:
            again = self.resumed(whole, flag)
            self.assertEqual(without_times(again), without_times(other))
            got, expected = self.files(again), self.files(other)
            del got["state.json"], expected["state.json"]  # a flag is another
            self.assertEqual(got, expected)

    def test_a_rank_without_blocks(self):
        """Of a tiny model a rank in the middle may own nothing. It writes a file all the same, so that none is missing."""
        whole = self.saved("--zero=1", "--layers=1", "--channels=8", "--heads=2", ranks=4)
        self.assertEqual(len([n for n in self.files(whole) if n.startswith("optimizer.")]), 4)
        again = self.resumed(whole, ranks=4)
        self.assertEqual(self.files(again), self.files(whole))

    def test_ranks_that_share_no_folder(self):
        """Each has a runs/ of its own, so no folder has all files: none may look complete."""
        folders = [tempfile.mkdtemp(dir=program.WORK) for _ in range(2)]
        os.mkdir(folders[1] + "/mine")
        run = Torchrun([(r, [], folders[r]) for r in range(2)],
                       [*SHAPE, *data_flags(), "--val-every=0", "--steps=2", "--zero=1", "--out=mine", "--checkpoint-every=1"])
        self.assertEqual(run.wait(), [1, 1], run.stderr)
        self.assertRegex(run.stderr[0], "step 1 not written: optimizer.rank0001.safetensors is not in the mine/checkpoints")
        self.assertRegex(run.stderr[0], "error: (rank 1: )?step 2, the last: no checkpoint of it was written")
        for folder in folders:
            self.assertEqual(glob.glob(folder + "/mine/checkpoints/*"), [])

    def test_other_numbers_of_ranks(self):
        """The weights are the same, so the first loss is; after it gradients are added up in another order."""
        whole = self.saved("--zero=1")
        expected = [step["loss"] for step in without_times(whole)]
        for ranks in [1, 4]:
            losses = [step["loss"] for step in without_times(self.resumed(whole, ranks=ranks))]
            self.assertEqual(losses[:3], expected[:3])
            for a, b in zip(losses[3:], expected[3:]):
                self.assertClose(a, b, 1e-3)  # bf16 gradients summed in another order, at a learning rate of 1e-3


if __name__ == "__main__":
    sys.exit(unittest.main())
