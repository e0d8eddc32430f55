#!/usr/bin/env python3
"""Runs that are killed, stopped and starved of disk, and checkpoints that are spoilt: nothing may be lost, and nothing
wrong may be gone on from.

Every interrupted run is resumed to its end and compared, bit for bit, with one that nothing interrupted. What moment a
kill hits is left to chance; no test needs it to hit a certain one, and a run that ends first counts as "finished".

  TRAIN_GPT=./train_gpt FAULTS_KILLS=200 python3 dev/tests/faults_test.py -v

FAULTS_KILLS: kills at random moments, and as many at a call of the file system (default 40). Other tests grow with it.
FAULTS_SEED: of all that is drawn (default 1).
"""
import collections
import contextlib
import errno
import functools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import time
import unittest
import zlib

import comm_test
import program
from program import BINARY, PRECISIONS, T, data_flags, path, read_metrics, set_up, tear_down

KILLS = int(os.environ.get("FAULTS_KILLS", "40"))
SEED = int(os.environ.get("FAULTS_SEED", "1"))
SHIM = os.path.join(os.path.dirname(os.path.realpath(BINARY)), "libfault_shim.so")
ENV = {**comm_test.ENV, "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"}
SHAPE = ["--layers=1", "--channels=32", "--heads=2", f"--seq-len={T}", "--batch-size=2", "--threads=1", "--device=cpu"]
STEPS = 40
TIMEOUT = 60
counts = collections.Counter()  # for the line at the end
started = []  # processes of this test


def setUpModule():
    set_up()


def tearDownModule():
    tear_down()
    print(f"faults, seed {SEED}: " + ", ".join(f"{n} {what}" for what, n in counts.items()), flush=True)


def progress(done, of, what):
    if done % 25 == 0 or done == of:
        print(f"{done}/{of} {what}", flush=True)


def evenly(items, n):
    """About n of them, spread over all."""
    return [items[i * len(items) // n] for i in range(n)] if n < len(items) else list(items)


# Runs.

def new_folder():
    return tempfile.mkdtemp(dir=program.WORK, prefix="out_")


def flags(*more):
    return [*SHAPE, *data_flags(), "--lr=1e-3", "--val-every=0", f"--steps={STEPS}", *more]


def start(out, *more, env=None, **kwargs):
    started.append(subprocess.Popen([BINARY, *flags("--out=" + out, *more)], cwd=program.WORK,
                                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                    encoding="utf-8", env={**ENV, **(env or {})}, **kwargs))
    return started[-1]


def end(process):
    """Waits; returns exit status and stderr."""
    try:
        stderr = process.communicate(timeout=TIMEOUT)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"still there after {TIMEOUT} s: {process.communicate()[1]}") from None
    return process.returncode, stderr


def until(condition, process=None):
    """Until condition() is true, or the process has ended. Returns what condition() said."""
    give_up = time.time() + TIMEOUT
    while time.time() < give_up:
        value = condition()
        if value or (process and process.poll() is not None):
            return value
        time.sleep(0.002)
    raise AssertionError("not seen in time")


def state_of(process):
    """R, S, T (stopped), Z, ..."""
    with open(f"/proc/{process.pid}/stat", encoding="utf-8") as f:
        return f.read().rsplit(")", 1)[1].split()[0]


def lines_of(out):
    """Whole lines of metrics.jsonl so far."""
    try:
        with open(out + "/metrics.jsonl", "rb") as f:
            return f.read().count(b"\n")
    except FileNotFoundError:
        return 0


def names(out):
    """Of what is in checkpoints/."""
    return sorted(os.listdir(out + "/checkpoints")) if os.path.isdir(out + "/checkpoints") else []


def steps_of(out):
    """Of the checkpoints, oldest first."""
    return [int(name[5:]) for name in names(out) if re.fullmatch(r"step_\d{8,}", name)]


def folder_of(out, step):
    return f"{out}/checkpoints/step_{step:08d}"


def contents(folder):
    """{file: bytes} of all below."""
    found = {}
    for parent, _, files in os.walk(folder):
        for name in files:
            with open(os.path.join(parent, name), "rb") as f:
                found[os.path.relpath(os.path.join(parent, name), folder)] = f.read()
    return found


def without_times(line):
    return {k: v for k, v in line.items() if not re.search(r"_ms$|_s$|^mfu$", k)}


def covered(text):
    """The part of state.json that its checksum is of."""
    return text[:text.rindex(',\n  "checksum"')]


class Reference:
    """A run that nothing interrupted."""

    def __init__(self, *more):
        self.out = new_folder()
        begun = time.time()
        status, stderr = end(start(self.out, *more))
        self.seconds = time.time() - begun
        if status or stderr:
            raise AssertionError(f"{more}: exit status {status}\n{stderr}")


@functools.lru_cache(maxsize=None)
def reference(*more):
    return Reference(*more)


class FaultsTest(unittest.TestCase):
    def setUp(self):
        self.random = random.Random(f"{SEED} {self.id()}")

    def tearDown(self):
        """A test that failed may have left a run without end."""
        for process in started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        started.clear()

    def assertWhole(self, out):
        """Whatever has the name of a checkpoint is one: each file is what its state.json says."""
        for step in steps_of(out):
            files = contents(folder_of(out, step))
            text = files.pop("state.json").decode()
            state = json.loads(text)
            self.assertEqual(state["step"], step)
            self.assertEqual(state["checksum"], f"{zlib.crc32(covered(text).encode()):08x}")
            self.assertEqual({name: {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
                              for name, data in files.items()}, state["files"])

    def assertNothingHalf(self, out):
        self.assertEqual([name for name in names(out) if not re.fullmatch(r"step_\d{8,}", name)], [])

    def assertSame(self, out, expected, metrics=True):
        """A finished run has the metrics and the last checkpoint of the other, bit for bit."""
        self.assertWhole(out)
        self.assertNothingHalf(out)
        if metrics:
            ours, theirs = ([without_times(line) for line in read_metrics(o + "/metrics.jsonl")[1:]]
                            for o in [out, expected])
            self.assertEqual(ours, theirs)
        if steps_of(expected):
            self.assertEqual(steps_of(out)[-1:], steps_of(expected)[-1:])
            ours, theirs = (contents(folder_of(o, steps_of(expected)[-1])) for o in [out, expected])
            self.assertEqual(sorted(ours), sorted(theirs))
            self.assertEqual([name for name in ours if ours[name] != theirs[name]], [])

    def resume(self, out, *more):
        status, stderr = end(start(out, "--resume", *more))
        self.assertEqual((status, stderr), (0, ""))

    def resumed(self, out, expected, *more, metrics=True):
        """Takes an interrupted run to its end, and compares."""
        counts["runs interrupted"] += 1
        self.assertWhole(out)
        self.resume(out, *more)
        self.assertSame(out, expected, metrics)
        counts["of them brought to the same end"] += 1


# Kills.

class Kills(FaultsTest):
    def killed(self, out, expected, *more):
        """Kills a run at a moment of the time that it takes, unless it ends before. True if it was killed."""
        begun, process = time.time(), start(out, *more)
        try:
            process.wait(self.random.uniform(0, expected.seconds))
            if "--resume" not in more:
                expected.seconds = min(expected.seconds, time.time() - begun)
            counts["finished before the kill"] += 1
        except subprocess.TimeoutExpired:
            process.kill()
        status, stderr = end(process)
        self.assertIn(status, (0, -signal.SIGKILL), stderr)
        self.assertEqual(stderr, "")
        return status != 0

    def test_at_random_moments(self):
        """Saves at each first, second or third step, so that many kills fall into one."""
        kills = runs = 0
        while kills < KILLS and runs < 10 * KILLS:
            p = runs % len(PRECISIONS)
            more = ["--precision=" + PRECISIONS[p], f"--checkpoint-every={p % 3 + 1}",
                    f"--keep-checkpoints={p // 2 % 3}"]
            expected, out = reference(*more), new_folder()
            runs += 1
            with self.subTest(run=runs, flags=more):
                again, newest = [], 0
                while kills < KILLS and self.killed(out, expected, *more, *again):
                    kills += 1
                    progress(kills, KILLS, "kills at a random moment")
                    counts["kills at random moments"] += 1
                    counts["of them within a save"] += any(name[0] == "." for name in names(out))
                    self.assertWhole(out)
                    # A checkpoint that was there is there, or a newer one.
                    self.assertGreaterEqual((steps_of(out) or [0])[-1], newest)
                    newest, again = (steps_of(out) or [0])[-1], ["--resume"]
                    if self.random.random() < 0.5:
                        break
                self.resumed(out, expected.out, *more)
            shutil.rmtree(out)
        self.assertEqual(kills, KILLS)


@unittest.skipUnless(os.path.exists(SHIM), "no " + SHIM)
class Calls(FaultsTest):
    """Faults at each call that changes a file, by dev/tests/faults/shim.c."""

    SAVES = ["--steps=6", "--checkpoint-every=2", "--keep-checkpoints=1"]

    def with_fault(self, out, *more, at=0, do="", until="", folder=""):
        """Starts a run whose calls below `folder` of the run folder fail. Their log is left in out + ".log"."""
        variables = {"LD_PRELOAD": SHIM, "FAULT_FOLDER": f"{out}/{folder}", "FAULT_LOG": out + ".log"}
        if at:
            variables |= {"FAULT_AT": str(at), "FAULT_DO": do}
        if until:
            variables["FAULT_UNTIL"] = str(until)
        return start(out, *more, env=variables)

    def logged(self, out):
        with open(out + ".log", encoding="utf-8") as f:
            return [line.split()[0] for line in f]

    def last_named(self, out):
        """Step of the newest checkpoint that got its name before the process was killed: its folder was synced then."""
        named = renamed = 0
        with open(out + ".log", encoding="utf-8") as f:
            for line in f:
                if match := re.match(r"rename .*/\.saving_(\d+)$", line):
                    renamed = int(match[1])
                elif line.endswith("/checkpoints\n") and line.startswith("sync "):
                    named = renamed
        return named

    def calls(self, *more, folder=""):
        """The kinds of call of a run that nothing disturbs."""
        out = new_folder()
        self.assertEqual(end(self.with_fault(out, *more, folder=folder)), (0, ""))
        return self.logged(out)

    def telling(self, kinds):
        """Numbers of the calls, without writes between other writes: a file has one a tensor."""
        return [i + 1 for i in range(len(kinds)) if set(kinds[max(0, i - 1):i + 2]) != {"write"}]

    def test_kill(self):
        """Before, after and in the middle of each call, metrics and clearing away included; then once more while it
        resumes."""
        kinds = self.calls(*self.SAVES)
        for kind in ["open", "write", "sync", "rename", "mkdir", "remove"]:
            self.assertIn(kind, kinds)  # else the shim sees less than there is
        cases = [(at, do) for at in self.telling(kinds) for do in ["kill", "killafter", "short"]
                 if do != "short" or kinds[at - 1] == "write"]
        cases = evenly(cases, KILLS)
        for i, (at, do) in enumerate(cases):
            out = new_folder()
            with self.subTest(at=at, do=do, kind=kinds[at - 1]):
                for more in [self.SAVES, [*self.SAVES, "--resume"]]:
                    status, stderr = end(self.with_fault(out, *more, at=at, do=do))
                    self.assertIn(status, (0, -signal.SIGKILL), stderr)
                    self.assertEqual(stderr, "")
                    counts["kills at a call" if status else "finished before the kill"] += 1
                    self.assertWhole(out)
                    self.assertGreaterEqual((steps_of(out) or [0])[-1], self.last_named(out))
                    at = i % 8 + 1
                self.resumed(out, reference(*self.SAVES).out, *self.SAVES)
            progress(i + 1, len(cases), "kills at a call")
            shutil.rmtree(out)

    def test_short_writes(self):
        """A write that takes a part is no error."""
        out = new_folder()
        self.assertEqual(end(self.with_fault(out, *self.SAVES, at=1, do="half")), (0, ""))
        self.assertSame(out, reference(*self.SAVES).out)

    def test_errors(self):
        """A full disk, a quota, a device, a file system that turned read-only: at one call, for a while, for good."""
        more = ["--steps=6", "--checkpoint-every=2", "--keep-checkpoints=0"]
        kinds = self.calls(*more, folder="checkpoints")
        cases = [(error, at, last) for at in self.telling(kinds) for error in ["ENOSPC", "EDQUOT", "EIO", "EROFS"]
                 for last in [at, at + len(kinds) // 3, ""]]
        cases = self.random.sample(cases, min(len(cases), KILLS))
        for i, (error, at, last) in enumerate(cases):
            out = new_folder()
            with self.subTest(error=error, at=at, until=last):
                process = self.with_fault(out, *more, at=at, do=error, until=last, folder="checkpoints")
                self.failed_saves(out, *end(process), [2, 4, 6], os.strerror(getattr(errno, error)))
                if error in ["ENOSPC", "EDQUOT"]:
                    self.assertNothingHalf(out)
                self.resumed(out, reference(*more).out, *more)
            progress(i + 1, len(cases), "runs with failing calls")
            shutil.rmtree(out)

    def failed_saves(self, out, status, stderr, saves, words):
        """A warning for each save that failed, a checkpoint for each other, exit status 1 if the last failed."""
        self.assertWhole(out)
        lines = stderr.splitlines()
        found = [re.fullmatch(r"train_gpt: warning: checkpoint of step (\d+) not written: (.*); earlier ones stay", line)
                 for line in lines]
        failed = [int(match[1]) for match in found if match]
        for match in found:
            if match:
                self.assertIn(words, match[2])
        self.assertEqual(len(failed), len(set(failed)), stderr)
        self.assertLessEqual(set(failed), set(saves))
        self.assertLessEqual(set(saves) - set(failed), set(steps_of(out)), stderr)
        last_failed = saves[-1] in failed
        self.assertEqual(status, 1 if last_failed else 0, stderr)
        rest = [line for line, match in zip(lines, found) if not match and "warning: cannot write" not in line]
        self.assertEqual([line[:18] for line in rest], ["train_gpt: error: "] * last_failed, stderr)
        counts["saves that failed"] += len(failed)

    def test_second_signal_within_a_save(self):
        """The process is held at a call of a save; then the second signal comes."""
        calls = self.telling(self.calls("--steps=1", "--checkpoint-every=1", folder="checkpoints"))
        for number, statuses in [(signal.SIGTERM, (143, -15)), (signal.SIGINT, (130, -2))]:
            for at in evenly(calls, max(8, KILLS // 5)):
                out = new_folder()
                with self.subTest(signal=number, at=at):
                    process = self.with_fault(out, "--steps=1000000", at=at, do="stop", folder="checkpoints")
                    until(lambda: lines_of(out) > 2, process)
                    process.send_signal(number)
                    self.assertTrue(until(lambda: state_of(process) == "T", process))
                    time.sleep(.15)  # sooner it would be the first one's echo
                    process.send_signal(number)
                    process.send_signal(signal.SIGCONT)
                    status, stderr = end(process)
                    self.assertIn(status, statuses, stderr)
                    self.assertWhole(out)
                    counts["second signals within a save"] += 1
                    self.resume(out, f"--steps={(steps_of(out) or [0])[-1] + 2}")
                    self.assertNothingHalf(out)
                shutil.rmtree(out)


# A disk that is full, or read-only.

class Disk:
    """A file system of its own, in a mount namespace that ends with it; .folder leads there."""

    def __init__(self, size):
        mount = tempfile.mkdtemp(dir=program.WORK, prefix="mount_")
        self.process = subprocess.Popen(["unshare", "-m", "sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, encoding="utf-8")
        self.folder = f"/proc/{self.process.pid}/root{mount}"
        said = self.run(f"mount -t tmpfs -o size={size} none {mount}")
        if said != "0":
            self.close()
            raise unittest.SkipTest("cannot mount a file system: " + said)
        self.mount = mount

    def run(self, command):
        """Runs it in the namespace; returns what it printed, and its exit status."""
        try:
            self.process.stdin.write(command + " 2>&1; echo $?; echo end\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        lines = []
        for line in self.process.stdout:
            if line == "end\n":
                break
            lines.append(line.strip())
        return " ".join(lines)

    def close(self):
        self.process.communicate("", timeout=TIMEOUT)


class FullDisk(FaultsTest):
    failed_saves = Calls.failed_saves
    MORE = ["--checkpoint-every=5", "--keep-checkpoints=0"]
    SAVES = list(range(5, STEPS + 1, 5))

    def copied(self, out):
        """To where there is room."""
        copy = new_folder()
        shutil.copytree(out, copy, dirs_exist_ok=True)
        return copy

    def size(self):
        return sum(map(len, contents(folder_of(reference(*self.MORE).out, STEPS)).values()))

    def test_full_disk(self):
        """From no room for metrics.jsonl to room for several checkpoints."""
        for i in range(max(6, KILLS // 10)):
            size = self.random.randrange(4096, 5 * self.size())
            with self.subTest(size=size), contextlib.closing(Disk(size)) as disk:
                out = disk.folder + "/run"
                status, stderr = end(start(out, *self.MORE))
                self.assertEqual(status, 1)
                self.failed_saves(out, status, stderr, self.SAVES, os.strerror(errno.ENOSPC))
                self.assertNothingHalf(out)
                self.resumed(self.copied(out), reference(*self.MORE).out, *self.MORE, metrics=False)
                counts["full disks"] += 1

    def test_room_again(self):
        """What filled the disk is removed after the first warning; later saves succeed."""
        with contextlib.closing(Disk(8 * self.size())) as disk:
            out = disk.folder + "/run"
            process = start(out, "--checkpoint-every=5", "--steps=1000000")
            until(lambda: steps_of(out), process)
            with contextlib.suppress(OSError), open(disk.folder + "/filler", "wb", buffering=0) as f:
                while f.write(bytes(4096)):
                    pass
            warning = process.stderr.readline()
            if "metrics.jsonl" in warning:
                warning = process.stderr.readline()
            self.assertRegex(warning, r"^train_gpt: warning: checkpoint of step \d+ not written: .*No space")
            os.remove(disk.folder + "/filler")
            failed = int(re.search(r"step (\d+)", warning)[1])
            until(lambda: max(steps_of(out)) > failed, process)
            process.terminate()
            status, stderr = end(process)
            self.assertEqual(status, 0, stderr)
            self.assertWhole(out)
            self.assertNothingHalf(out)
            self.assertEqual(steps_of(out)[-1], read_metrics(out + "/metrics.jsonl")[-1]["step"])
            counts["full disks"] += 1

    def test_read_only_folder(self):
        with contextlib.closing(Disk("64m")) as disk:
            out = disk.folder + "/run"
            process = start(out, "--checkpoint-every=5", "--steps=1000000")
            until(lambda: steps_of(out), process)
            # Made read-only elsewhere, where no save that is going on can hold it.
            inner, aside = disk.mount + "/run/checkpoints", disk.mount + "/aside"
            self.assertEqual(disk.run(f"mkdir {aside} && mount --bind {inner} {aside} && "
                                      f"mount -o remount,bind,ro {aside} && mount --move {aside} {inner}"), "0")
            self.assertRegex(process.stderr.readline(),
                             r"^train_gpt: warning: checkpoint of step \d+ not written: .*Read-only")
            lines = lines_of(out)
            until(lambda: lines_of(out) > lines + 5, process)
            process.terminate()
            status, stderr = end(process)
            self.assertEqual(status, 1, stderr)
            self.assertWhole(out)
            copy = self.copied(out)
            self.resume(copy, f"--steps={steps_of(copy)[-1] + 5}", "--checkpoint-every=5")
            self.assertNothingHalf(copy)

    def test_file_size_limit(self):
        """Between the sizes of metrics.jsonl and the largest file of a checkpoint. SIGXFSZ would end the process."""
        expected = reference(*self.MORE)
        metrics = os.path.getsize(expected.out + "/metrics.jsonl") + os.path.getsize(expected.out + "/report.html")
        largest = max(map(len, contents(folder_of(expected.out, STEPS)).values()))
        self.assertLess(metrics, largest)
        for i in range(4):
            limit, out = self.random.randrange(metrics, largest), new_folder()
            with self.subTest(limit=limit):
                process = start(out, *self.MORE,
                                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
                status, stderr = end(process)
                self.failed_saves(out, status, stderr, self.SAVES, os.strerror(errno.EFBIG))
                self.assertEqual((status, names(out)), (1, []))
                self.resumed(out, expected.out, *self.MORE)
                counts["file-size limits"] += 1


# Signals.

class Signals(FaultsTest):
    def test_stop_at_random_moments(self):
        n = max(10, KILLS // 2)
        for i in range(n):
            number = [signal.SIGTERM, signal.SIGINT][i % 2]
            more = [f"--checkpoint-every={i % 4}", "--precision=" + PRECISIONS[i % 10]]
            expected, out = reference(*more), new_folder()
            with self.subTest(signal=number, flags=more):
                process = start(out, *more)
                try:
                    process.wait(self.random.uniform(0, expected.seconds))
                except subprocess.TimeoutExpired:
                    process.send_signal(number)
                status, stderr = end(process)
                trained = max(0, lines_of(out) - 1)
                if status == -number:
                    self.assertEqual(trained, 0)  # it had hardly begun
                    counts["signals before a run had begun"] += 1
                else:
                    self.assertEqual(status, 0, stderr)
                    self.assertNotIn("error", stderr)
                    # The finished step's; a run that was at its end may have had nothing to save.
                    if trained < STEPS or i % 4:
                        self.assertEqual(steps_of(out)[-1], trained)
                    counts["finished before the signal" if trained == STEPS else "signals"] += 1
                    self.assertNothingHalf(out)
                self.resumed(out, expected.out, *more)
            progress(i + 1, n, "runs told to stop")
            shutil.rmtree(out)

    def test_what_reads_the_output_ends_first(self):
        """Ctrl-C under "| tee log" ends tee as well; and timeout(1) sends its signal twice at once."""
        out = new_folder()
        process = subprocess.Popen([BINARY, *flags("--out=" + out, "--steps=1000000")], cwd=program.WORK, env=ENV,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        while b"step " not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        process.stdout.close()
        self.assertEqual(process.wait(TIMEOUT), 0)
        self.assertEqual(steps_of(out)[-1], lines_of(out) - 1)

    def test_another_process_in_its_folder(self):
        """The second is refused, and the first knows nothing of it."""
        out = new_folder()
        first = start(out, "--steps=1000000", "--checkpoint-every=1000")
        until(lambda: lines_of(out) > 1, first)
        for more in [[], ["--resume"]]:
            status, stderr = end(start(out, *more))
            self.assertEqual(status, 1)
            self.assertIn("another train_gpt is writing in", stderr)
        first.terminate()
        self.assertEqual(end(first)[0], 0)
        self.assertEqual(steps_of(out)[-1], lines_of(out) - 1)

    def test_save_at_random_moments(self):
        """SIGUSR1 saves, and changes nothing else."""
        expected = reference()
        for i in range(max(5, KILLS // 8)):
            out = new_folder()
            process = start(out)
            until(lambda: lines_of(out) > 1, process)
            for _ in range(3):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(self.random.uniform(0, expected.seconds / 4))
                process.send_signal(signal.SIGUSR1)
                counts["signals"] += 1
            self.assertEqual(end(process), (0, ""))
            self.assertSame(out, expected.out)
            shutil.rmtree(out)

    def test_saves_are_seen(self):
        out = new_folder()
        process = start(out, "--steps=1000000", "--lr-schedule=constant")
        until(lambda: lines_of(out) > 1, process)
        for _ in range(3):
            before = steps_of(out)
            process.send_signal(signal.SIGUSR1)
            until(lambda: steps_of(out) not in (before, []), process)
        self.assertIsNone(process.poll())
        process.terminate()
        status, stderr = end(process)
        self.assertEqual(status, 0, stderr)
        step = steps_of(out)[-1]
        self.assertEqual(step, lines_of(out) - 1)
        more = [f"--steps={step + 3}", "--lr-schedule=constant", "--checkpoint-every=1000000"]
        self.resumed(out, Reference(*more).out, *more)


# Two ranks.

class Ranks(FaultsTest):
    SHARED = ["--layers=2", "--checkpoint-every=1", "--batch-size=1"]
    WAIT = {**ENV, "TRAIN_GPT_TIMEOUT": "30"}  # a rank that never comes is named within a minute too

    @classmethod
    def over_tcp(cls, out, *more, env=None):
        return comm_test.Torchrun(range(2), flags("--out=" + out, *cls.SHARED, *more), env={**cls.WAIT, **(env or {})})

    @classmethod
    @functools.lru_cache(maxsize=None)
    def uninterrupted(cls, zero):
        """Its folder, and the seconds it took."""
        out = new_folder()
        begun = time.time()
        run = cls.over_tcp(out, zero)
        if run.wait() != [0, 0]:
            raise AssertionError(run.stderr)
        return out, time.time() - begun

    def after_a_while(self, out, zero, processes):
        until(lambda: lines_of(out) > 0, processes[0])
        with contextlib.suppress(subprocess.TimeoutExpired):
            processes[0].wait(self.random.uniform(0, self.uninterrupted(zero)[1]))

    def finish(self, out, zero):
        self.assertWhole(out)
        run = self.over_tcp(out, zero, "--resume")
        self.assertEqual((run.wait(), run.stderr), ([0, 0], ["", ""]))
        self.assertSame(out, self.uninterrupted(zero)[0])
        counts["resumed on two ranks"] += 1

    def assertNamed(self, victim, statuses, run):
        """It was killed, and the other says so."""
        self.assertEqual((statuses[victim], statuses[1 - victim]), (-signal.SIGKILL, 1))
        lines = [line for line in run.stderr[1 - victim].splitlines() if "error: " in line]
        self.assertEqual(len(lines), 1, run.stderr)
        self.assertRegex(lines[0], rf"^train_gpt: error: rank {victim}\b")
        counts["ranks killed"] += 1

    def test_one_is_killed(self):
        n = max(4, KILLS // 8)
        for i in range(n):
            victim, zero, out = i % 2, f"--zero={i // 2 % 2}", new_folder()
            with self.subTest(victim=victim, zero=zero):
                run = self.over_tcp(out, zero)
                self.after_a_while(out, zero, run.processes)
                run.processes[victim].kill()
                statuses = run.wait()  # within TIMEOUT = 60 s
                if statuses[victim] == 0:
                    counts["finished before the kill"] += 1
                elif statuses[1 - victim] == 0:  # it had all it needed of the other
                    self.assertEqual(steps_of(out)[-1], STEPS)
                else:
                    self.assertNamed(victim, statuses, run)
                self.finish(out, zero)
            progress(i + 1, n, "runs with a rank killed")

    def with_fault(self, out, do, file, *more):
        """Two ranks, of which only one touches this file of the checkpoint of step 3."""
        return self.over_tcp(out, *more, env={"LD_PRELOAD": SHIM, "FAULT_AT": "2", "FAULT_DO": do,
                                              "FAULT_FOLDER": f"{out}/checkpoints/.saving_00000003/{file}"})

    FILES = [("model.safetensors", 0), ("optimizer.rank0001", 1), ("state.json", 0)]  # and who writes them

    @unittest.skipUnless(os.path.exists(SHIM), "no " + SHIM)
    def test_one_is_killed_as_it_writes(self):
        for file, victim in self.FILES:
            out = new_folder()
            with self.subTest(file=file):
                run = self.with_fault(out, "kill", file, "--zero=1")
                self.assertNamed(victim, run.wait(), run)
                self.assertEqual(steps_of(out)[-1], 2)
                self.finish(out, "--zero=1")

    @unittest.skipUnless(os.path.exists(SHIM), "no " + SHIM)
    def test_one_has_no_room(self):
        """Its save fails for all, is told once, and training goes on."""
        for file, writer in self.FILES:
            out = new_folder()
            with self.subTest(file=file):
                run = self.with_fault(out, "ENOSPC", file, "--zero=1", "--keep-checkpoints=0")
                self.assertEqual(run.wait(), [0, 0], run.stderr)
                self.assertRegex("".join(run.stderr), r"^train_gpt: warning: checkpoint of step 3 not written: "
                                 + ("rank 1: " if writer else "") + r".*No space.*; earlier ones stay\n$")
                self.assertEqual(steps_of(out), [1, 2, *range(4, STEPS + 1)])
                self.assertNothingHalf(out)
                self.assertWhole(out)
                counts["saves that failed"] += 1

    def test_one_is_told_to_stop(self):
        for i in range(max(4, KILLS // 16)):
            told, zero, out = i % 2, f"--zero={i // 2 % 2}", new_folder()
            with self.subTest(told=told, zero=zero):
                run = self.over_tcp(out, zero)
                self.after_a_while(out, zero, run.processes)
                run.processes[told].send_signal(signal.SIGTERM)
                self.assertEqual(run.wait(), [0, 0], run.stderr)
                self.assertEqual(steps_of(out)[-1], lines_of(out) - 1)
                self.assertNothingHalf(out)
                self.finish(out, zero)
                counts["signals to one rank of two"] += 1

    def test_over_mpi(self):
        if not comm_test.with_mpi():
            self.skipTest("no MPI")
        for number in [signal.SIGKILL, signal.SIGTERM]:
            for zero in ["--zero=0", "--zero=1"]:
                out = new_folder()
                with self.subTest(signal=number, zero=zero):
                    process = subprocess.Popen(
                        ["mpirun", "-n", "2", "--oversubscribe", "--allow-run-as-root", BINARY,
                         *flags("--out=" + out, *self.SHARED, zero)], cwd=program.WORK, env=self.WAIT,
                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8")
                    until(lambda: lines_of(out) > 1, process)
                    for pid in comm_test.children(process.pid):
                        if comm_test.environment(pid).get("OMPI_COMM_WORLD_RANK") == "1":
                            os.kill(pid, number)
                    status, stderr = end(process)
                    if number == signal.SIGTERM:
                        self.assertEqual(status, 0, stderr)
                    elif status:
                        self.assertRegex(stderr, r"rank 1\b")
                    self.finish(out, zero)


# Checkpoints that are not as they were written.

def places(value, at=()):
    """Paths to all that a JSON value holds."""
    if at:
        yield at
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []:
        yield from places(value[key], (*at, key))


def other_of_its_kind(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 + 1
    if isinstance(value, str):
        return value[:-1] + chr(ord(value[-1]) ^ 1) if value else "x"
    return [] if isinstance(value, dict) else {}


REMOVED = object()
CHANGES = {"other": other_of_its_kind, "other type": lambda v: 7 if isinstance(v, (str, dict, list)) else "seven",
           "null": lambda v: None, "removed": lambda v: REMOVED,
           "huge": lambda v: "9" * 40 if isinstance(v, str) else 10 ** 40,
           "negative": lambda v: "-1" if isinstance(v, str) else -1, "long": lambda v: "x" * 100000}


def changed(text, at, change):
    """state.json with one value changed and the checksum as it was."""
    root = json.loads(text)
    parent = root
    for key in at[:-1]:
        parent = parent[key]
    value = CHANGES[change](parent[at[-1]])
    if value is REMOVED:
        del parent[at[-1]]
    else:
        parent[at[-1]] = value
    return json.dumps(root, indent=2) + "\n"


def sealed(text):
    """The same with a checksum that is right."""
    root = json.loads(text)
    root.pop("checksum", None)
    text = json.dumps(root, indent=2)[:-2]
    return text + f',\n  "checksum": "{zlib.crc32(text.encode()):08x}"\n}}\n'


class Spoilt(FaultsTest):
    @classmethod
    def setUpClass(cls):
        cls.out = new_folder()
        status, stderr = end(start(cls.out, "--steps=4", "--checkpoint-every=4", "--precision=fp32_optim"))
        assert (status, stderr) == (0, ""), stderr
        cls.folder = folder_of(cls.out, 4)
        cls.good = contents(cls.out)
        cls.files = contents(cls.folder)
        cls.text = cls.files["state.json"].decode()

    def resume_spoilt(self):
        return end(subprocess.Popen([BINARY, "--resume", "--steps=5", "--out=" + self.out], cwd=program.WORK, env=ENV,
                                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                    encoding="utf-8", errors="replace"))

    def assertRefused(self, name, status, stderr):
        """One line that names the file."""
        self.assertIn(status, (1, 2), stderr)
        self.assertEqual((stderr[:18], stderr.count("\n"), stderr[-1:]), ("train_gpt: error: ", 1, "\n"), stderr)
        self.assertIn(name, stderr)

    @contextlib.contextmanager
    def spoil(self, name, data, **what):
        """The checkpoint with this in place of a file; None = no file. After it all is as it was."""
        counts["spoilt files"] += 1
        with self.subTest(file=name, **what):
            os.remove(f"{self.folder}/{name}")
            if data is not None:
                with open(f"{self.folder}/{name}", "wb") as f:
                    f.write(data)
            before = contents(self.out)
            try:
                yield before
            finally:
                shutil.rmtree(self.out)
                for file, good in self.good.items():
                    os.makedirs(os.path.dirname(f"{self.out}/{file}"), exist_ok=True)
                    with open(f"{self.out}/{file}", "wb") as f:
                        f.write(good)

    def refused(self, name, data, **what):
        with self.spoil(name, data, **what) as before:
            self.assertRefused(name, *self.resume_spoilt())
            self.assertEqual(contents(self.out), before)

    def survived(self, name, data, state=None, **what):
        """Refused, or taken for what it now is; never a crash. True if refused."""
        with self.spoil(name, data, **what) as before:
            if state is not None:
                with open(self.folder + "/state.json", "w", encoding="utf-8") as f:
                    f.write(state)
                before = contents(self.out)
            status, stderr = self.resume_spoilt()
            if status == 0:
                self.assertEqual(stderr, "")
                counts["of them taken, as their checksums are right"] += 1
                return False
            self.assertRefused("", status, stderr)
            self.assertEqual(contents(self.out), before)
            return True

    def test_it_is_good(self):
        """What the tests below spoil would be taken as it is."""
        self.assertFalse(self.survived("state.json", sealed(self.text).encode()))

    def test_fields(self):
        """Each value of state.json in turn. The checksum tells."""
        for i, at in enumerate(places(json.loads(self.text))):
            change = ["other", "other type", "null", "removed", "huge"][i % 5]
            self.refused("state.json", changed(self.text, at, change).encode(), at=at, change=change)

    def test_fields_under_a_right_checksum(self):
        """The same by one who knows the format. A value of its kind may be taken; one of another type never."""
        cases = [(at, change) for at in places(json.loads(self.text)) if at != ("checksum",) for change in CHANGES]
        cases = cases if KILLS >= 200 else self.random.sample(cases, min(len(cases), 3 * KILLS))
        taken = []
        for at, change in cases:
            text = sealed(changed(self.text, at, change))
            refused = self.survived("state.json", text.encode(), at=at, change=change)
            if change in ["other type", "null"] and not refused and at != ("version",):  # nothing reads that
                taken.append(at)
        self.assertEqual(taken, [])

    def test_flags_of_another_model(self):
        """Refused before one is allocated, as petabytes or as what would compute something else."""
        for flags in [{"heads": "4"}, {"layers": "4096", "channels": "262144"},
                      {"vocab-size": "16777216"}]:
            state = json.loads(self.text)
            state["flags"].update(flags)
            with self.spoil("state.json", sealed(json.dumps(state)).encode(), flags=flags):
                self.assertRefused("its model has 1 layers, 2 heads, 32 channels", *self.resume_spoilt())

    def test_deep(self):
        """A checksum that is right over what a parser that calls itself would not return from."""
        text = '{"a":' + "[" * 7_000_000 + "]" * 7_000_000
        text += f',\n  "checksum": "{zlib.crc32(text.encode()):08x}"\n}}\n'
        self.refused("state.json", text.encode())

    def test_folder_that_cannot_be_read(self):
        """A run must not begin anew because of that."""
        folder = os.path.dirname(self.folder)
        os.rename(folder, self.out + "/elsewhere")
        try:
            with open(folder, "wb"):
                self.assertRefused("checkpoints", *self.resume_spoilt())
        finally:
            os.remove(folder)
            os.rename(self.out + "/elsewhere", folder)

    def test_cut_and_grown(self):
        """Each file cut at every 4 KiB, state.json at every 64 bytes, and with a byte more."""
        for name, data in self.files.items():
            every = 64 if name in ["state.json", "config.json"] else 4096
            for n in sorted({0, 1, 8, len(data) - 1, *range(every, len(data), every)}):
                self.refused(name, data[:n], bytes=n)
            for more in [b"\0", b"x", b" ", data]:
                self.refused(name, data + more, bytes=len(data) + len(more))

    def test_flipped(self):
        for name, data in self.files.items():
            for _ in range(max(8, KILLS // 4)):
                at, bit = self.random.randrange(len(data)), self.random.randrange(8)
                spoilt = bytearray(data)
                spoilt[at] ^= 1 << bit
                self.refused(name, bytes(spoilt), at=at, bit=bit)

    def test_headers_under_right_checksums(self):
        """Bytes of safetensors headers and their lengths changed, and the files cut, with state.json made to fit."""
        for name in ["model.safetensors", "optimizer.rank0000.safetensors"]:
            data = self.files[name]
            header = 8 + int.from_bytes(data[:8], "little")
            for i in range(max(20, KILLS)):
                spoilt = bytearray(data)
                if i % 4 == 0:
                    del spoilt[self.random.choice([4, 8, header // 2, header, header + 1, len(data) // 2, -1]):]
                elif i % 4 == 1:
                    spoilt[self.random.randrange(8)] = self.random.randrange(256)
                else:
                    spoilt[self.random.randrange(8, header)] = self.random.choice(b'0189{}[]",:-e\0\xff')
                state = json.loads(self.text)
                state["files"][name] = {"bytes": len(spoilt), "crc32": f"{zlib.crc32(spoilt):08x}"}
                self.survived(name, bytes(spoilt), state=sealed(json.dumps(state)), case=i)

    def test_other_things_in_place_of_a_file(self):
        for name in self.files:
            for kind, make in [("nothing", lambda p: None), ("folder", os.mkdir), ("pipe", os.mkfifo),
                               ("device", lambda p: os.symlink("/dev/zero", p)),
                               ("broken link", lambda p: os.symlink("nowhere", p))]:
                if name == "state.json" and kind in ["nothing", "broken link"]:
                    continue  # then there is no checkpoint
                with self.spoil(name, None, kind=kind):
                    make(f"{self.folder}/{name}")
                    self.assertRefused(name, *self.resume_spoilt())


if __name__ == "__main__":
    unittest.main()
