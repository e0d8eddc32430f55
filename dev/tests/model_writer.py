"""Writes small GPT-2s as other programs do, for the tests. Standard library only."""
import json
import os
import random
import struct


def encode(values, dtype):
    """Little-endian bytes of floats; for BF16 they must be exact."""
    if dtype == "BF16":
        return b"".join(struct.pack("<f", x)[2:] for x in values)
    return struct.pack(f"<{len(values)}{'e' if dtype == 'F16' else 'f'}", *values)


def write_safetensors(path, tensors):
    """tensors: (name, dtype, shape, bytes), in the order of their data."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(t[3] for t in tensors))
    return path


class Model:
    """Random weights that F16 and BF16 hold exactly, (out, in) row-major, the spread of trained ones."""

    def __init__(self, L=1, NH=2, C=32, max_T=16, V=257, seed=1):
        self.L, self.NH, self.C, self.max_T, self.V = L, NH, C, max_T, V
        self.shapes = {"wte.weight": [V, C], "wpe.weight": [max_T, C]}
        for kind, shape in {"ln_1.weight": [C], "ln_1.bias": [C], "attn.c_attn.weight": [3 * C, C],
                            "attn.c_attn.bias": [3 * C], "attn.c_proj.weight": [C, C], "attn.c_proj.bias": [C],
                            "ln_2.weight": [C], "ln_2.bias": [C], "mlp.c_fc.weight": [4 * C, C],
                            "mlp.c_fc.bias": [4 * C], "mlp.c_proj.weight": [C, 4 * C],
                            "mlp.c_proj.bias": [C]}.items():
            for l in range(L):  # kind by kind, as llm.c orders them
                self.shapes[f"h.{l}.{kind}"] = shape
        self.shapes["ln_f.weight"] = self.shapes["ln_f.bias"] = [C]
        source = random.Random(seed)
        self.weights = {}
        for name, shape in self.shapes.items():
            n = shape[0] * (shape[1] if len(shape) == 2 else 1)
            one = 1 if "ln_" in name and name.endswith("weight") else 0
            self.weights[name] = [one + source.randrange(-31, 32) / 128 for _ in range(n)]

    def transposed(self, name):
        """As Hugging Face's Conv1D has it: (in, out)."""
        rows, columns = self.shapes[name]
        w = self.weights[name]
        return [w[r * columns + c] for c in range(columns) for r in range(rows)]

    def tensors(self, dtype, prefix=""):
        for name, shape in self.shapes.items():
            conv = len(shape) == 2 and name.startswith("h.")
            yield (prefix + name, dtype, shape[::-1] if conv else shape,
                   encode(self.transposed(name) if conv else self.weights[name], dtype))

    def config(self, **more):
        return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": self.L, "n_head": self.NH,
                "n_embd": self.C, "n_positions": self.max_T, "n_ctx": self.max_T, "vocab_size": self.V,
                "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_inner": None, **more}

    def write_folder(self, folder, dtype, prefix="", config=None):
        """model.safetensors and config.json. Returns the folder."""
        os.makedirs(folder, exist_ok=True)
        write_safetensors(os.path.join(folder, "model.safetensors"), list(self.tensors(dtype, prefix)))
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
            json.dump(self.config() if config is None else config, f)
        return folder

    def write_bin(self, path, version):
        """llm.c's: 3 is fp32, 5 is bf16."""
        Vp, dtype = (self.V + 127) // 128 * 128, "F32" if version == 3 else "BF16"
        header = [20240326, version, self.max_T, self.V, self.L, self.NH, self.C, Vp]
        with open(path, "wb") as f:
            f.write(struct.pack("<256i", *header, *[0] * (256 - len(header))))
            for name, values in self.weights.items():
                f.write(encode(values, dtype))
                if name == "wte.weight":
                    f.write(encode([0.0] * (Vp - self.V) * self.C, dtype))
        return path
