#!/usr/bin/env python3
"""Makes token shards for train_gpt from text. Standard library only.

  python3 scripts/prepare_data.py kjv                           the King James Bible (Debian package bible-kjv)
  python3 scripts/prepare_data.py --name NAME a.txt b.txt ...   your own text

writes data/NAME/train_000.bin ..., val_000.bin ... and tokenizer.bin.

Tokens are bytes: ids 0 to 255, and 256 for end-of-text, which stands before each document. A document is a chapter of
the Bible, or a text file; a file that holds <|endoftext|> is cut there, and with --split=blank at blank lines too.
Whole documents go to the validation split, about --val-fraction of them: those whose first 4 KiB have a low hash. So
the split does not depend on the order of the files, and equal documents never end up on both sides. Where that would
leave a split empty, the last document is the validation split; the only document is cut near its end.

Shards are in llm.c's format (uint16); word 3 of the header is the vocabulary size and word 4 the CRC-32 of
tokenizer.bin, which llm.c ignores. Nothing changes in data/NAME before all new files are complete.
"""
import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib

MAGIC, VERSION = 20240520, 1
TOKENIZER_MAGIC, TOKENIZER_VERSION = 20240328, 2
EOT, VOCAB = 256, 257
EOT_TEXT = b"<|endoftext|>"
FORMAT = 1  # of what this script writes; raise it to make everything anew
CHUNK = 1 << 20  # bytes read at a time
HEAD = 4096  # bytes of a document that decide its split
VERSES = 31102
REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Problem(Exception):
    """What the user did or the machine has: one line, no traceback."""


def tokenizer_file():
    """llm.c's tokenizer format: each byte is a token, then the end-of-text."""
    header = struct.pack("<256I", TOKENIZER_MAGIC, TOKENIZER_VERSION, VOCAB, EOT, *[0] * 252)
    tokens = [bytes([b]) for b in range(256)] + [EOT_TEXT]
    return header + b"".join(bytes([len(t)]) + t for t in tokens)


TOKENIZER = tokenizer_file()
TOKENIZER_CRC = zlib.crc32(TOKENIZER)


# ---------------------------------------------------------------------------------------------------------------------
# Sources: each yields the pieces of its documents, (start of a document?, bytes)

def find_bible():
    """The command line of bible-kjv: the system's, or the one that scripts/setup.sh --prefix=.deps unpacked."""
    command = shutil.which("bible")
    if command:
        return [command]
    local = os.path.join(REPOSITORY, ".deps", "usr")
    if os.path.exists(os.path.join(local, "bin", "bible")):
        return [os.path.join(local, "bin", "bible"), "-p", os.path.join(local, "lib")]
    raise Problem("the command 'bible' is not installed: scripts/setup.sh installs it (Debian and Ubuntu package "
                  "bible-kjv); elsewhere use your own text: python3 scripts/prepare_data.py --name mytext a.txt b.txt")


def kjv_chapters():
    """The text of the Bible, one document a chapter, one line a verse, without the references."""
    command = find_bible() + ["-f", "gen1:1-rev22:21"]
    try:
        run = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as e:
        raise Problem(f"{command[0]} cannot be run: {e.strerror}")
    chapters, last = [], None
    verses = 0
    for line in run.stdout.split(b"\n"):
        match = re.match(rb"(\d?[A-Za-z]+)(\d+):(\d+) (.*)", line)  # e.g. "1Sm17:4 And there went out a champion"
        if not match:
            continue
        if match.group(1, 2) != last:
            last = match.group(1, 2)
            chapters.append([])
        chapters[-1].append(match.group(4).strip() + b"\n")
        verses += 1
    if run.returncode != 0 or verses != VERSES:
        raise Problem(f"{' '.join(command)} gave {verses} verses (exit status {run.returncode}), expected {VERSES}: "
                      "is it the command of the Debian package bible-kjv?")
    return [b"".join(chapter) for chapter in chapters]


class Kjv:
    def __init__(self):
        self.chapters = None

    def identity(self):
        return ["kjv"]  # the same text in every release of the package

    def size(self):
        self.chapters = self.chapters or kjv_chapters()
        return sum(map(len, self.chapters))

    def pieces(self):
        for chapter in self.chapters:
            yield True, chapter


class Files:
    """Text files, read in pieces: they may be larger than the memory."""

    def __init__(self, paths, split_blank):
        self.paths = paths
        self.separator = re.compile(rb"<\|endoftext\|>|\r?\n[ \t\r]*\n\s*" if split_blank else rb"<\|endoftext\|>")
        self.split_blank = split_blank
        for path in paths:
            if not os.path.exists(path):
                raise Problem(f"{path}: no such file")
            if not os.path.isfile(path):
                raise Problem(f"{path}: not a file; give text files")
            if not os.access(path, os.R_OK):
                raise Problem(f"{path}: cannot be read: permission denied")

    def identity(self):
        stats = [os.stat(path) for path in self.paths]
        return [self.split_blank] + [[p, s.st_size, s.st_mtime_ns] for p, s in zip(self.paths, stats)]

    def size(self):
        return sum(os.path.getsize(path) for path in self.paths)

    def pieces(self):
        for path in self.paths:
            yield from self.pieces_of(path)

    def unfinished(self, text):
        """How many bytes at the end may be part of a separator that goes on in what has not been read yet."""
        n = next((n for n in range(len(EOT_TEXT) - 1, 0, -1) if text.endswith(EOT_TEXT[:n])), 0)
        return max(n, len(text) - len(text.rstrip())) if self.split_blank else n

    def pieces_of(self, path):
        new, rest = True, b""
        with open(path, "rb") as f:
            while True:
                chunk = f.read(CHUNK)
                text, at = rest + chunk, 0
                end = len(text) - (self.unfinished(text) if chunk else 0)
                for match in self.separator.finditer(text, 0, end):
                    if match.start() > at:
                        yield new, text[at:match.start()]
                    new, at = True, match.end()
                if end > at:
                    yield new, text[at:end]
                    new = False
                rest = text[max(at, end):]
                if not chunk:
                    return


def documents(source):
    """The source's documents as (head, pieces): head is the first HEAD bytes, pieces yields all bytes once.
    Documents of nothing but white space are left out."""
    pieces = source.pieces()
    item = next(pieces, None)
    while item:
        head, more = item[1], next(pieces, None)
        while more and not more[0] and (len(head) < HEAD or head.isspace()):
            head += more[1]
            more = next(pieces, None)

        following = [more]

        def body():
            yield head
            while following[0] and not following[0][0]:
                yield following[0][1]
                following[0] = next(pieces, None)

        if not head.isspace():
            yield head[:HEAD], body()
        while following[0] and not following[0][0]:
            following[0] = next(pieces, None)
        item = following[0]


# ---------------------------------------------------------------------------------------------------------------------
# Shards

class ShardWriter:
    """Writes one split's tokens into files of at most shard_tokens, under temporary names until publish()."""

    def __init__(self, folder, split, shard_tokens):
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.names, self.file, self.room = [], None, 0
        self.documents = self.tokens = 0

    def start_document(self):
        self.documents += 1
        self.write(struct.pack("<H", EOT))

    def write_text(self, text):
        wide = bytearray(2 * len(text))  # a byte b is the uint16 b, little endian
        wide[0::2] = text
        self.write(wide)

    def write(self, tokens):
        view = memoryview(tokens)
        while len(view) > 0:
            if self.room == 0:
                self.close()
                self.names.append(f"{self.split}_{len(self.names):03d}.bin")
                self.file = open(os.path.join(self.folder, self.names[-1] + ".tmp"), "wb")
                self.file.write(bytes(1024))
                self.room = self.shard_tokens
            n = min(len(view) // 2, self.room)
            self.file.write(view[:2 * n])
            view = view[2 * n:]
            self.room -= n
            self.tokens += n

    def close(self):
        """Completes the file being written: its header, and the bytes on the disk before it gets its name."""
        if not self.file:
            return
        header = struct.pack("<256I", MAGIC, VERSION, self.shard_tokens - self.room, VOCAB, TOKENIZER_CRC, *[0] * 251)
        self.file.seek(0)
        self.file.write(header)
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.file = None


def write_whole(folder, name, data):
    with open(os.path.join(folder, name + ".tmp"), "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def remove_temporaries(folder):
    for name in os.listdir(folder):
        if re.fullmatch(r"(train|val)_\d+\.bin\.tmp|(tokenizer\.bin|prepared\.json)\.tmp", name):
            os.remove(os.path.join(folder, name))


def publish(folder, names):
    """Gives the files their names, and removes shards of an earlier preparation."""
    for name in os.listdir(folder):
        if name == "prepared.json" or (re.fullmatch(r"(train|val)_\d+\.bin", name) and name not in names):
            os.remove(os.path.join(folder, name))
    for name in names:  # prepared.json is the last: with it, the set is complete
        os.replace(os.path.join(folder, name + ".tmp"), os.path.join(folder, name))
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


# ---------------------------------------------------------------------------------------------------------------------
# Progress

class Progress:
    """One line that is rewritten on a terminal; elsewhere a line every 10 seconds."""

    def __init__(self, total):
        self.total, self.done, self.start, self.tty = total, 0, time.monotonic(), sys.stderr.isatty()
        self.next = self.start + (0.2 if self.tty else 10)

    def add(self, n):
        self.done += n
        now = time.monotonic()
        if now < self.next:
            return
        self.next = now + (0.2 if self.tty else 10)
        rate = self.done / (now - self.start)
        left = max(0, self.total - self.done) / rate
        percent = min(100, 100 * self.done / max(1, self.total))
        line = (f"{self.done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB, {percent:.0f} %, {rate / 1e6:,.0f} MB/s, "
                f"{int(left) // 60}:{int(left) % 60:02d} left")
        sys.stderr.write(f"\r{line:<78}" if self.tty else line + "\n")
        sys.stderr.flush()

    def end(self):
        if self.tty:
            sys.stderr.write("\r" + " " * 78 + "\r")
            sys.stderr.flush()


# ---------------------------------------------------------------------------------------------------------------------
# Preparation

def in_validation(head, fraction):
    return int.from_bytes(hashlib.sha256(head).digest()[:8], "little") < fraction * 2 ** 64


def write_splits(source, folder, args, rule):
    """Writes the shards of both splits under temporary names. rule: how a document finds its split: ("hash", 0),
    ("document", i): document i is the validation split, ("cut", n): after n bytes of the one document."""
    kind, number = rule
    writers = {split: ShardWriter(folder, split, args.shard_tokens) for split in ("train", "val")}
    progress = Progress(source.size())
    for index, (head, body) in enumerate(documents(source)):
        if kind == "hash":
            val = in_validation(head, args.val_fraction)
        else:
            val = kind == "document" and index == number
        writer = writers["val" if val else "train"]
        writer.start_document()
        written = 0
        for text in body:
            if kind == "cut" and written <= number < written + len(text):
                at = number - written
                at = text.find(b"\n", at, min(at + 1000, len(text) - 1)) + 1 or at  # at a line's end, if one is near
                writer.write_text(text[:at])
                writer = writers["val"]
                writer.start_document()
                writer.write_text(text[at:])
            else:
                writer.write_text(text)
            written += len(text)
            progress.add(len(text))
    progress.end()
    for writer in writers.values():
        writer.close()
    return writers


def fill_splits(source, folder, args):
    writers = write_splits(source, folder, args, ("hash", 0))
    train, val = writers["train"].documents, writers["val"].documents
    if train + val == 0:
        raise Problem("no text: the source is empty or white space only")
    if args.val_fraction > 0 and (train == 0 or val == 0):
        remove_temporaries(folder)
        length = writers["train"].tokens + writers["val"].tokens - 1  # of the document, if it is the only one
        rule = ("document", train + val - 1) if train + val > 1 else ("cut", int(length * (1 - args.val_fraction)))
        writers = write_splits(source, folder, args, rule)
    return writers


def up_to_date(folder, identity):
    """What prepared.json says of an earlier run, if that was the same and its files are still there, else None."""
    try:
        with open(os.path.join(folder, "prepared.json"), encoding="utf-8") as f:
            done = json.load(f)
        sizes = {name: os.path.getsize(os.path.join(folder, name)) for name in done["files"]}
        return done if done["made_from"] == identity and sizes == done["files"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def report(folder, done, prefix):
    print(f"{prefix}{folder}: bytes as tokens, vocabulary {VOCAB}")
    for split in ("train", "val"):
        s = done[split]
        names = [name for name in done["files"] if name.startswith(split + "_")]
        files = "no file" if not names else names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        print(f"  {split:<5} {s['documents']:>9,} documents {s['tokens']:>14,} tokens  {files}")


def prepare(args):
    source = Kjv() if args.name_of_source == "kjv" else Files(args.sources, args.split == "blank")
    folder = os.path.join(args.data_dir, args.name)
    # Through JSON and back, so that it compares equal to what was read.
    identity = json.loads(json.dumps([FORMAT, args.shard_tokens, args.val_fraction, source.identity()]))
    done = None if args.force else up_to_date(folder, identity)
    if done:
        report(folder, done, "up to date: ")
        return
    source.size()  # the text is there, before anything is made
    os.makedirs(folder, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Problem(f"{folder}: another prepare_data.py is writing there")
        try:
            writers = fill_splits(source, folder, args)
            write_whole(folder, "tokenizer.bin", TOKENIZER)
            names = writers["train"].names + writers["val"].names + ["tokenizer.bin"]
            done = {"made_from": identity,
                    "files": {name: os.path.getsize(os.path.join(folder, name + ".tmp")) for name in names}}
            for split, writer in writers.items():
                done[split] = {"documents": writer.documents, "tokens": writer.tokens}
            write_whole(folder, "prepared.json", json.dumps(done, indent=1).encode())
            publish(folder, names + ["prepared.json"])
        finally:
            remove_temporaries(folder)  # those of an earlier run that was killed, too
    finally:
        os.close(lock)
    report(folder, done, "")
    val = f" --val-data='{folder}/val_*.bin'" if writers["val"].tokens else ""
    print(f"next: ./train_gpt --train-data='{folder}/train_*.bin'{val}")


def positive(text):
    if not re.fullmatch(r"\d+", text) or not 1 <= int(text) < 2 ** 31:
        raise argparse.ArgumentTypeError(f"'{text}', expected a whole number from 1 to 2147483647")
    return int(text)


def fraction(text):
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value <= 0.5:
        raise argparse.ArgumentTypeError(f"'{text}', expected a number from 0 to 0.5")
    return value


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="kjv, or text files")
    parser.add_argument("--name", help="folder below the data folder; needed for text files")
    parser.add_argument("--data-dir", default="data", help="default: data, where train_gpt looks")
    parser.add_argument("--shard-tokens", type=positive, default=100_000_000, help="at most, a file (default: 1e8)")
    parser.add_argument("--val-fraction", type=fraction, default=0.06,
                        help="of the documents, about; 0 = no validation split (default: 0.06)")
    parser.add_argument("--split", choices=["file", "blank"], default="file",
                        help="a document is a file, or a part between blank lines (default: file)")
    parser.add_argument("--force", action="store_true", help="even if the data is up to date")
    args = parser.parse_args()
    args.name_of_source = "kjv" if args.sources == ["kjv"] else "files"
    if args.name_of_source == "files" and "kjv" in args.sources:
        parser.error("kjv goes alone; a file of that name is ./kjv")
    if args.name is None and args.name_of_source == "kjv":
        args.name = "kjv"
    if args.name is None:
        parser.error("text files need --name, the folder below data/ to write to")
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", args.name):
        parser.error(f"--name: '{args.name}', expected letters, digits, '.', '_' and '-'")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary files are removed
    try:
        prepare(args)
    except Problem as e:
        sys.exit(f"prepare_data.py: error: {e}")
    except OSError as e:
        sys.exit(f"prepare_data.py: error: {e.filename or args.data_dir}: {e.strerror}")
    except KeyboardInterrupt:
        sys.exit("\nprepare_data.py: interrupted; nothing was changed")


if __name__ == "__main__":
    main()
