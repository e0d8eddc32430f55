#!/usr/bin/env python3
"""Shows, verifies and converts checkpoints of train_gpt.

  scripts/checkpoint.py show FOLDER [--stats]          what it holds; with --stats also the size of its numbers
  scripts/checkpoint.py verify FOLDER                  whether all is as it was written; names the first that is not
  scripts/checkpoint.py convert SOURCE DESTINATION --precision=P [--mcf=M]

FOLDER and SOURCE: a checkpoint (.../step_00001000), or a run folder: then its newest complete checkpoint. DESTINATION:
the folder of the new checkpoint, which must not be there; a run goes on from it where it is RUN/checkpoints/step_N.

convert does what ./train_gpt --resume --precision=P does, to the bit: weights and moments go through their full values
in double, stored as the nearest that P can hold; what both precisions store alike is copied. It says what was rounded.

convert and --stats need NumPy, the rest the standard library only. docs/reliability.md has the format.
"""
import argparse
import contextlib
import json
import math
import os
import re
import shutil
import signal
import stat
import struct
import subprocess
import sys
import zlib

FORMAT = "train_gpt checkpoint 1"
BYTES = {"BF16": 2, "F32": 4, "F64": 8, "I16": 2, "I8": 1}
PIECE = 1 << 20  # elements or bytes at a time
# The states of each precision with their types, in the order of mcf/strategies.h. The first belongs to the weight
# where it is not m.
PRECISIONS = {
    "bf16": {"m": "BF16", "v": "BF16"},
    "bf16_kahan": {"theta.lo": "BF16", "m": "BF16", "v": "BF16"},
    "bf16_sr": {"m": "BF16", "v": "BF16"},
    "collage_light": {"theta.lo": "BF16", "m": "BF16", "v": "BF16"},
    "collage_plus": {"theta.lo": "BF16", "m": "BF16", "v": "BF16", "v.lo": "BF16"},
    "fp32_optim": {"m": "F32", "v": "F32"},
    "fp32_master": {"master": "F32", "m": "F32", "v": "F32"},
    "bf16_rem16": {"theta.rem": "I16", "m": "BF16", "v": "BF16"},
    "bf16_int8": {"theta.rho": "I8", "m": "BF16", "v": "BF16"},
    "fp32": {"m": "F32", "v": "F32"},
}
MODES = ("strict", "fused", "as-released")
SHADOW = ("shadow.start", "shadow.weight", "shadow.m", "shadow.v")


class Problem(Exception):
    """What the user did, a file or the machine has: one line, no traceback."""


def shown(text, most=80):
    """Text from outside for a message: in quotes, without control characters, at most so many of it."""
    text = str(text)
    return "'" + "".join(c if " " <= c <= "~" else "?" for c in text[:most]) + ("...'" if len(text) > most else "'")


def theta_type(precision):
    return "F32" if precision == "fp32" else "BF16"


def tensor_name(parameter, state):
    """Of a parameter's state: wte.weight.lo, wte.weight.m, ..."""
    return parameter + "." + (state[len("theta."):] if state.startswith("theta.") else state)


# ---------------------------------------------------------------------------------------------------------------------
# Reading what may be hostile: every size is checked before it is used, and no name in a file becomes a path.

class File:
    """A regular file, open for reading."""

    def __init__(self, folder, name):
        self.name, self.path = name, os.path.join(folder, name)
        try:
            self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not block
        except OSError as e:
            raise Problem(f"{self.path}: {e.strerror}")
        status = os.fstat(self.fd)
        self.bytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            os.close(self.fd)
            raise Problem(f"{self.path}: not a file")

    def close(self):
        os.close(self.fd)

    def read(self, begin, n):
        """These bytes, all of them."""
        pieces = []
        while n > 0:
            pieces.append(os.pread(self.fd, n, begin))  # at most 2 GiB at once
            if not pieces[-1]:
                raise Problem(f"{self.path}: ends at byte {begin}; it was cut while it was read")
            begin, n = begin + len(pieces[-1]), n - len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def crc32(self):
        return crc32_of(self.fd)


def crc32_of(fd):
    """CRC-32 of all that a file has, in 8 hex digits."""
    crc, at = 0, 0
    while piece := os.pread(fd, PIECE, at):
        crc, at = zlib.crc32(piece, crc), at + len(piece)
    return f"{crc:08x}"


def parse_json(data, path):
    """The value of JSON text by the standard: no NaN, no name twice, no number beyond 64 bits."""
    def refuse(word):
        raise ValueError(f"it holds {word}")

    def whole(digits):
        return int(digits) if len(digits) <= 20 else refuse("a number of more than 20 digits")

    def real(digits):
        return float(digits) if math.isfinite(float(digits)) else refuse("a number beyond double")

    def unique(pairs):
        names = {}
        for name, value in pairs:
            if name in names:
                refuse(f"{shown(name)} twice")
            names[name] = value
        return names

    try:
        value = json.loads(data.decode("utf-8"), parse_int=whole, parse_float=real, parse_constant=refuse,
                           object_pairs_hook=unique)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # half a surrogate pair is no text
        return value
    except (ValueError, RecursionError) as e:
        problem = "it is nested too deep" if isinstance(e, RecursionError) else e
        raise Problem(f"{path}: not JSON as train_gpt writes it: {problem}")


def is_whole(x, most=2**63 - 1, least=0):
    return isinstance(x, int) and not isinstance(x, bool) and least <= x <= most


class Tensor:
    """dtype, shape, and where in the file its bytes are."""

    def __init__(self, dtype, shape, begin):
        self.dtype, self.shape, self.begin = dtype, tuple(shape), begin
        self.elements = math.prod(shape)
        self.bytes = self.elements * BYTES[dtype]


def read_tensors(file, expected):
    """name -> Tensor of a .safetensors file, in the order of their bytes. expected: how many there are at most."""
    where = file.path
    if file.bytes < 8:
        raise Problem(f"{where}: {file.bytes} bytes, expected a safetensors file, which has more than 8")
    (length,) = struct.unpack("<Q", file.read(0, 8))
    most = min(file.bytes - 8, 8192 + 256 * expected)
    if length > most:
        raise Problem(f"{where}: states a header of {length} bytes, expected at most {most} for its tensors")
    text = file.read(8, length)
    if not text.startswith(b"{"):
        raise Problem(f"{where}: its header does not begin with {{: not a safetensors file")
    header = parse_json(text, where)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise Problem(f"{where}: __metadata__ is not an object of texts")
    places, data = [], file.bytes - 8 - length
    for name, entry in header.items():
        who = f"{where}: tensor {shown(name)}"
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise Problem(f"{who}: expected dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in BYTES:
            raise Problem(f"{who}: dtype is {shown(dtype)}, expected one of {', '.join(BYTES)}")
        if not isinstance(shape, list) or len(shape) > 8 or not all(is_whole(n) for n in shape):
            raise Problem(f"{who}: shape is {shown(shape)}, expected at most 8 sizes")
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(is_whole(x) for x in offsets):
            raise Problem(f"{who}: data_offsets are {shown(offsets)}, expected where it begins and ends")
        begin, end = offsets
        if not begin <= end <= data:
            raise Problem(f"{who}: data_offsets are {shown(offsets)}, but the file has {data} bytes of data")
        tensor = Tensor(dtype, shape, 8 + length + begin)
        if end - begin != tensor.bytes:
            raise Problem(f"{who}: {end - begin} bytes, expected {tensor.bytes} for {dtype} of shape {shown(shape)}")
        places.append((begin, end, name, tensor))
    places.sort(key=lambda place: place[:2])
    at = 0
    for begin, end, name, _ in places:
        if begin != at:
            raise Problem(f"{where}: tensor {shown(name)} begins at {begin}, expected {at}: "
                          f"{'it overlaps with the one before' if begin < at else 'there is a hole before it'}")
        at = end
    if at != data:
        raise Problem(f"{where}: {data} bytes of data, expected the {at} of its tensors")
    return {name: tensor for _, _, name, tensor in places}


# ---------------------------------------------------------------------------------------------------------------------
# A checkpoint.

class Parameter:
    """name; shape in the program's layout: (out, in); conv1d: the model's file has it as (in, out)."""

    def __init__(self, name, shape, conv1d=False):
        self.name, self.shape, self.conv1d = name, shape, conv1d
        self.elements = math.prod(shape)
        self.file_shape = shape[::-1] if conv1d else shape


def parameters(L, C, max_T, V):
    """Of GPT-2, in the program's order."""
    yield Parameter("wte.weight", (V, C))
    yield Parameter("wpe.weight", (max_T, C))

    def norm(name):
        return [Parameter(name + ".weight", (C,)), Parameter(name + ".bias", (C,))]

    def linear(name, out, into):
        return [Parameter(name + ".weight", (out, into), conv1d=True), Parameter(name + ".bias", (out,))]

    for layer in range(L):
        h = f"h.{layer}."
        yield from norm(h + "ln_1")
        yield from linear(h + "attn.c_attn", 3 * C, C) + linear(h + "attn.c_proj", C, C)
        yield from norm(h + "ln_2")
        yield from linear(h + "mlp.c_fc", 4 * C, C) + linear(h + "mlp.c_proj", C, 4 * C)
    yield from norm("ln_f")


def newest(folder):
    """The checkpoint that is meant: the folder itself, or the newest complete one of a run."""
    if os.path.lexists(os.path.join(folder, "state.json")):
        return folder
    inside = os.path.join(folder, "checkpoints")
    inside = inside if os.path.isdir(inside) else folder
    complete = [name for name in os.listdir(inside) if re.fullmatch(r"step_[0-9]{8,15}", name) and
                os.path.lexists(os.path.join(inside, name, "state.json"))]
    if not complete:
        raise Problem(f"{folder}: found no complete checkpoint, expected a folder with state.json, or a run folder "
                      f"with checkpoints/step_N")
    return os.path.join(inside, max(complete, key=lambda name: int(name[5:])))


class Checkpoint:
    """A checkpoint whose files are open, and of the right size, names and structure.

    with_bytes: also the CRC-32 of each file is what state.json has. Raises Problem that names the first that is not.
    """

    def __init__(self, folder, with_bytes):
        self.folder, self.state_path = folder, os.path.join(folder, "state.json")
        with contextlib.ExitStack() as opened:
            self.read_state(opened)
            self.open_files(opened, with_bytes)
            self.read_model()
            self.read_optimizer()
            self.opened = opened.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.opened.close()

    # --- state.json

    def read_state(self, opened):
        file = opened.enter_context(contextlib.closing(File(self.folder, "state.json")))
        if file.bytes > 16 << 20:
            raise Problem(f"{file.path}: {file.bytes} bytes, expected a few thousand")
        data = file.read(0, file.bytes)
        end = max(data.rfind(b',\n  "checksum"'), 0)
        stated = re.fullmatch(rb',\n  "checksum": "([0-9a-f]{8})"\n}\n', data[end:])
        if not stated:
            raise Problem(f"{file.path}: does not end with its checksum: it is not as it was written")
        if zlib.crc32(data[:end]) != int(stated[1], 16):
            raise Problem(f"{file.path}: its checksum is {zlib.crc32(data[:end]):08x}, expected {stated[1].decode()}: "
                          f"it is not as it was written")
        self.state = parse_json(data, file.path)
        if not isinstance(self.state, dict):
            raise Problem(f"{file.path}: not a JSON object")
        count = 2**40
        self.field("format", f"'{FORMAT}'; was it written by another version?", lambda x: x == FORMAT)
        self.field("version", "text", lambda x: isinstance(x, str))
        self.step = self.field("step", f"a whole number up to {count}", lambda x: is_whole(x, count))
        up_to_step = f"a whole number up to 'step', {self.step}"
        self.updates = self.field("updates", up_to_step, lambda x: is_whole(x, self.step))
        self.field("bad_steps_in_a_row", up_to_step, lambda x: is_whole(x, self.step))
        self.precision = self.field("precision", "one of " + ", ".join(PRECISIONS),
                                    lambda x: isinstance(x, str) and x in PRECISIONS)
        self.mcf = self.field("mcf", "one of " + ", ".join(MODES), lambda x: isinstance(x, str) and x in MODES)
        self.field("data", "what the training data is known by", lambda x: isinstance(x, (str, dict)))
        self.flags = self.field("flags", "an object of texts", lambda x: isinstance(x, dict) and all(
            isinstance(text, str) for text in x.values()))
        if "spikes" in self.state:
            self.field("spikes", "an object of lists of numbers", lambda x: isinstance(x, dict) and all(
                isinstance(xs, list) and all(isinstance(y, (int, float)) and not isinstance(y, bool) for y in xs)
                for xs in x.values()))
        self.field("files", "an object with 'bytes' and 'crc32' of each file", lambda x: isinstance(x, dict) and all(
            isinstance(f, dict) and set(f) == {"bytes", "crc32"} and is_whole(f["bytes"]) and
            isinstance(f["crc32"], str) and re.fullmatch("[0-9a-f]{8}", f["crc32"]) for f in x.values()))
        name = os.path.basename(os.path.abspath(self.folder))
        if re.fullmatch(r"step_[0-9]{8,15}", name) and int(name[5:]) != self.step:
            raise Problem(f"{file.path}: it is of step {self.step}, its folder of step {int(name[5:])}")
        for flag, choices in [("precision", PRECISIONS), ("mcf", MODES)]:
            if self.flags.get(flag, self.state[flag]) not in choices:
                raise Problem(f"{file.path}: the flag {flag} is {shown(self.flags[flag])}, expected one of "
                              f"{', '.join(choices)}")
        self.lockstep = list(filter(None, self.flags.get("lockstep", "").split(",")))
        for i, name in enumerate(self.lockstep):
            precision, _, mode = name.partition(":")
            if precision not in PRECISIONS or mode not in ("", *MODES) or name in self.lockstep[:i]:
                raise Problem(f"{file.path}: the flag lockstep has {shown(name)}, expected precisions, each once")

    def field(self, name, expected, is_good):
        if name not in self.state:
            raise Problem(f"{self.state_path}: found no '{name}', expected {expected}")
        if not is_good(self.state[name]):
            raise Problem(f"{self.state_path}: '{name}' is {shown(self.state[name])}, expected {expected}")
        return self.state[name]

    # --- files

    def open_files(self, opened, with_bytes):
        listed = self.state["files"]
        ranks = max(len(listed) - 2, 1)
        names = ["model.safetensors", "config.json"]
        names += [f"optimizer.rank{rank:04d}.safetensors" for rank in range(ranks)]
        for name in names:
            if name not in listed:
                raise Problem(f"{self.state_path}: 'files' has no {name}")
        for name in sorted(os.listdir(self.folder)):
            if re.fullmatch(r"optimizer\.rank[0-9]+\.safetensors", name) and name not in listed:
                raise Problem(f"{os.path.join(self.folder, name)}: state.json does not list it: of which checkpoint is "
                              f"it?")
        files = [opened.enter_context(contextlib.closing(File(self.folder, name))) for name in names]
        for file in files:
            if file.bytes != listed[file.name]["bytes"]:
                raise Problem(f"{file.path}: {file.bytes} bytes, expected the {listed[file.name]['bytes']} that were "
                              f"written")
        for file in files if with_bytes else []:
            crc = file.crc32()
            if crc != listed[file.name]["crc32"]:
                raise Problem(f"{file.path}: its CRC-32 is {crc}, expected {listed[file.name]['crc32']}: it is not as "
                              f"it was written")
        self.model, self.config_file, *self.ranks = files

    # --- the model

    def read_model(self):
        path = self.config_file.path
        if self.config_file.bytes > 1 << 20:
            raise Problem(f"{path}: {self.config_file.bytes} bytes, expected a few hundred")
        self.config = parse_json(self.config_file.read(0, self.config_file.bytes), path)
        if not isinstance(self.config, dict):
            raise Problem(f"{path}: not a JSON object")
        sizes = {}
        for key, most, field in [("n_layer", 4096, "layers"), ("n_head", 4096, "heads"),
                                 ("n_embd", 262144, "channels"), ("n_positions", 1048576, "seq_len"),
                                 ("vocab_size", 16777216, "vocab_size")]:
            if not is_whole(self.config.get(key), most, least=1):
                raise Problem(f"{path}: {key} is {shown(self.config.get(key))}, expected a number from 1 to {most}")
            sizes[field] = self.config[key]
        if self.state.get("model", sizes) != sizes:
            raise Problem(f"{self.state_path}: 'model' is {shown(self.state['model'])}, config.json has {shown(sizes)}")
        if sizes["channels"] % sizes["heads"]:
            raise Problem(f"{path}: n_embd is {sizes['channels']}, expected a multiple of n_head, {sizes['heads']}")
        dtype = torch_dtype(self.precision)
        if self.config.get("torch_dtype") != dtype:
            raise Problem(f"{path}: torch_dtype is {shown(self.config.get('torch_dtype'))}, expected '{dtype}' with "
                          f"{self.precision}")
        self.sizes = sizes
        self.parameters = list(parameters(sizes["layers"], sizes["channels"], sizes["seq_len"], sizes["vocab_size"]))
        self.model.tensors = read_tensors(self.model, len(self.parameters))
        for p in self.parameters:
            tensor = self.model.tensors.get(p.name)
            self.expect(self.model, p.name, tensor, theta_type(self.precision))
            if tensor.shape != p.file_shape:
                raise Problem(f"{self.model.path}: {p.name} has shape {tensor.shape}, expected {p.file_shape}")
        self.expect_no_more(self.model, {p.name for p in self.parameters})

    @staticmethod
    def expect(file, name, tensor, dtype):
        if tensor is None:
            raise Problem(f"{file.path}: found no tensor {name}")
        if tensor.dtype != dtype:
            raise Problem(f"{file.path}: {name} is {tensor.dtype}, expected {dtype}")

    @staticmethod
    def expect_no_more(file, names):
        more = next((name for name in file.tensors if name not in names), None)
        if more is not None:
            raise Problem(f"{file.path}: found the tensor {shown(more)}, which no flag asks for")

    # --- the optimizer

    def owners(self):
        """(prefix of the names, states) of the run's own optimizer and of each in lock-step."""
        yield "", PRECISIONS[self.precision]
        for name in self.lockstep:
            precision = name.split(":")[0]
            yield f"lockstep.{name}.", {"theta.theta": theta_type(precision), **PRECISIONS[precision]}

    def read_optimizer(self):
        """Each state is whole in one file, or in flat parts in those of ranks in turn; all of a parameter alike."""
        states = sum(len(states) for _, states in self.owners())
        for file in self.ranks:
            file.tensors = read_tensors(file, len(self.parameters) * states + len(SHADOW))
        names = set(SHADOW)
        for prefix, states in self.owners():
            for p in self.parameters:
                cuts = set()
                for state, dtype in states.items():
                    name = tensor_name(prefix + p.name, state)
                    names.add(name)
                    cuts.add(self.read_cut(name, p, dtype))
                if len(cuts) > 1:
                    raise Problem(f"{self.folder}: the ranks' parts of {prefix}{p.name} are not the same in all states")
        self.check_shadow()
        for file in self.ranks:
            self.expect_no_more(file, names)

    def read_cut(self, name, p, dtype):
        """Elements of a state in each rank's file."""
        holders = [file for file in self.ranks if name in file.tensors]
        if not holders:
            raise Problem(f"{self.ranks[0].path}: found no tensor {name}"
                          f"{', nor in the files of other ranks' if len(self.ranks) > 1 else ''}")
        for file in holders:
            tensor = file.tensors[name]
            self.expect(file, name, tensor, dtype)
            if tensor.shape != p.shape and (len(holders) == 1 or len(tensor.shape) != 1):
                raise Problem(f"{file.path}: {name} has shape {tensor.shape}, expected {p.shape}"
                              f"{' or a flat part' if len(holders) > 1 else ''}")
        elements = sum(file.tensors[name].elements for file in holders)
        if elements != p.elements:
            raise Problem(f"{holders[-1].path}: the ranks' parts of {name} have {elements} elements, expected "
                          f"{p.elements}")
        return tuple(file.tensors[name].elements if name in file.tensors else 0 for file in self.ranks)

    def check_shadow(self):
        """The sample of the flag shadow may be empty; a rank that has some of it has all four of its tensors."""
        holders = [file for file in self.ranks if any(name in file.tensors for name in SHADOW)]
        for file in holders:
            for name in SHADOW:
                self.expect(file, name, file.tensors.get(name), "F64")
                shape = file.tensors[name].shape
                if len(shape) != 1 or shape != file.tensors[SHADOW[0]].shape:
                    raise Problem(f"{file.path}: {name} has shape {shape}, expected one size, that of {SHADOW[0]}")


def torch_dtype(precision):
    return "float32" if theta_type(precision) == "F32" else "bfloat16"


# ---------------------------------------------------------------------------------------------------------------------
# verify and show

def verify(folder):
    with Checkpoint(newest(folder), with_bytes=True) as c:
        size = sum(file.bytes for file in [c.model, c.config_file, *c.ranks])
        print(f"{c.folder}: step {c.step}, {c.precision}, {3 + len(c.ranks)} files, {size:,} bytes: all as written")


def state_of(name):
    """What a tensor of an optimizer's file belongs to: (lockstep.bf16, v), (shadow, m), ("", theta.lo), ..."""
    if name in SHADOW:
        return tuple(name.split("."))
    whose = re.match(r"(lockstep\.[^.]+)\.", name)
    prefix = whose[1] if whose else ""
    state = re.sub(r".*\.(weight|bias)\.", "", name)
    return prefix, {"lo": "theta.lo", "rem": "theta.rem", "rho": "theta.rho"}.get(state, state)


def show(folder, with_stats):
    with Checkpoint(newest(folder), with_bytes=False) as c:
        skipped = f" ({c.step - c.updates} skipped)" if c.updates != c.step else ""
        print(f"{c.folder}\nstep {c.step}{skipped}, {c.precision}, mcf {c.mcf}, written by train_gpt "
              f"{shown(c.state['version'], 40)}")
        count = sum(p.elements for p in c.parameters)
        print("model: {layers} layers, {heads} heads, {channels} channels, {seq_len} positions, vocabulary "
              "{vocab_size:,}: {count:,} parameters".format(**c.sizes, count=count))
        print(f"\n{'file':<32} {'bytes':>18}  crc32")
        for file in [c.model, c.config_file, *c.ranks]:
            print(f"{file.name:<32} {file.bytes:>18,}  {c.state['files'][file.name]['crc32']}")

        groups = {}  # state -> (file, tensor) of it
        for file in [c.model, *c.ranks]:
            for name, tensor in file.tensors.items():
                key = ("", "theta") if file is c.model else state_of(name)
                groups.setdefault(key, []).append((file, tensor))
        print(f"\n{'state':<40} {'tensors':>8} {'dtype':>6} {'elements':>16} {'bytes':>18}"
              f"{'      rms  largest' if with_stats else ''}")
        not_finite = 0
        for (prefix, state), tensors in groups.items():
            elements, size = sum(t.elements for _, t in tensors), sum(t.bytes for _, t in tensors)
            line = f"{prefix + ' ' + state if prefix else state:<40} {len(tensors):>8,} {tensors[0][1].dtype:>6} "
            line += f"{elements:>16,} {size:>18,}"
            if with_stats:
                square, largest, bad = statistics_of(tensors)
                not_finite += bad
                line += f" {math.sqrt(square / max(elements, 1)):>8.1e} {largest:>8.1e}"
            print(line)
        if with_stats:
            print(f"{not_finite:,} numbers are not finite" if not_finite else "all numbers are finite")
        line = "\nflags:"
        for name, value in c.flags.items():
            flag = f" {shown(name, 24)[1:-1]}={shown(value, 60)[1:-1]}"
            if len(line) + len(flag) > 116:
                print(line)
                line = "      "
            line += flag
        print(line)


def statistics_of(tensors):
    """Sum of squares, largest size and how many are not finite."""
    square, largest, bad = 0.0, 0.0, 0
    for file, tensor in tensors:
        for at in range(0, tensor.elements, PIECE):
            values = widened(read_array(file, tensor, at, min(PIECE, tensor.elements - at))).astype(np.float64)
            finite = values[np.isfinite(values)]
            square += float(np.dot(finite, finite))
            largest = max(largest, float(np.max(np.abs(finite), initial=0.0)))
            bad += values.size - finite.size
    return square, largest, bad


# ---------------------------------------------------------------------------------------------------------------------
# Numbers, in NumPy. A bf16 array is one of uint16: its bits. Each function has the arithmetic of the C++ code of the
# same name (mcf/bf16.h, mcf/strategies.h), operation by operation, so that bits are equal.

np = None


def need_numpy():
    """Imports NumPy, or starts again under the system's Python, which may have it where this one has not."""
    global np
    try:
        import numpy
        np = numpy
        np.seterr(all="ignore")  # states may hold infinities
        return
    except ImportError:
        pass
    system = "/usr/bin/python3"
    found = os.access(system, os.X_OK) and subprocess.run(
        [system, "-c", "import numpy"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    if not found:
        raise Problem("needs NumPy: install the package python3-numpy, or pip install numpy")
    sys.stdout.flush()
    os.execv(system, [system, os.path.abspath(__file__), *sys.argv[1:]])


def array_type(dtype):
    return {"BF16": np.uint16, "F32": np.float32, "F64": np.float64, "I16": np.int16, "I8": np.int8}[dtype]


def read_array(file, tensor, at, n):
    """Elements at, ..., at + n - 1 of a tensor."""
    width = BYTES[tensor.dtype]
    return np.frombuffer(file.read(tensor.begin + at * width, n * width), dtype=array_type(tensor.dtype))


def widened(x):
    """To fp32 what is bf16; other types as they are."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def rn(x):
    """fp32 to the bits of bf16: to nearest, ties to even, NaN to a quiet NaN."""
    u = np.ascontiguousarray(x).view(np.uint32)
    rounded = (u + np.uint32(0x7fff) + ((u >> 16) & np.uint32(1))) >> 16
    return np.where(np.isnan(x), (u | np.uint32(0x00400000)) >> 16, rounded).astype(np.uint16)


def nearest(values, dtype):
    """Doubles as BF16 or F32, by way of fp32."""
    x = values.astype(np.float32)
    return rn(x) if dtype == "BF16" else x


def pair_of(values):
    """Doubles as two bf16 numbers, hi + lo."""
    hi = nearest(values, "BF16")
    return hi, nearest(values - widened(hi), "BF16")


class PlainWeight:
    """theta alone, bf16 or fp32."""

    @staticmethod
    def value(theta, _):
        return widened(theta).astype(np.float64)

    @staticmethod
    def set(values, dtype):
        return nearest(values, dtype), None


class PairWeight:
    @staticmethod
    def value(theta, lo):
        return widened(theta).astype(np.float64) + widened(lo)

    @staticmethod
    def set(values, _):
        return pair_of(values)


class MasterWeight:
    @staticmethod
    def value(_, master):
        return master.astype(np.float64)

    @staticmethod
    def set(values, _):
        master = values.astype(np.float32)
        return rn(master), master


class Rem16Weight:
    @staticmethod
    def value(theta, rem):
        upper = (theta.astype(np.uint32) << 16) - ((rem < 0).astype(np.uint32) << 16)
        return (upper | rem.view(np.uint16)).view(np.float32).astype(np.float64)

    @staticmethod
    def set(values, _):
        w = values.astype(np.float32)
        u = np.where(np.isnan(w), np.uint32(0x7fc00000), w.view(np.uint32))
        rem = u.astype(np.uint16).view(np.int16)
        return ((u >> 16) + (rem < 0)).astype(np.uint16), rem


class Int8Weight:
    @staticmethod
    def half_ulp(theta):
        field = np.clip(theta.astype(np.uint32) << 16 & np.uint32(0x7f800000), 1 << 23, 254 << 23)
        return field.astype(np.uint32).view(np.float32) * np.float32(2.0**-8)

    @staticmethod
    def value(theta, rho):
        beside = rho.astype(np.float32) / np.float32(127) * Int8Weight.half_ulp(theta)
        return (widened(theta) + beside).astype(np.float64)

    @staticmethod
    def set(values, _):
        w = values.astype(np.float32)
        theta = rn(w)
        x = np.float32(127) * ((w - widened(theta)) / Int8Weight.half_ulp(theta))
        return theta, np.rint(np.clip(np.where(np.isfinite(x), x, 0), -127, 127)).astype(np.int8)


WEIGHTS = {"m": PlainWeight, "theta.lo": PairWeight, "master": MasterWeight, "theta.rem": Rem16Weight,
           "theta.rho": Int8Weight}


def first_state(precision):
    """Names how the weight is stored."""
    return next(iter(PRECISIONS[precision]))


def full_values(precision, arrays):
    """weights, m and v in double. arrays: theta and the states, by name."""
    first = first_state(precision)
    v = widened(arrays["v"]).astype(np.float64)
    return {"weights": WEIGHTS[first].value(arrays["theta"], arrays[first]),
            "m": widened(arrays["m"]).astype(np.float64),
            "v": v + widened(arrays["v.lo"]) if "v.lo" in arrays else v}


def converted(arrays, before, old, new):
    """theta and the states of precision `new`, from those of `old` and their full values."""
    states, first = PRECISIONS[new], first_state(new)
    out = {"m": nearest(before["m"], states["m"])}
    theta, beside = WEIGHTS[first].set(before["weights"], theta_type(new))
    out["theta"] = theta
    if beside is not None:
        out[first] = beside
    if "v.lo" in states:
        out["v"], out["v.lo"] = pair_of(before["v"])
    else:
        out["v"] = nearest(before["v"], states["v"])
    # What both store alike stays, and is not always the nearest: kahan's theta, the v of a pair.
    kept = [state for state, dtype in states.items() if PRECISIONS[old].get(state) == dtype]
    if first == first_state(old) and theta_type(new) == theta_type(old):
        kept.append("theta")
    out.update({name: arrays[name] for name in kept})
    return out


class Change:
    """What became of weights, m or v: how many were rounded, by how much."""

    def __init__(self):
        self.elements = self.rounded = 0
        self.error = self.size = 0.0

    def add(self, was, now):
        self.elements += was.size
        self.rounded += int(np.count_nonzero(was != now))
        self.error += float(np.dot(now - was, now - was))
        self.size += float(np.dot(was, was))

    def __str__(self):
        if self.rounded == 0:
            return "exact"
        error = math.sqrt(self.error / self.size) if self.size > 0 else math.inf
        return f"rounded in {100 * self.rounded / self.elements:.3g} % of all, error {error:.1e} of the norm"


# ---------------------------------------------------------------------------------------------------------------------
# convert

class NewFile:
    """A .safetensors file in the making, whose tensors are written in any order."""

    def __init__(self, folder, name, tensors, pt):
        """tensors: name -> (dtype, shape), in the order of the file."""
        self.name, at, header = name, 0, {"__metadata__": {"format": "pt"}} if pt else {}
        for tensor, (dtype, shape) in tensors.items():
            end = at + math.prod(shape) * BYTES[dtype]
            header[tensor] = {"data_offsets": [at, end], "dtype": dtype, "shape": list(shape)}
            at = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % 64)
        self.bytes, self.data = 8 + len(text) + at, 8 + len(text)
        self.begins = {tensor: self.data + header[tensor]["data_offsets"][0] for tensor in tensors}
        self.fd = new_file(folder, name)
        self.put(struct.pack("<Q", len(text)) + text, 0)

    def put(self, data, at):
        data = memoryview(data).cast("B")
        while len(data):
            done = os.pwrite(self.fd, data, at)
            data, at = data[done:], at + done

    def write(self, tensor, at, array):
        """Puts these elements at the place `at` of a tensor."""
        array = np.ascontiguousarray(array)
        self.put(array.reshape(-1), self.begins[tensor] + at * array.itemsize)

    def finish(self):
        """Its entry in state.json, when every byte is on the disk."""
        os.fsync(self.fd)
        return {"bytes": self.bytes, "crc32": crc32_of(self.fd)}

    def close(self):
        os.close(self.fd)


def new_file(folder, name):
    return os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def write_text(folder, name, text):
    with os.fdopen(new_file(folder, name), "wb") as f:
        f.write(text.encode("utf-8"))
        f.flush()
        os.fsync(f.fileno())
    return {"bytes": len(text.encode("utf-8")), "crc32": f"{zlib.crc32(text.encode('utf-8')):08x}"}


def sync_folder(folder):
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def state_text(state):
    """state: all but the checksum, which is added."""
    text = json.dumps(state, indent=2, ensure_ascii=False)[:-2]
    return text + f',\n  "checksum": "{zlib.crc32(text.encode("utf-8")):08x}"\n}}\n'


def refuse_what_cannot_resume(c, precision):
    """Flags that --resume would refuse with these weights."""
    floats = theta_type(precision)
    others = [("lockstep", name.split(":")[0]) for name in c.lockstep]
    if "switch" in c.flags:
        others.append(("switch", c.flags["switch"].partition(":")[2].split(":")[0]))
    for flag, other in others:
        if theta_type(other) != floats:
            raise Problem(f"--precision: {precision} has {floats} weights, {other} of the run's --{flag} has "
                          f"{theta_type(other)}; no run could go on from both")
    if precision == "fp32" and c.flags.get("grad-accum", "bf16") != "bf16":
        raise Problem(f"--precision: fp32 has fp32 gradients, the run has --grad-accum="
                      f"{shown(c.flags['grad-accum'])}; no run could go on from both")


def convert_parameter(c, p, precision, model, ranks, changes):
    """Reads theta and states of a parameter of checkpoint c, and writes them to the new model and rank files."""
    tensor = c.model.tensors[p.name]
    theta = read_array(c.model, tensor, 0, tensor.elements)
    if p.conv1d:
        theta = theta.reshape(p.file_shape).T.reshape(-1)
    new_theta = np.empty(p.elements, array_type(theta_type(precision)))
    place = 0  # in the whole parameter
    for file, into in zip(c.ranks, ranks):
        states = {state: file.tensors.get(tensor_name(p.name, state)) for state in PRECISIONS[c.precision]}
        part = states["m"].elements if states["m"] else 0
        for at in range(0, part, PIECE):
            n = min(PIECE, part - at)
            arrays = {state: read_array(file, t, at, n) for state, t in states.items()}
            arrays["theta"] = theta[place:place + n]
            before = full_values(c.precision, arrays)
            after = converted(arrays, before, c.precision, precision)
            new_theta[place:place + n] = after["theta"]
            for state in PRECISIONS[precision]:
                into.write(tensor_name(p.name, state), at, after[state])
            for what, now in full_values(precision, after).items():
                changes[what].add(before[what], now)
            place += n
    model.write(p.name, 0, new_theta.reshape(p.shape).T if p.conv1d else new_theta)


def copy_tensor(file, name, into):
    tensor = file.tensors[name]
    for at in range(0, tensor.elements, PIECE):
        into.write(name, at, read_array(file, tensor, at, min(PIECE, tensor.elements - at)))


def write_converted(c, folder, precision, mcf):
    """All files of the new checkpoint. Returns the changes of weights, m and v."""
    own = {tensor_name(p.name, state) for p in c.parameters for state in PRECISIONS[c.precision]}
    theta = theta_type(precision)
    with contextlib.ExitStack() as opened:
        def create(*args):
            return opened.enter_context(contextlib.closing(NewFile(folder, *args)))

        model = create("model.safetensors", {p.name: (theta, p.file_shape) for p in c.parameters}, True)
        ranks = []
        for file in c.ranks:
            shapes = {p.name: file.tensors[p.name + ".m"].shape for p in c.parameters if p.name + ".m" in file.tensors}
            tensors = {tensor_name(name, state): (dtype, shape)
                       for state, dtype in PRECISIONS[precision].items() for name, shape in shapes.items()}
            tensors.update({name: (t.dtype, t.shape) for name, t in file.tensors.items() if name not in own})
            ranks.append(create(file.name, tensors, False))
        changes = {"weights": Change(), "m": Change(), "v": Change()}
        for p in c.parameters:
            convert_parameter(c, p, precision, model, ranks, changes)
        for file, into in zip(c.ranks, ranks):
            for name in file.tensors:
                if name not in own:
                    copy_tensor(file, name, into)
        config = json.dumps({**c.config, "torch_dtype": torch_dtype(precision)}, indent=2, ensure_ascii=False) + "\n"
        files = {"model.safetensors": model.finish(), "config.json": write_text(folder, "config.json", config)}
        files.update({into.name: into.finish() for into in ranks})
    state = {**c.state, "precision": precision, "mcf": mcf, "files": files,
             "flags": {**c.flags, "precision": precision, "mcf": mcf}}
    del state["checksum"]
    write_text(folder, "state.json", state_text(state))
    return changes


def convert(source, destination, precision, mcf):
    destination = os.path.abspath(destination)
    parent, name = os.path.split(destination)
    if os.path.lexists(destination):
        raise Problem(f"{destination}: it is there already; choose a folder that is not")
    with Checkpoint(newest(source), with_bytes=True) as c:
        if re.fullmatch("step_[0-9]+", name) and name != f"step_{c.step:08d}":
            raise Problem(f"{destination}: the checkpoint is of step {c.step}; expected a folder step_{c.step:08d}")
        refuse_what_cannot_resume(c, precision)
        mcf = mcf or c.flags.get("mcf", c.mcf)
        os.makedirs(parent, exist_ok=True)
        # Written aside: train_gpt takes such a folder for one that was never finished, and removes it.
        aside = os.path.join(parent, f".saving_{name}.{os.getpid()}")
        os.mkdir(aside)
        try:
            changes = write_converted(c, aside, precision, mcf)
            sync_folder(aside)
            os.rename(aside, destination)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        sync_folder(parent)
        print(f"{destination}: step {c.step}, {c.precision} -> {precision}, mcf {mcf}")
        for what, change in changes.items():
            print(f"  {what} {change}")


# ---------------------------------------------------------------------------------------------------------------------

def parse_arguments(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage=argparse.SUPPRESS, allow_abbrev=False)
    commands = parser.add_subparsers(prog="checkpoint.py", dest="command", required=True,
                                       metavar="show | verify | convert")
    for name in ("show", "verify"):
        command = commands.add_parser(name, allow_abbrev=False)
        command.add_argument("folder", metavar="FOLDER", help="a checkpoint, or a run folder: its newest one")
        if name == "show":
            command.add_argument("--stats", action="store_true", help="also the size of its numbers; reads all of it")
    command = commands.add_parser("convert", allow_abbrev=False)
    command.add_argument("source", metavar="SOURCE", help="a checkpoint, or a run folder: its newest one")
    command.add_argument("destination", metavar="DESTINATION", help="the new checkpoint's folder")
    command.add_argument("--precision", required=True, choices=list(PRECISIONS), metavar="P",
                         help=", ".join(PRECISIONS))
    command.add_argument("--mcf", choices=MODES, metavar="M", help=", ".join(MODES) + " [the checkpoint's]")
    return parser.parse_args(words)


def main(words):
    a = parse_arguments(words)
    if a.command == "verify":
        verify(a.folder)
    elif a.command == "show":
        if a.stats:
            need_numpy()
        show(a.folder, a.stats)
    else:
        need_numpy()
        convert(a.source, a.destination, a.precision, a.mcf)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was written aside is removed
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # it ends quietly where nobody reads on: show | head
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        main(sys.argv[1:])
    except Problem as problem:
        sys.exit(f"checkpoint.py: error: {problem}")
    except OSError as e:
        sys.exit(f"checkpoint.py: error: {e.filename or 'cannot write'}: {e.strerror}")
    except MemoryError:
        sys.exit("checkpoint.py: error: out of memory")
    except KeyboardInterrupt:
        sys.exit("\ncheckpoint.py: interrupted; nothing was changed")
