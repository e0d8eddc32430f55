#!/usr/bin/env python3
"""scripts/checkpoint.py, on checkpoints that are made here from their format alone.

  python3 dev/tests/checkpoint_py_test.py

Standard library only, but for convert itself, which needs NumPy. What it must give is computed here one number at a
time, from the definitions in mcf/strategies.h; it must be equal bit for bit, since --resume converts with those.
"""
import contextlib
import functools
import io
import json
import math
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
import zlib

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SCRIPT = os.path.join(ROOT, "scripts", "checkpoint.py")
sys.path.insert(0, os.path.dirname(SCRIPT))
import checkpoint  # noqa: E402
import program  # noqa: E402

STATES = {
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
CODES = {"BF16": "H", "F32": "f", "F64": "d", "I16": "h", "I8": "b"}  # of struct
L, C, HEADS, POSITIONS, VOCAB = 1, 6, 2, 5, 7  # odd sizes, no two of them alike
STEP = 12
MODEL = "model.safetensors"
RANK0, RANK1 = "optimizer.rank0000.safetensors", "optimizer.rank0001.safetensors"
WORK = None


def setUpModule():
    global WORK
    WORK = tempfile.mkdtemp(prefix="train_gpt_checkpoint_")


def tearDownModule():
    shutil.rmtree(WORK, ignore_errors=True)


def new_folder():
    return os.path.join(tempfile.mkdtemp(dir=WORK), f"step_{STEP:08d}")


# ---------------------------------------------------------------------------------------------------------------------
# Numbers, one at a time. A value is a Python float; what is stored is an int (bits of bf16, I16, I8) or a float (F32).

def f32(x):
    """x rounded to fp32. One + - * / of fp32 numbers in double is rounded so to the correct fp32 result."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def bits_of(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def of_bits(u):
    return struct.unpack("<f", struct.pack("<I", u))[0]


def bf16_value(x):
    """The nearest on the grid of bf16 to an fp32 number, ties to even."""
    if not math.isfinite(x) or x == 0:
        return x
    spacing = math.ldexp(1.0, max(math.frexp(x)[1] - 1, -126) - 7)
    rounded = math.copysign(round(x / spacing) * spacing, x)
    return rounded if abs(rounded) < 2.0**128 else math.copysign(math.inf, x)


def stored(x, dtype):
    x = f32(x)
    return bits_of(bf16_value(x)) >> 16 if dtype == "BF16" else x


def value(x, dtype):
    return of_bits(x << 16) if dtype == "BF16" else x


def half_ulp(theta):
    exponent = math.frexp(theta)[1] - 1 if math.isfinite(theta) and theta else 127 if theta else -126
    return math.ldexp(1.0, max(exponent, -126) - 8)


def weight_value(precision, e):
    theta = value(e["theta"], theta_type(precision))
    if "theta.lo" in e:
        return theta + value(e["theta.lo"], "BF16")
    if "master" in e:
        return e["master"]
    if "theta.rem" in e:
        return of_bits((e["theta"] << 16) + e["theta.rem"] & 0xffffffff)
    if "theta.rho" in e:
        return f32(theta + f32(f32(e["theta.rho"] / 127) * half_ulp(theta)))
    return theta


def weight_states(precision, w):
    theta = stored(w, theta_type(precision))
    first = next(iter(STATES[precision]))
    if first == "theta.lo":
        return {"theta": theta, first: stored(w - value(theta, "BF16"), "BF16")}
    if first == "master":
        return {"theta": theta, first: f32(w)}
    if first == "theta.rem":
        u = bits_of(f32(w))
        upper = u + 0x8000 >> 16  # halves away from zero
        return {"theta": upper, first: u - (upper << 16)}
    if first == "theta.rho":
        near = value(theta, "BF16")
        x = f32(127 * f32(f32(f32(w) - near) / half_ulp(near)))
        return {"theta": theta, first: round(max(-127.0, min(127.0, x))) if math.isfinite(x) else 0}
    return {"theta": theta}


def theta_type(precision):
    return "F32" if precision == "fp32" else "BF16"


def full(precision, e):
    """(weight, m, v) that the states of one element stand for."""
    v = value(e["v"], STATES[precision]["v"])
    return (weight_value(precision, e), value(e["m"], STATES[precision]["m"]),
            v + value(e["v.lo"], "BF16") if "v.lo" in e else v)


def expected_element(e, old, new):
    w, m, v = full(old, e)
    states = STATES[new]
    out = {**weight_states(new, w), "m": stored(m, states["m"]), "v": stored(v, states["v"])}
    if "v.lo" in states:
        out["v.lo"] = stored(v - value(out["v"], "BF16"), "BF16")
    types, new_types = ({"theta": theta_type(p), **STATES[p]} for p in (old, new))
    alike = next(iter(STATES[old])) == next(iter(states))
    for name in out:
        if types.get(name) == new_types[name] and (name != "theta" or alike):
            out[name] = e[name]
    return out


def same(a, b, dtype):
    """Bits are equal, or both are NaN, whose payload no operation promises."""
    return packed([a], dtype) == packed([b], dtype) or math.isnan(value(a, dtype)) and math.isnan(value(b, dtype))


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints.

def parameters():
    """(name, shape, does the model's file have it transposed)"""
    def norm(name):
        return [(name + ".weight", (C,), False), (name + ".bias", (C,), False)]

    def linear(name, out, into):
        return [(name + ".weight", (out, into), True), (name + ".bias", (out,), False)]

    table = [("wte.weight", (VOCAB, C), False), ("wpe.weight", (POSITIONS, C), False)]
    for layer in range(L):
        h = f"h.{layer}."
        table += norm(h + "ln_1") + linear(h + "attn.c_attn", 3 * C, C) + linear(h + "attn.c_proj", C, C)
        table += norm(h + "ln_2") + linear(h + "mlp.c_fc", 4 * C, C) + linear(h + "mlp.c_proj", C, 4 * C)
    return table + norm("ln_f")


PARAMETERS = parameters()
ELEMENTS = sum(math.prod(shape) for _, shape, _ in PARAMETERS)


def pieces(cuts):
    """Of each rank: (parameter, its first element there, as many). cuts: where in all elements a rank's part ends."""
    for begin, end in zip([0] + cuts, cuts + [ELEMENTS]):
        at, mine = 0, []
        for name, shape, _ in PARAMETERS:
            n = math.prod(shape)
            first, last = max(begin - at, 0), min(end - at, n)
            if first < last:
                mine.append((name, first, last - first))
            at += n
        yield mine


def file_name(parameter, state):
    return f"{parameter}.{state[6:] if state.startswith('theta.') else state}"


def transposed(values, rows, columns):
    return [values[r * columns + c] for c in range(columns) for r in range(rows)]


def packed(values, dtype):
    return struct.pack(f"<{len(values)}{CODES[dtype]}", *values)


def safetensors(tensors, pt=False):
    """Bytes of a file. tensors: name -> (dtype, shape, data)."""
    header, at = {"__metadata__": {"format": "pt"}} if pt else {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"data_offsets": [at, at + len(data)], "dtype": dtype, "shape": list(shape)}
        at += len(data)
    return with_header(json.dumps(header, separators=(",", ":")), b"".join(data for _, _, data in tensors.values()))


def with_header(header, data):
    text = header.encode() + b" " * (-(8 + len(header.encode())) % 64)
    return struct.pack("<Q", len(text)) + text + data


def taken_apart(raw):
    """(header as an object, data) of a .safetensors file."""
    (n,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8:8 + n]), raw[8 + n:]


def tensors_of(path):
    header, data = taken_apart(read(path))
    header.pop("__metadata__", None)
    return {name: (t["dtype"], tuple(t["shape"]), data[slice(*t["data_offsets"])]) for name, t in header.items()}


def read(path):
    with open(path, "rb") as f:
        return f.read()


def write(path, data):
    with open(path, "wb") as f:
        f.write(data)


def write_state(folder, state):
    """state: all but the checksum."""
    text = json.dumps(state, indent=2, ensure_ascii=False)[:-2]
    write(os.path.join(folder, "state.json"),
          (text + f',\n  "checksum": "{zlib.crc32(text.encode()):08x}"\n}}\n').encode())


def read_state(folder):
    state = json.loads(read(os.path.join(folder, "state.json")))
    del state["checksum"]
    return state


def reseal(folder):
    """Makes sizes and checksums right again, as one who means harm would."""
    state = read_state(folder)
    for name, file in state["files"].items():
        data = read(os.path.join(folder, name))
        file.update(bytes=len(data), crc32=f"{zlib.crc32(data):08x}")
    write_state(folder, state)


SPECIAL = (0.0, -0.0, 1e-45, -1e-39, 2.0**-126, 1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-9, 1 + 2.0**-23,
           -1 - 2.0**-8 - 2.0**-16, 3.3895e38, 3.4028234e38, -3.4e38, math.inf)


def random_elements(precision, seed=0, special=SPECIAL):
    """As many elements as the model has: dicts of theta and states. special: numbers that a fifth of them are."""
    r = random.Random(f"{precision} {seed}")

    def number():
        return r.choice(special) if special and r.random() < .2 else f32(r.gauss(0, 1) * 10**r.uniform(-8, 0))

    for _ in range(ELEMENTS):
        w = number()
        e = {"theta": stored(w, theta_type(precision))}
        near = value(e["theta"], theta_type(precision))
        for state, dtype in STATES[precision].items():
            if state == "theta.rem":
                e[state] = r.randint(-2**15, 2**15 - 1)
            elif state == "theta.rho":
                e[state] = r.randint(-128, 127)
            elif state == "master":
                e[state] = w
            elif state.endswith(".lo"):
                of = near if state == "theta.lo" else value(e["v"], "BF16")
                e[state] = stored(of * r.uniform(-1, 1) * 2.0**-8 if math.isfinite(of) else 0.0, "BF16")
            else:
                e[state] = stored(abs(number()) if state == "v" else number(), dtype)
        yield e


def make_checkpoint(precision, cuts=(), elements=None, lockstep=(), shadow=0, flags=None):
    """Of these elements, or of random ones. lockstep: names of precisions; shadow: samples of a rank. Its folder."""
    folder = new_folder()
    os.makedirs(folder)
    elements = list(elements or random_elements(precision))
    begins, at = {}, 0
    model = {}
    for name, shape, is_transposed in PARAMETERS:
        n, begins[name], dtype = math.prod(shape), at, theta_type(precision)
        values = [e["theta"] for e in elements[at:at + n]]
        if is_transposed:
            values, shape = transposed(values, *shape), shape[::-1]
        model[name] = (dtype, shape, packed(values, dtype))
        at += n
    names = [MODEL, "config.json"]
    write(os.path.join(folder, MODEL), safetensors(model, pt=True))
    config = {"architectures": ["GPT2LMHeadModel"], "vocab_size": VOCAB, "n_positions": POSITIONS, "n_embd": C,
              "n_layer": L, "n_head": HEADS, "layer_norm_epsilon": 1e-5, "n_inner": None,
              "torch_dtype": "float32" if precision == "fp32" else "bfloat16"}
    write(os.path.join(folder, "config.json"), (json.dumps(config, indent=2) + "\n").encode())
    shapes = {name: shape for name, shape, _ in PARAMETERS}
    optimizers = [("", precision, elements)]
    for name in lockstep:
        own = name.split(":")[0]
        optimizers.append((f"lockstep.{name}.", own, list(random_elements(own, seed=1))))
    for rank, mine in enumerate(pieces(list(cuts))):
        tensors = {}
        for prefix, own, of in optimizers:
            states = dict(STATES[own])
            if prefix:
                states = {"theta": theta_type(own), **states}
            for state, dtype in states.items():
                for name, first, n in mine:
                    values = [e[state] for e in of[begins[name] + first:begins[name] + first + n]]
                    shape = shapes[name] if n == math.prod(shapes[name]) else (n,)
                    tensors[file_name(prefix + name, state)] = (dtype, shape, packed(values, dtype))
        for kind in ["start", "weight", "m", "v"] if shadow else []:
            tensors["shadow." + kind] = ("F64", (shadow,), packed([random.Random(kind).random()] * shadow, "F64"))
        names.append(f"optimizer.rank{rank:04d}.safetensors")
        write(os.path.join(folder, names[-1]), safetensors(tensors))
    all_flags = {"precision": precision, "mcf": "strict", "steps": "20", "lr": "0.0003", "prompt": "Grüße",
                 "shadow": str(shadow), **({"lockstep": ",".join(lockstep)} if lockstep else {}), **(flags or {})}
    write_state(folder, {
        "format": "train_gpt checkpoint 1", "version": "0.1+abc", "step": STEP, "updates": STEP - 1,
        "precision": precision, "mcf": "strict",
        "model": {"layers": L, "heads": HEADS, "channels": C, "seq_len": POSITIONS, "vocab_size": VOCAB},
        "files": {name: {"bytes": 0, "crc32": ""} for name in names}, "data": "2 shards, 1234 tokens",
        "bad_steps_in_a_row": 0, "spikes": {"loss": [5.25, 5.125], "grad_norm": []}, "flags": all_flags})
    reseal(folder)
    return folder


CUT = math.prod((VOCAB, C)) + math.prod((POSITIONS, C)) + 2 * C + 17  # inside of the second row of c_attn's weight


@functools.lru_cache(maxsize=None)
def example(precision="collage_plus", cuts=(CUT,)):
    """One that is read only."""
    return make_checkpoint(precision, cuts, lockstep=("collage_light", "collage_plus:fused"), shadow=3)


def elements_of(folder, precision):
    """All elements, as dicts of theta and states."""
    model = tensors_of(os.path.join(folder, MODEL))
    files = [tensors_of(os.path.join(folder, name)) for name in sorted(os.listdir(folder)) if "optimizer" in name]
    columns = {state: [] for state in ["theta", *STATES[precision]]}
    for name, shape, is_transposed in PARAMETERS:
        dtype, file_shape, data = model[name]
        assert dtype == theta_type(precision) and file_shape == (shape[::-1] if is_transposed else shape), name
        values = struct.unpack(f"<{math.prod(shape)}{CODES[dtype]}", data)
        columns["theta"] += transposed(values, *file_shape) if is_transposed else values
        for state, dtype in STATES[precision].items():
            for tensors in files:
                found, _, data = tensors.get(file_name(name, state), (dtype, (), b""))
                assert found == dtype, (name, state)
                columns[state] += struct.unpack(f"<{len(data) // struct.calcsize(CODES[dtype])}{CODES[dtype]}", data)
    return [dict(zip(columns, row)) for row in zip(*columns.values(), strict=True)]


# ---------------------------------------------------------------------------------------------------------------------
# Running it.

@functools.lru_cache(maxsize=None)
def python_with_numpy():
    for python in (sys.executable, "/usr/bin/python3"):
        with contextlib.suppress(OSError):
            if subprocess.run([python, "-c", "import numpy"], stderr=subprocess.DEVNULL).returncode == 0:
                return python
    return None


def script(*words, python=sys.executable, **kwargs):
    done = subprocess.run([python, SCRIPT, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=60, **kwargs)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def output_of(function, *arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        function(*arguments)
    return out.getvalue()


CONVERT_ALL = """
import contextlib, io, json, sys
sys.path.insert(0, sys.argv[1])
import checkpoint
checkpoint.need_numpy()
texts = []
for job in json.load(sys.stdin):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        checkpoint.convert(*job)
    texts.append(out.getvalue())
print(json.dumps(texts))
"""


def convert_all(jobs):
    """Runs convert with each of these arguments, in one process: NumPy takes long to start. Returns what it prints."""
    done = subprocess.run([python_with_numpy(), "-c", CONVERT_ALL, os.path.dirname(SCRIPT)], input=json.dumps(jobs),
                          capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class CheckpointTest(unittest.TestCase):
    def refused(self, folder, *words):
        """verify must name what is wrong: one line with each of these words."""
        with self.assertRaises(checkpoint.Problem) as caught:
            output_of(checkpoint.verify, folder)
        message = str(caught.exception)
        self.assertNotIn("\n", message)
        self.assertLess(len(message), 700)
        for word in words:
            self.assertIn(word, message)

    @contextlib.contextmanager
    def broken(self, source, *words, sealed=True, name=None):
        """A copy of a checkpoint, to be broken inside; then verify must refuse it."""
        folder = new_folder()
        shutil.copytree(source, folder)
        with self.subTest(words=words, name=name):
            yield folder
            if sealed:
                reseal(folder)
            self.refused(folder, *words)
        shutil.rmtree(os.path.dirname(folder))


class Good(CheckpointTest):
    def test_verify(self):
        for precision in STATES:
            for cuts in [(), (CUT,), (CUT, CUT + 1)]:
                with self.subTest(precision=precision, cuts=cuts):
                    text = output_of(checkpoint.verify, make_checkpoint(precision, cuts))
                    self.assertRegex(text, rf"step 12, {precision}, {4 + len(cuts)} files, .* all as written\n")
        output_of(checkpoint.verify, example())

    def test_ranks_without_elements(self):
        folder = make_checkpoint("collage_light", (CUT,))
        tensors = tensors_of(os.path.join(folder, RANK0))
        write(os.path.join(folder, "optimizer.rank0002.safetensors"), safetensors({}))
        state = read_state(folder)
        state["files"]["optimizer.rank0002.safetensors"] = {}
        write_state(folder, state)
        tensors["ln_f.bias.m"] = ("BF16", (0,), b"")  # a flat part of none
        write(os.path.join(folder, RANK0), safetensors(tensors))
        reseal(folder)
        output_of(checkpoint.verify, folder)

    def test_newest(self):
        run = tempfile.mkdtemp(dir=WORK)
        for name in ["step_00000003", "step_00000020", ".saving_00000099", "step_00000100", "other"]:
            os.makedirs(os.path.join(run, "checkpoints", name))
        self.refused(run, "no complete checkpoint")
        for name, is_complete in [("step_00000003", 1), ("step_00000020", 1), (".saving_00000099", 1), ("other", 1)]:
            write(os.path.join(run, "checkpoints", name, "state.json"), b"")
        for folder in [run, os.path.join(run, "checkpoints")]:
            self.assertEqual(checkpoint.newest(folder), os.path.join(run, "checkpoints", "step_00000020"))
        inner = os.path.join(run, "checkpoints", "step_00000003")
        self.assertEqual(checkpoint.newest(inner), inner)

    def test_show(self):
        for words in [[], ["--stats"]] if python_with_numpy() else [[]]:
            done = script("show", example(), *words)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertTrue(all(len(line) < 120 for line in done.stdout.replace(example(), "").split("\n")))
            for word in ["step 12 (1 skipped), collage_plus, mcf strict", "vocabulary 7", f"{ELEMENTS} parameters",
                         RANK1, "lockstep.collage_plus:fused theta.lo", "shadow m", "steps=20"]:
                self.assertIn(word, done.stdout)
        n_16 = rf"theta.lo +\d+ +BF16 +{ELEMENTS} +{2 * ELEMENTS:,}"
        self.assertRegex(done.stdout, n_16)
        self.assertIn("numbers are not finite" if python_with_numpy() else "", done.stdout)

    def test_command_line(self):
        done = script("verify", example())
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        for words in [["verify"], ["show", "x", "y"], ["other"], [], ["convert", "a", "b"],
                      ["convert", "a", "b", "--precision=fp8"], ["convert", "a", "b", "--precision=bf16", "--mcf=x"]]:
            self.assertEqual(script(*words).returncode, 2, words)
        for words in [["verify", os.path.join(WORK, "nothing")], ["show", WORK], ["show", SCRIPT]]:
            done = script(*words)
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stderr, r"^checkpoint.py: error: [^\n]*\n$")


class Damaged(CheckpointTest):
    """What a bad disk does: nothing is sealed again."""

    def test_every_file(self):
        names = [MODEL, "config.json", RANK0, RANK1]
        r = random.Random(1)
        for name in names:
            size = len(read(os.path.join(example(), name)))
            with self.broken(example(), name, sealed=False) as folder:
                os.remove(os.path.join(folder, name))
            for kept in [0, 1, 7, 8, 9, size // 2, size - 1]:
                with self.broken(example(), name, "bytes, expected", sealed=False, name=kept) as folder:
                    os.truncate(os.path.join(folder, name), kept)
            with self.broken(example(), name, "bytes, expected", sealed=False) as folder:
                write(os.path.join(folder, name), read(os.path.join(folder, name)) + b"\0")
            for at in [0, size - 1, *(r.randrange(size) for _ in range(10))]:
                with self.broken(example(), name, "CRC-32", sealed=False, name=at) as folder:
                    self.flip(os.path.join(folder, name), at, 1 << r.randrange(8))

    @staticmethod
    def flip(path, at, mask):
        data = bytearray(read(path))
        data[at] ^= mask
        write(path, data)

    def test_state(self):
        path, data = "state.json", read(os.path.join(example(), "state.json"))
        folder = new_folder()
        shutil.copytree(example(), folder)
        for at in range(len(data)):
            with self.subTest(at=at):
                write(os.path.join(folder, path), data[:at] + bytes([data[at] ^ 1]) + data[at + 1:])
                self.refused(folder, path)
                write(os.path.join(folder, path), data[:at])
                self.refused(folder, path)
        write(os.path.join(folder, path), data + b"\n")
        self.refused(folder, path)
        os.remove(os.path.join(folder, path))
        self.refused(folder, "no complete checkpoint")

    def test_no_file_at_all(self):
        for name in [MODEL, "config.json", RANK0, "state.json"]:
            for kind in ["folder", "pipe", "link"]:
                with self.broken(example(), name, sealed=False) as folder:
                    path = os.path.join(folder, name)
                    os.remove(path)
                    {"folder": os.mkdir, "pipe": os.mkfifo, "link": lambda p: os.symlink("/dev/zero", p)}[kind](path)

    def test_command_line(self):
        folder = new_folder()
        shutil.copytree(example(), folder)
        self.flip(os.path.join(folder, RANK1), 1000, 4)
        done = script("verify", folder)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertRegex(done.stderr, rf"^checkpoint.py: error: [^\n]*{RANK1}: its CRC-32 is [^\n]*\n$")


class Hostile(CheckpointTest):
    """Sizes and checksums are right again, so that what is inside is looked at."""

    def test_state_fields(self):
        wrong = [None, True, -1, 1.5, 10**18, [], {}, "x", ["x"], {"x": 1}]
        good = {"version": ["x"], "data": ["x", {}, {"x": 1}], "flags": [{}], "spikes": [{}]}
        for field in read_state(example()):
            for bad in [x for x in wrong if x not in good.get(field, [])]:
                with self.broken(example("bf16", ()), "state.json", f"'{field}'", sealed=False, name=bad) as folder:
                    state = read_state(folder)
                    state[field] = bad
                    write_state(folder, state)
            if field in ("spikes", "model"):
                continue  # may be absent
            with self.broken(example("bf16", ()), "state.json", f"'{field}'", sealed=False) as folder:
                state = read_state(folder)
                del state[field]
                write_state(folder, state)

    def test_state_inside(self):
        def change(words, *path_and_value):
            *keys, last, bad = path_and_value
            with self.broken(example(), *words, sealed=False, name=bad) as folder:
                state = read_state(folder)
                functools.reduce(dict.__getitem__, keys, state)[last] = bad
                write_state(folder, state)

        size = read_state(example())["files"][MODEL]["bytes"]
        for bad in [None, -1, size + 1, 2**63, 1e3, "1", {}]:
            change(["'files'" if bad != size + 1 else MODEL], "files", MODEL, "bytes", bad)
        change(["state.json", "20 digits"], "files", MODEL, "bytes", 2**70)
        for bad in ["", "0123456", "0123456G", "0123ABCD", 5, None, [], "00000000"]:
            change([MODEL if bad == "00000000" else "'files'"], "files", MODEL, "crc32", bad)
        change(["'files'"], "files", MODEL, {"bytes": size})
        for name in ["../../../etc/passwd", "/etc/passwd", "optimizer.rank0003.safetensors", "x", "", "state.json"]:
            change(["'files' has no optimizer.rank0002"], "files", name, {"bytes": 1, "crc32": "00000000"})
        change(["step"], "step", STEP + 1)
        change(["'updates'"], "updates", STEP + 1)
        change(["config.json"], "model", "layers", L + 1)
        change(["'spikes'"], "spikes", "loss", ["x"])
        change(["'flags'"], "flags", "steps", 5)
        change(["flag precision"], "flags", "precision", "fp8")
        change(["flag mcf"], "flags", "mcf", "loose")
        change([RANK0, "found the tensor 'lockstep.collage_light"], "flags", "lockstep", "")
        change([RANK0, "found no tensor lockstep.bf16."], "flags", "lockstep", "bf16")
        for bad in ["bf17", "bf16:x", "bf16,bf16", "../x", "bf16:strict:strict", "bf16:0,bf16:1"]:
            change(["flag lockstep"], "flags", "lockstep", bad)
        change(["config.json", "torch_dtype"], "precision", "fp32")
        change([RANK0, "wte.weight.v.lo"], "precision", "collage_light")
        change([RANK0, "wte.weight.rem"], "precision", "bf16_rem16")

    def text(self, words, text, name="state.json"):
        with self.broken(example(), name, *words, sealed=name != "state.json", name=text[:40]) as folder:
            write(os.path.join(folder, name), text)
            if name == "state.json":
                end = max(text.rfind(b',\n  "checksum"'), 0)
                seal = b',\n  "checksum": "%08x"\n}\n' % zlib.crc32(text[:end])
                write(os.path.join(folder, name), text[:end] + seal)

    def test_json(self):
        state, config = (read(os.path.join(example(), name)) for name in ("state.json", "config.json"))
        for start in [b'{\n  "x": ' + b"[" * 100000, b'{\n  "x": ' + b'{"x":' * 100000, b'{\n  "x": NaN',
                      b'{\n  "x": 1e999', b'{\n  "x": ' + b"9" * 5000, b'{\n  "x": "\xff"', b'{\n  "x": "\\ud800"',
                      b'{\n  "x": 1,\n  "x": 1', b'{\n  "x": "a\nb"', b"\xef\xbb\xbf{\n", b"\0", b"[1", b'{\n  "x": ']:
            self.text(["JSON"], start + state[1:])
        for text in [b"", b"[]", b"5", b'"x"', b"{", b"[" * 100000, config + b"x", config.replace(b"6", b"NaN"),
                     config[:-2] + b',"n_embd": 6}', b"\xff" + config]:
            self.text(["JSON"], text, "config.json")
        for old, new in [(b'"n_embd": 6', b'"n_embd": 0'), (b'"n_embd": 6', b'"n_embd": 999999999'),
                         (b'"n_embd": 6', b'"n_embd": -6'), (b'"n_embd": 6', b'"n_embd": 6.0'),
                         (b'"n_embd": 6', b'"n_embd": true'), (b'"n_embd": 6', b'"n_embd": "6"'),
                         (b'"n_layer": 1', b'"n_layer": 1000000'), (b'"n_layer": 1', b'"x": 1'),
                         (b"bfloat16", b"float32"), (b'"n_layer": 1', b'"n_layer": 2'),
                         (b'"n_head": 2', b'"n_head": 4')]:
            with self.broken(example(), name=new) as folder:
                write(os.path.join(folder, "config.json"), config.replace(old, new))

    def test_headers(self):
        """Of both kinds of file: what is stated about a tensor is changed."""
        def change(words, edit, name=MODEL, source=None):
            with self.broken(source or example(), name, *words, name=str(words)) as folder:
                path = os.path.join(folder, name)
                header, data = taken_apart(read(path))
                data = edit(header, next(key for key in header if key != "__metadata__")) or data
                write(path, with_header(json.dumps(header), data))

        def field(name, bad):
            return lambda header, first: header[first].update({name: bad})

        for name in [MODEL, RANK0]:
            for bad in [[-1, C], [2**62, 4], [2**63, 2**63], [10**30], [float(VOCAB), C], [True, C], "7", None,
                        [[7], C], [7] * 9, {"7": C}, [VOCAB * C * 2**64], [0, 2**62], [VOCAB, C + 1]]:
                change([], field("shape", bad), name)
            for bad in [[0], [0, 1, 2], [-2, 82], [84, 0], [0, 2**63], [0, 2**64], [0, 10**30], "x", None, [0, 84.0],
                        [False, 84], [0, 82], [2, 86], [1, 85]]:
                change([], field("data_offsets", bad), name)
            for bad in ["X", "F8", "", None, 5, ["BF16"], "F64", "I16"]:
                change([], field("dtype", bad), name)
            change(["expected dtype, shape"], lambda header, first: header.update({first: [1]}), name)
            change(["expected dtype, shape"], field("path", "/etc/passwd"), name)
            change(["expected dtype, shape"], lambda header, first: header[first].pop("dtype") and None, name)
            change(["__metadata__"], lambda header, _: header.update({"__metadata__": {"x": 1}}), name)
            change(["__metadata__"], lambda header, _: header.update({"__metadata__": []}), name)
            change(["found no tensor", "wte.weight"], lambda header, first: header.update(
                {"../../x": header.pop(first)}), name)
            change(["../../y"], lambda header, _: header.update(
                {"../../y": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}), name)

        def overlap(header, first):
            header["wpe.weight"]["data_offsets"] = [0, 2 * POSITIONS * C]
        change(["overlaps"], overlap)

        def boundary(header, _):  # no hole, but a number of the one belongs to the other
            header["wte.weight"]["data_offsets"][1] += 2
            header["wpe.weight"]["data_offsets"][0] += 2
        change(["wte.weight", "86 bytes, expected 84 for BF16 of shape '[7, 6]'"], boundary)
        change(["[84, 0]", "but the file has"], field("data_offsets", [84, 0]))

        def moved(by):
            def edit(header, _):
                header["ln_f.bias"]["data_offsets"] = [x + by for x in header["ln_f.bias"]["data_offsets"]]
                return b"\0" * (header["ln_f.bias"]["data_offsets"][1])
            return edit
        change(["there is a hole"], moved(2))
        change(["overlaps"], moved(-2))

        def swapped(header, _):
            a, b = header["h.0.attn.c_attn.weight"], header["h.0.mlp.c_fc.weight"]
            a["shape"], b["shape"] = a["shape"][::-1], b["shape"][::-1]
        change(["h.0.attn.c_attn.weight", "(18, 6)", "(6, 18)"], swapped)
        change(["found the tensor 'lm_head"], lambda header, _: header.update(
            {"lm_head.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}))
        change(["has shape (42,)"], field("shape", [VOCAB * C]), RANK0)
        change(["F16"], field("dtype", "F16"), RANK0)
        change(["shadow.v"], lambda header, _: header["shadow.v"].update(shape=[3, 1]), RANK0)
        change(["shadow.m is BF16"], lambda header, _: header["shadow.m"].update(dtype="BF16", shape=[12]), RANK0)

    def test_raw(self):
        raw = read(os.path.join(example(), RANK0))
        (n,) = struct.unpack("<Q", raw[:8])
        header, data = taken_apart(raw)
        text, pad = json.dumps(header), b" " * 4
        nested = '{"x":' * 9000
        files = {
            "no bytes": b"", "seven": raw[:7], "only a length": raw[:8], "half a header": raw[:8 + n // 2],
            "a huge header": struct.pack("<Q", 2**63) + raw[8:], "all ones": b"\xff" * 8 + raw[8:],
            "no header": struct.pack("<Q", 0) + raw[8:], "beyond the end": struct.pack("<Q", len(raw)) + raw[8:],
            "cut header": struct.pack("<Q", n - 1) + raw[8:], "more data": raw + b"\0", "less data": raw[:-1],
            "a list": with_header("[]", data), "null": with_header("null", data), "no tensors": with_header("{}", b""),
            "twice": with_header(text[:-1] + ', "wte.weight.m": {}}', data),
            "twice inside": with_header(text.replace('"dtype"', '"dtype": "BF16", "dtype"', 1), data),
            "deep lists": with_header("[" * 40000, data), "deep objects": with_header(nested, data),
            "deep in a shape": with_header(text.replace("[7, 6]", "[" * 30000 + "]" * 30000, 1), data),
            "not UTF-8": raw[:9] + b"\xff" + raw[10:], "NaN": with_header(text.replace("[7, 6]", "NaN", 1), data),
            "spaces before": struct.pack("<Q", n) + pad + raw[8:-4],
        }
        for name, raw_file in files.items():
            with self.broken(example(), RANK0, name=name) as folder:
                write(os.path.join(folder, RANK0), raw_file)

    def test_rank_files(self):
        def without(folder, name):
            os.remove(os.path.join(folder, name))
            state = read_state(folder)
            del state["files"][name]
            write_state(folder, state)

        whole = make_checkpoint("collage_plus", (CUT,))
        with self.broken(whole, RANK0, "h.0.attn.c_attn.weight", "(18, 6)") as folder:
            without(folder, RANK1)
        with self.broken(whole, f"'files' has no {RANK0}", sealed=False) as folder:
            without(folder, RANK0)
        with self.broken(whole, "rank0002", "state.json does not list it") as folder:
            shutil.copy(os.path.join(folder, RANK1), os.path.join(folder, "optimizer.rank0002.safetensors"))
        with self.broken(whole, RANK1, "parts of wte.weight.lo", "84 elements, expected 42") as folder:
            shutil.copy(os.path.join(folder, RANK0), os.path.join(folder, RANK1))

        def edit(folder, name, change):
            tensors = tensors_of(os.path.join(folder, name))
            change(tensors)
            write(os.path.join(folder, name), safetensors(tensors))
        cut = "h.0.attn.c_attn.weight.m"
        with self.broken(whole, cut, "has shape (91, 1)") as folder:
            edit(folder, RANK1, lambda t: t.update({cut: ("BF16", (91, 1), t[cut][2])}))
        with self.broken(whole, cut, "106 elements, expected 108") as folder:
            edit(folder, RANK1, lambda t: t.update({cut: ("BF16", (89,), t[cut][2][4:])}))
        with self.broken(whole, cut, "is F32, expected BF16") as folder:
            edit(folder, RANK1, lambda t: t.update({cut: ("F32", (91,), t[cut][2] * 2)}))
        with self.broken(whole, "parts of h.0.attn.c_attn.weight", "not the same in all states") as folder:
            edit(folder, RANK0, lambda t: t.update({cut: ("BF16", (16,), t[cut][2][2:])}))
            edit(folder, RANK1, lambda t: t.update({cut: ("BF16", (92,), t[cut][2] + b"\0\0")}))
        with self.broken(whole, RANK0, "found no tensor ln_f.bias.v, nor in") as folder:
            edit(folder, RANK1, lambda t: t.pop("ln_f.bias.v"))
        with self.broken(example(), RANK1, "found no tensor shadow.m") as folder:
            edit(folder, RANK1, lambda t: t.pop("shadow.m"))

    def test_any_bytes(self):
        """Whatever is in a file, verify refuses it or finds it good; nothing else may happen."""
        r = random.Random(2)
        words = [b"[", b"{", b"-", b"null", b"1e9", b"99999999999", b'"', b",", b"true", b"\xff", b"\\u0000", b"BF16"]
        folder = new_folder()
        shutil.copytree(example(), folder)
        texts = {name: read(os.path.join(folder, name)) for name in [MODEL, "config.json", RANK0, "state.json"]}
        refused = 0
        for _ in range(400):
            name = r.choice(list(texts))
            data, size = texts[name], len(texts[name])
            header = min(size, 9000) if name == RANK0 else min(size, 1200)
            for _ in range(r.randint(1, 3)):
                at = r.randrange(header)
                data = data[:at] + r.choice(words + [bytes([r.randrange(256)])]) + data[at + r.randint(0, 8):]
            write(os.path.join(folder, name), data)
            if name == "state.json":
                end = max(data.rfind(b',\n  "checksum"'), 0)
                write(os.path.join(folder, name), data[:end] + b',\n  "checksum": "%08x"\n}\n' % zlib.crc32(data[:end]))
            else:
                reseal(folder)
            try:
                output_of(checkpoint.verify, folder)
            except checkpoint.Problem:
                refused += 1
            for changed in {name, "state.json"}:
                write(os.path.join(folder, changed), texts[changed])
        self.assertGreater(refused, 300)

    def test_little_memory(self):
        """Hostile sizes are refused, and not asked for."""
        def limited():
            resource.setrlimit(resource.RLIMIT_AS, (64 << 20, 64 << 20))

        source, size = make_checkpoint("bf16"), 80 << 20
        config = json.loads(read(os.path.join(source, "config.json")))
        largest = {"n_layer": 4096, "n_embd": 262144, "n_head": 4096, "n_positions": 1048576, "vocab_size": 16777216}
        for command, length, sizes in [("verify", 2**62, {}), ("show", size - 8, {}), ("show", size - 8, largest)]:
            folder = new_folder()
            shutil.copytree(source, folder)
            text = json.dumps({**config, **sizes}).encode()
            write(os.path.join(folder, "config.json"), text)
            with open(os.path.join(folder, MODEL), "r+b") as f:
                f.write(struct.pack("<Q", length))
                f.truncate(size)  # sparse: takes no room on the disk
            state = read_state(folder)
            del state["model"]
            state["files"][MODEL].update(bytes=size, crc32=crc_of(os.path.join(folder, MODEL)))
            state["files"]["config.json"].update(bytes=len(text), crc32=f"{zlib.crc32(text):08x}")
            write_state(folder, state)
            done = script(command, folder, preexec_fn=limited)
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stderr, rf"^checkpoint.py: error: [^\n]*{MODEL}: states a header of [^\n]*\n$")


def crc_of(path):
    crc = 0
    with open(path, "rb") as f:
        while piece := f.read(1 << 20):
            crc = zlib.crc32(piece, crc)
    return f"{crc:08x}"


@unittest.skipUnless(python_with_numpy(), "convert needs NumPy")
class Convert(CheckpointTest):
    def compare(self, source, old, result, new, printed):
        """The result holds what the definitions say, and the words say what was rounded."""
        output_of(checkpoint.verify, result)
        before, after = elements_of(source, old), elements_of(result, new)
        types = {"theta": theta_type(new), **STATES[new]}
        changed = [0, 0, 0]
        for i, (e, found) in enumerate(zip(before, after)):
            wanted = expected_element(e, old, new)
            self.assertEqual(set(wanted), set(found))
            for name, x in wanted.items():
                if not same(found[name], x, types[name]):
                    self.fail(f"element {i}, {name}: found {found} from {e}, expected {wanted}")
            for j, (was, now) in enumerate(zip(full(old, e), full(new, wanted))):
                changed[j] += was != now
        for what, n in zip(["weights", "m", "v"], changed):
            words = f"rounded in {100 * n / ELEMENTS:.3g} % of all, error " if n else "exact\n"
            self.assertIn(f"  {what} {words}", printed)
        state, was = read_state(result), read_state(source)
        self.assertEqual((state.pop("precision"), state["flags"].pop("precision")), (new, new))
        del was["precision"], was["flags"]["precision"], was["files"], state["files"]
        self.assertEqual(state, was)
        self.assertEqual(json.loads(read(os.path.join(result, "config.json")))["torch_dtype"],
                         "float32" if new == "fp32" else "bfloat16")

    def test_any_to_any(self):
        sources = {(name, cuts): make_checkpoint(name, cuts) for name in STATES for cuts in [(), (CUT,)]}
        cases = [(old, new, (CUT,)) for old in STATES for new in STATES]
        cases += [(old, new, ()) for old, new in zip(STATES, list(STATES)[3:] + list(STATES)[:3])]
        jobs = [(sources[old, cuts], new_folder(), new, None) for old, new, cuts in cases]
        for (old, new, cuts), job, printed in zip(cases, jobs, convert_all(jobs)):
            with self.subTest(old=old, new=new, cuts=cuts):
                self.compare(job[0], old, job[1], new, printed)
                self.assertEqual(sorted(os.listdir(job[0])), sorted(os.listdir(job[1])))
                if old == new:
                    for name in os.listdir(job[0]):
                        self.assertEqual(read(os.path.join(job[0], name)), read(os.path.join(job[1], name)), name)

    def test_there_and_back(self):
        """Bit for bit the same where the precision in between holds all that the first can."""
        exact = [("collage_light", "collage_plus"), ("collage_light", "bf16_kahan"), ("bf16_kahan", "collage_plus"),
                 ("bf16", "bf16_sr"), ("bf16", "fp32_optim"), ("bf16", "bf16_int8"), ("bf16", "bf16_rem16"),
                 ("bf16", "fp32_master"), ("bf16", "collage_plus"), ("bf16", "fp32"), ("fp32_optim", "fp32_master"),
                 ("bf16_rem16", "fp32_master"), ("bf16_rem16", "fp32"), ("fp32_optim", "fp32"), ("fp32_master", "fp32")]
        # Without infinities: the low part of one is no number.
        sources = {old: make_checkpoint(old, (CUT,), random_elements(old, special=())) for old in STATES}
        there = [(sources[old], new_folder(), new, None) for old, new in exact]
        back = [(job[1], new_folder(), old, None) for (old, _), job in zip(exact, there)]
        for (old, new), out, (_, result, *_), printed in zip(exact, there, back, convert_all(there + back)):
            with self.subTest(old=old, new=new):
                for what in ["weights", "m", "v"]:
                    self.assertIn(f"  {what} exact\n", printed)
                for name in [MODEL, RANK0, RANK1, "config.json", "state.json"]:
                    self.assertEqual(read(os.path.join(sources[old], name)), read(os.path.join(result, name)), name)

    def test_what_is_rounded(self):
        e = {"theta": stored(1.0, "BF16"), "master": 1.0, "m": 0.0, "v": 1.0}
        source = make_checkpoint("fp32_master", (), [{**e, "v": 1 + 2.0**-9 * (i % 2)} for i in range(ELEMENTS)])
        (printed,) = convert_all([(source, new_folder(), "bf16", None)])
        # Half of the elements lose 2^-9 of about 1: 2^-9 / sqrt(2) of the norm. All of m is 0.
        self.assertIn("  weights exact\n  m exact\n  v rounded in 50 % of all, error 1.4e-03 of the norm\n", printed)

    def test_what_is_not_its_own_is_copied(self):
        result = new_folder()
        convert_all([(example(), result, "bf16_rem16", "as-released")])
        output_of(checkpoint.verify, result)
        for name in [RANK0, RANK1]:
            before, after = (tensors_of(os.path.join(folder, name)) for folder in (example(), result))
            others = [key for key in before if key.startswith(("lockstep.", "shadow."))]
            self.assertGreater(len(others), 10)
            self.assertEqual([key for key in after if key.startswith(("lockstep.", "shadow."))], others)
            for key in others:
                self.assertEqual(before[key], after[key])
        state = read_state(result)
        self.assertEqual((state["mcf"], state["flags"]["mcf"]), ("as-released",) * 2)

    def test_command_line(self):
        parent = tempfile.mkdtemp(dir=WORK)
        target = os.path.join(parent, "run", "checkpoints", f"step_{STEP:08d}")
        done = script("convert", example(), target, "--precision=bf16", "--mcf=fused")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("collage_plus -> bf16, mcf fused\n  weights rounded in ", done.stdout)
        self.assertTrue(all(len(line) < 120 for line in done.stdout.replace(target, "").split("\n")))
        self.assertEqual(os.listdir(os.path.dirname(target)), [os.path.basename(target)])
        output_of(checkpoint.verify, os.path.join(parent, "run"))

        def refused(words, *arguments, **kwargs):
            before = sorted(os.listdir(parent))
            done = script("convert", *arguments, python=python_with_numpy(), **kwargs)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertRegex(done.stderr, rf"^checkpoint.py: error: [^\n]*{words}[^\n]*\n$")
            self.assertEqual(sorted(os.listdir(parent)), before)

        elsewhere = os.path.join(parent, "elsewhere")
        refused("there already", example(), target, "--precision=bf16")
        refused("step_00000012", example(), os.path.join(parent, "step_00000013"), "--precision=bf16")
        refused("no run could go on", example(), elsewhere, "--precision=fp32")
        for flags in [{"switch": "15:collage_light"}, {"grad-accum": "pair"}]:
            refused("no run could go on", make_checkpoint("bf16", flags=flags), elsewhere, "--precision=fp32")
        broken = new_folder()
        shutil.copytree(example(), broken)
        Damaged.flip(os.path.join(broken, RANK1), 5000, 1)
        refused("its CRC-32 is", broken, elsewhere, "--precision=bf16")
        refused("File too large", example(), elsewhere, "--precision=bf16",
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)))
        write(os.path.join(parent, "file"), b"")
        refused("file", example(), os.path.join(parent, "file", "x"), "--precision=bf16")
        hidden = tempfile.mkdtemp(dir=WORK)
        write(os.path.join(hidden, "numpy.py"), b"raise ImportError")
        refused("needs NumPy: install", example(), elsewhere, "--precision=bf16",
                env={**os.environ, "PYTHONPATH": hidden})


@unittest.skipUnless(python_with_numpy(), "convert needs NumPy")
class WithTheProgram(CheckpointTest):
    """Real checkpoints: --resume makes the same of a converted one as of the first with --precision."""

    def test_resume(self):
        program.set_up()
        self.addCleanup(program.tear_down)

        def train(out, *flags):
            done = program.run(*program.TINY, *program.data_flags(), "--steps=4", "--val-every=0", "--out=" + out,
                               *flags)
            self.assertEqual(done.returncode, 0, done.stderr)
            return done.stdout.decode()

        def step(run, n):
            return os.path.join(run, "checkpoints", f"step_{n:08d}")

        def assert_equal(a, b):
            self.assertEqual(sorted(os.listdir(a)), sorted(os.listdir(b)))
            for name in os.listdir(a):
                self.assertEqual(read(os.path.join(a, name)), read(os.path.join(b, name)), name)

        cases = [("collage_plus", "fp32_master"), ("fp32", "bf16_int8"), ("bf16_kahan", "bf16_rem16")]
        for old, new in cases:
            with self.subTest(old=old, new=new):
                one, two, same_again = (tempfile.mkdtemp(dir=WORK) for _ in range(3))
                train(one, "--precision=" + old, "--checkpoint-every=2")
                output_of(checkpoint.verify, one)
                shutil.rmtree(step(one, 4))
                (printed, _) = convert_all([(one, step(two, 2), new, None), (one, step(same_again, 2), old, None)])
                assert_equal(step(one, 2), step(same_again, 2))
                shutil.copy(os.path.join(one, "metrics.jsonl"), two)
                said = train(one, "--resume", "--precision=" + new)
                train(two, "--resume")
                assert_equal(step(one, 4), step(two, 4))
                for line in printed.splitlines()[1:]:
                    self.assertIn(line.strip(), said)


if __name__ == "__main__":
    if os.environ.get("CI") and not python_with_numpy():
        sys.exit("no Python with NumPy (scripts/setup.sh installs it): convert would go untested")
    unittest.main()
