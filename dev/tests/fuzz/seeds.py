#!/usr/bin/env python3
"""Writes the seed corpus: for each fuzz target a folder of small good files, and of files of many kinds of defects.

  python3 dev/tests/fuzz/seeds.py FOLDER

The same bytes each time. Standard library only.
"""
import json
import os
import struct
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from model_writer import Model, encode, write_safetensors  # noqa: E402


def save(target, name, data):
    folder = os.path.join(sys.argv[1], target)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, name), "wb") as f:
        f.write(data)


def written(write, *args):
    """What a function that takes a path writes."""
    path = os.path.join(sys.argv[1], "written")
    write(path, *args)
    with open(path, "rb") as f:
        data = f.read()
    os.remove(path)
    return data


def shards():
    for name, magic, version, width in [("narrow", 20240520, 1, "H"), ("wide", 20240801, 7, "I")]:
        for n in [1, 3, 40]:
            header = struct.pack("<256i", magic, version, n, 257, 99, *[0] * 251)
            save("shard", f"{name}_{n}", header + struct.pack(f"<{n}{width}", *[i * 7 % 257 for i in range(n)]))
    save("shard", "short", struct.pack("<256i", 20240520, 1, 3, *[0] * 253) + b"1234")
    save("shard", "beyond", struct.pack("<256i", 20240520, 1, 2, *[0] * 253) + struct.pack("<2H", 1, 65535))


def tokenizers():
    for tokens in [[b"a"], [b"a", b"bc", b"abc", b"\n" * 255], [bytes([i]) for i in range(256)]]:
        header = struct.pack("<256I", 20240328, 2, len(tokens), 0, *[0] * 252)
        save("tokenizer", f"tokens_{len(tokens)}", header + b"".join(bytes([len(t)]) + t for t in tokens))
    many = struct.pack("<256I", 20240328, 2, 1 << 22, 0, *[0] * 252)
    save("tokenizer", "many", many + b"\1a")


def headers(header, data=b"12345678"):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def safetensors():
    good = {"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]},
            "b": {"dtype": "I8", "shape": [4], "data_offsets": [4, 8]}}
    save("safetensors", "good", headers(good))
    save("safetensors", "empty", headers({}, b""))
    save("safetensors", "scalar", headers({"a": {"dtype": "F64", "shape": [], "data_offsets": [0, 8]}}))
    save("safetensors", "none", headers({"a": {"dtype": "BF16", "shape": [0, 5], "data_offsets": [0, 0]}}, b""))
    for name, shape, offsets in [("whole", [8], [0, 8]), ("product", [2**32, 2**32, 8], [0, 8]), ("hole", [1], [7, 8]),
                                 ("beyond", [16], [0, 16]), ("less", [4], [0, 4]), ("reversed", [8], [8, 0]),
                                 ("negative", [-8], [-8, 0]), ("float", [8.0], [0, 8.0])]:
        one = {"a": {"dtype": "U8", "shape": shape, "data_offsets": offsets}}
        save("safetensors", name, headers(one))
        save("safetensors", name + "_of_two", headers({**one, "b": good["b"]}))
    save("safetensors", "deep", headers(b"{" + b'"a":{' * 40 + b"[" * 40))
    name = rb'"\u0000\ud83d\ude00\n"'
    save("safetensors", "name", headers(b"{" + name + b':{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}'))


def models():
    model = Model(L=1, NH=1, C=1, max_T=1, V=2)
    for version in [3, 5]:
        data = written(model.write_bin, version)
        save("model_file", f"bin_{version}", data)
        save("model_file", f"bin_{version}_short", data[:-1])
        for word in range(2, 8):  # one more of each size
            at = 4 * word
            save("model_file", f"bin_{version}_{word}", data[:at] + bytes([data[at] + 1]) + data[at + 1:])
    for dtype in ["F32", "F16", "BF16"]:
        for prefix in ["", "transformer."]:
            data = written(write_safetensors, list(model.tensors(dtype, prefix)))
            save("model_file", f"{dtype}_{prefix}x", data)
            save("model_folder", f"{dtype}_{prefix}x", json.dumps(model.config()).encode() + b"\0" + data)
    tensors = list(model.tensors("F32"))
    extra = [("lm_head.weight",) + tensors[0][1:], ("h.0.attn.bias", "U8", [1, 1, 1, 1], b"\1"),
             ("h.0.attn.masked_bias", "F32", [], encode([-1e4], "F32"))]
    save("model_file", "tied_and_masks", written(write_safetensors, tensors + extra))
    more = dict(tie_word_embeddings=True, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False,
                reorder_and_upcast_attn=False, add_cross_attention=False, task_specific_params={"a": {"b": [1.5, "c"]}})
    data = written(write_safetensors, tensors)
    save("model_folder", "all_keys", json.dumps(model.config(**more)).encode() + b"\0" + data)
    save("model_folder", "deep", b'{"a":' + b"[" * 40 + b"\0" + data)
    save("model_folder", "number", b'{"model_type":"gpt2","n_head":1e999}\0' + data)


def states():
    file = {"bytes": 1, "crc32": "00000000"}
    state = {"format": "train_gpt checkpoint 1", "version": "0.1", "step": 2, "updates": 1, "precision": "collage_plus",
             "mcf": "strict", "files": {"model.safetensors": file, "config.json": file,
                                        "optimizer.rank0000.safetensors": file},
             "data": "x", "bad_steps_in_a_row": 0, "spikes": {"loss": [1.5], "grad_norm": [0.5, 2]},
             "flags": {"model": "d6", "steps": "4", "lr": "0.001", "batch-size": "2", "overfit-batch": "false",
                       "precision": "collage_plus"}}
    save("state", "good", json.dumps(state, indent=2)[:-2].encode())
    save("state", "deep", b'{"format":' + b"[" * 40)
    save("state", "number", b'{"step":1e999')


for write in [shards, tokenizers, safetensors, models, states]:
    write()
