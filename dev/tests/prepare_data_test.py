"""scripts/prepare_data.py: what it writes is what train_gpt reads, and the text survives."""
import importlib.util
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import zlib

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "scripts", "prepare_data.py")
sys.dont_write_bytecode = True  # no __pycache__ in the source tree
spec = importlib.util.spec_from_file_location("prepare_data", SCRIPT)
prepare_data = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prepare_data)


def contents(path):
    with open(path, "rb") as f:
        return f.read()


def read_shard(path):
    """The token ids of a shard, its header checked."""
    data = contents(path)
    header = struct.unpack("<256I", data[:1024])
    ids = struct.unpack(f"<{(len(data) - 1024) // 2}H", data[1024:])
    assert header[:4] == (20240520, 1, len(ids), 257), header[:5]
    assert header[4] == zlib.crc32(contents(os.path.join(os.path.dirname(path), "tokenizer.bin")))
    assert not any(header[5:])
    return list(ids)


def documents(folder, split):
    """The texts between the end-of-text ids of a split."""
    ids = []
    for name in sorted(os.listdir(folder)):
        if name.startswith(split + "_"):
            ids += read_shard(os.path.join(folder, name))
    texts = []
    for i in ids:
        if i == 256:
            texts.append(bytearray())
        else:
            texts[-1].append(i)
    return [bytes(t) for t in texts]


class PrepareData(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.dir)
        self.folder = os.path.join(self.dir, "data", "x")

    def run_script(self, *args, status=0, env=None):
        run = subprocess.run([sys.executable, SCRIPT, *args], cwd=self.dir, stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        self.assertEqual(run.returncode, status, run.stderr)
        if status:
            self.assertNotIn("Traceback", run.stderr)
        return run.stdout + run.stderr

    def write(self, name, data):
        with open(os.path.join(self.dir, name), "wb") as f:
            f.write(data)
        return name

    def all_documents(self):
        return documents(self.folder, "train"), documents(self.folder, "val")

    def test_every_byte_value_and_the_tokenizer_file(self):
        text = bytes(range(256)) * 5
        self.write("a.txt", text)
        self.run_script("--name", "x", "a.txt")
        train, val = self.all_documents()
        self.assertEqual((len(train), len(val)), (1, 1))  # the one document is cut
        self.assertEqual(train[0] + val[0], text)
        self.assertEqual(sorted(os.listdir(self.folder)),
                         ["prepared.json", "tokenizer.bin", "train_000.bin", "val_000.bin"])
        data = contents(os.path.join(self.folder, "tokenizer.bin"))
        self.assertEqual(struct.unpack("<4I", data[:16]), (20240328, 2, 257, 256))
        at, tokens = 1024, []
        while at < len(data):
            tokens.append(data[at + 1:at + 1 + data[at]])
            at += 1 + data[at]
        self.assertEqual(tokens, [bytes([b]) for b in range(256)] + [b"<|endoftext|>"])

    def test_documents_are_split_and_kept_whole(self):
        texts = [b"document %d\n" % k + b"text " * (k % 50) for k in range(2000)]
        self.write("a.txt", b"<|endoftext|>".join(texts[:1200]) + b"<|endoftext|>")
        self.write("b.txt", b"<|endoftext|>" + b"<|endoftext|>\n<|endoftext|>".join(texts[1200:]))
        self.run_script("--name", "x", "a.txt", "b.txt")
        train, val = self.all_documents()
        self.assertEqual(sorted(train + val), sorted(texts))
        self.assertTrue(0.04 < len(val) / 2000 < 0.08, len(val))  # 0.06 +- 4 standard deviations
        first = set(val)
        self.run_script("--name", "x", "b.txt", "a.txt")  # the split depends on the documents, not on their order
        self.assertEqual(set(self.all_documents()[1]), first)

    def test_blank_lines(self):
        self.write("a.txt", b"one\ntwo\n \t\r\n\nthree\n\nfour<|endoftext|>five\r\n\r\nsix\n\n\n")
        self.run_script("--name", "x", "--split=blank", "a.txt")
        train, val = self.all_documents()
        self.assertEqual(sorted(train + val), sorted([b"one\ntwo", b"three", b"four", b"five", b"six"]))

    def test_separators_across_the_pieces_that_are_read(self):
        rng = random.Random(5)
        for split_blank in (False, True):
            for _ in range(300):
                parts = [b"a", b"<", b"<|end", b"<|endoftext|>", b"\n", b"\n\n", b" \n", b"\r\n", b"b\n"]
                text = b"".join(rng.choice(parts) for _ in range(30))
                path = os.path.join(self.dir, self.write("a.txt", text))
                results = []
                for chunk in (1, 2, 3, 7, 1 << 20):
                    prepare_data.CHUNK = chunk
                    source = prepare_data.Files([path], split_blank)
                    results.append([(head, b"".join(body)) for head, body in prepare_data.documents(source)])
                for other in results[:-1]:
                    self.assertEqual(other, results[-1], text)
                if not split_blank:
                    whole = [t for t in text.split(b"<|endoftext|>") if t.strip()]
                    self.assertEqual([t for _, t in results[-1]], whole)
        prepare_data.CHUNK = 1 << 20

    def test_few_documents_still_give_two_splits(self):
        for n in (2, 3):
            names = [self.write(f"{k}.txt", b"file %d" % k) for k in range(n)]
            self.run_script("--name", "x", *names)
            train, val = self.all_documents()
            self.assertEqual(sorted(train + val), [b"file %d" % k for k in range(n)])
            self.assertEqual(len(val), 1)
        self.run_script("--name", "x", "--val-fraction=0", *names)
        self.assertEqual((len(self.all_documents()[0]), self.all_documents()[1]), (3, []))
        self.assertFalse(os.path.exists(os.path.join(self.folder, "val_000.bin")))  # the earlier one is gone

    def test_the_only_document_is_cut_at_the_end_of_a_line(self):
        self.write("space.txt", b" \n" * 1000)
        text = b"".join(b"line %d\n" % k for k in range(1000))
        self.write("a.txt", text)
        self.run_script("--name", "x", "space.txt", "a.txt")
        train, val = self.all_documents()
        self.assertEqual(train[0] + val[0], text)
        self.assertTrue(val[0].startswith(b"line "))
        self.assertAlmostEqual(len(val[0]) / len(text), 0.06, delta=0.01)

    def test_shards(self):
        self.write("a.txt", b"".join(b"%d " % k for k in range(1000)))
        self.run_script("--name", "x", "--val-fraction=0", "a.txt")
        whole = self.all_documents()
        self.run_script("--name", "x", "--val-fraction=0", "--shard-tokens=1000", "a.txt")
        self.assertEqual(self.all_documents(), whole)
        sizes = [len(read_shard(os.path.join(self.folder, f"train_{k:03d}.bin"))) for k in range(4)]
        self.assertEqual(sizes, [1000, 1000, 1000, 891])
        self.run_script("--name", "x", "--val-fraction=0", "--shard-tokens=2000", "a.txt")
        self.assertEqual(len([n for n in os.listdir(self.folder) if n.startswith("train_")]), 2)

    def test_up_to_date(self):
        self.write("a.txt", b"some text" * 100)
        self.run_script("--name", "x", "a.txt")
        shard = os.path.join(self.folder, "train_000.bin")
        before = os.stat(shard).st_mtime_ns
        self.assertIn("up to date", self.run_script("--name", "x", "a.txt"))
        self.assertEqual(os.stat(shard).st_mtime_ns, before)
        self.assertNotIn("up to date", self.run_script("--name", "x", "--force", "a.txt"))
        self.assertNotIn("up to date", self.run_script("--name", "x", "--shard-tokens=99", "a.txt"))
        os.truncate(shard, 10)
        self.assertNotIn("up to date", self.run_script("--name", "x", "--shard-tokens=99", "a.txt"))
        self.write("a.txt", b"other text" * 100)
        self.assertNotIn("up to date", self.run_script("--name", "x", "--shard-tokens=99", "a.txt"))

    def test_mistakes(self):
        self.write("a.txt", b"text")
        self.write("empty.txt", b" \n\n")
        for args, status, part in [
                (["a.txt"], 2, "--name"), (["--name", "../y", "a.txt"], 2, "--name: '../y'"),
                (["--name", "x", "none.txt"], 1, "none.txt: no such file"), (["--name", "x", "."], 1, ".: not a file"),
                (["--name", "x", "empty.txt"], 1, "no text"), (["kjv", "a.txt"], 2, "kjv goes alone"),
                (["--name", "x", "--shard-tokens=0", "a.txt"], 2, "--shard-tokens"),
                (["--name", "x", "--val-fraction=nan", "a.txt"], 2, "--val-fraction"),
                (["--name", "x", "--data-dir", "a.txt", "a.txt"], 1, "a.txt")]:
            self.assertIn(part, self.run_script(*args, status=status))
        self.assertEqual(os.listdir(self.folder) if os.path.exists(self.folder) else [], [])

    def test_without_bible_kjv(self):
        if os.path.exists(os.path.join(prepare_data.REPOSITORY, ".deps", "usr", "bin", "bible")):
            self.skipTest("bible-kjv is in .deps")
        env = dict(os.environ, PATH=self.dir)
        message = self.run_script("kjv", status=1, env=env)
        self.assertIn("bible-kjv", message)
        self.assertIn("--name", message)
        other = os.path.join(self.dir, self.write("bible", b"#!/bin/sh\necho Ge1:1 In the beginning\n"))
        os.chmod(other, 0o755)
        self.assertIn("gave 1 verses", self.run_script("kjv", status=1, env=env))
        self.assertFalse(os.path.exists(os.path.join(self.dir, "data")))

    @unittest.skipUnless(shutil.which("bible"), "bible-kjv is not installed")
    def test_kjv(self):
        self.run_script("kjv")
        folder = os.path.join(self.dir, "data", "kjv")
        train, val = documents(folder, "train"), documents(folder, "val")
        self.assertEqual(len(train) + len(val), 1189)  # chapters
        self.assertEqual(sum(t.count(b"\n") for t in train + val), 31102)  # verses
        self.assertTrue(40 < len(val) < 110, len(val))
        self.assertTrue(any(t.startswith(b"In the beginning God created the heaven and the earth.\n")
                            for t in train + val))
        self.assertNotRegex(b"".join(train + val), rb"\d:\d")  # no reference is left

    def test_a_killed_run_leaves_nothing(self):
        self.write("a.txt", b"some text")
        self.run_script("--name", "x", "a.txt")
        before = sorted(os.listdir(self.folder))
        with open(os.path.join(self.dir, "big.txt"), "wb") as f:
            f.truncate(1 << 40)  # a sparse file: more than can be written
        run = subprocess.Popen([sys.executable, SCRIPT, "--name", "x", "big.txt"], cwd=self.dir,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 20
        while not any(n.endswith(".tmp") for n in os.listdir(self.folder)) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.assertIn("another prepare_data.py", self.run_script("--name", "x", "--force", "a.txt", status=1))
        run.send_signal(signal.SIGTERM)
        self.assertEqual(run.wait(), 143, run.stderr.read())
        run.stderr.close()
        self.assertEqual(sorted(os.listdir(self.folder)), before)
        self.assertIn("up to date", self.run_script("--name", "x", "a.txt"))


if __name__ == "__main__":
    unittest.main()
