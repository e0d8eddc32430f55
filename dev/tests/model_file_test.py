#!/usr/bin/env python3
"""--model with files, by the real binary: every format gives the same loss, and what does not fit is one line.

  TRAIN_GPT=./train_gpt python3 dev/tests/model_file_test.py
"""
import json
import os
import shutil
import unittest

from model_writer import Model, write_safetensors
from program import (T, TINY, VOCAB, ProgramTest, Run, data_flags, path, planned, read_metrics, run, set_up, tear_down,
                     text_ids, write_shard)

MODEL = None


def setUpModule():
    global MODEL
    set_up()
    MODEL = Model(C=32, max_T=T, V=VOCAB)
    MODEL.write_folder(path("model"), "BF16")


def tearDownModule():
    tear_down()


def val_loss(*flags):
    losses = Run(("--eval-only", "--val-sequences=0") + flags).val_losses()
    assert len(losses) == 1
    return losses[0]


class GoodFiles(ProgramTest):
    def test_every_file_gives_the_same_loss(self):
        # The weights are exact in each format, so the same bits go into the same operations.
        files = ["--model=" + path("model"), "--model=" + path("model") + "/",
                 "--model=" + path("model/model.safetensors")]
        for dtype in ["F32", "F16", "BF16"]:
            for prefix in ["", "transformer."]:
                files.append("--model=" + MODEL.write_folder(path(f"{dtype}{prefix}"), dtype, prefix))
        for version in [3, 5]:
            files.append("--model=" + MODEL.write_bin(path(f"v{version}.bin"), version))
        files.append("--model=" + write_safetensors(path("alone.safetensors"), list(MODEL.tensors("F32"))))
        for precision in ["collage_plus", "fp32"]:
            losses = {file: val_loss(file, "--precision=" + precision) for file in files}
            self.assertEqual(len(set(losses.values())), 1, losses)
            self.assertNotEqual(losses[files[0]], val_loss("--precision=" + precision), "the file was not read")

    def test_a_bf16_model_has_the_files_weights_rounded(self):
        # Each weight moved by less than half a step of bf16, which fp32 keeps and bf16 does not.
        moved = Model(C=32, max_T=T, V=VOCAB)
        for w in moved.weights.values():
            w[:] = [x * (1 + 2**-10) for x in w]
        flag = "--model=" + moved.write_folder(path("moved"), "F32")
        self.assertEqual(val_loss(flag), val_loss("--model=" + path("model")))
        self.assertNotEqual(val_loss(flag, "--precision=fp32"),
                            val_loss("--model=" + path("model"), "--precision=fp32"))

    def test_fewer_positions(self):
        short = Model(C=32, max_T=T, V=VOCAB)
        short.max_T, short.shapes["wpe.weight"] = 8, [8, 32]
        short.weights["wpe.weight"] = MODEL.weights["wpe.weight"][:8 * 32]
        a = val_loss("--model=" + path("model"), "--seq-len=8")
        self.assertEqual(a, val_loss("--model=" + short.write_folder(path("short"), "F16"), "--seq-len=8"))
        self.refused(2, "--seq-len: found 16, but", ["--model=" + path("short")])

    def test_training_goes_on_from_it(self):
        flags = ("--model=" + path("model"), "--steps=2", "--val-every=1")
        first = Run(flags)
        self.assertIn("weights from this file, BF16; 16 of its 16 positions", first.stdout)
        self.assertEqual(first.column("loss"), Run(flags + ("--seed=1337",)).column("loss"))
        self.assertEqual(Run(flags + ("--lr=0", "--weight-decay=0")).val_losses(), [val_loss(flags[0])] * 2)

    def test_a_resumed_run_needs_the_file_no_more(self):
        shutil.copytree(path("model"), path("gone"))
        flags = ("--model=" + path("gone"), "--lr-schedule=constant", "--val-every=0")
        whole = Run(flags + ("--steps=4",))
        begun = Run(flags + ("--steps=2", "--checkpoint-every=2"))
        shutil.rmtree(path("gone"))
        done = run("--resume", "--out=" + begun.out, "--steps=4")
        self.assertEqual(done.returncode, 0, done.stderr)
        losses = [step["loss"] for step in read_metrics(os.path.join(begun.out, "metrics.jsonl"))[1:]]
        self.assertEqual(losses, whole.column("loss"))

    def test_a_checkpoint_is_such_a_folder(self):
        begun = Run(("--steps=2", "--checkpoint-every=2", "--val-sequences=0", "--val-every=2"))
        folder = os.path.join(begun.out, "checkpoints", "step_00000002")
        self.assertEqual([val_loss("--model=" + folder)], begun.val_losses())

    def test_vocabularies(self):
        # A shard that states none, and a model with more tokens than the shards'.
        wide = Model(C=32, max_T=T, V=300)
        wide_run = Run(("--eval-only", "--model=" + wide.write_folder(path("wide"), "F32")))
        self.assertIn("vocabulary 300", wide_run.stdout)
        small = Model(C=32, max_T=T, V=256).write_folder(path("small"), "F32")
        self.refused(2, "has a vocabulary of 256, the shards state 257", ["--model=" + small])
        self.refused(2, "--vocab-size: found 300, but", ["--model=" + path("model"), "--vocab-size=300"])
        unnamed = write_shard("unnamed.bin", text_ids(4), vocab=0)
        done = run(*TINY, "--eval-only", "--val-data=" + unnamed, "--model=" + path("model"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(b"vocabulary 257", done.stdout)

    def test_a_plan(self):
        self.assertIn("L = 1, C = 32, NH = 2, T = 16, V = 257", planned("--model=" + path("model")))

    def test_a_descriptor_is_no_folder(self):
        os.mkdir(path("d12"))
        self.assertEqual(planned("--model=d12"), planned("--model=gpt2:124M").replace("gpt2:124M", "d12"))
        shutil.rmtree(path("d12"))


class Refused(ProgramTest):
    def bad(self, names, file, *flags):
        self.refused(1, names, ["--model=" + file, *flags])

    def test_flags_that_contradict(self):
        for flag, has in {"layers=2": 1, "channels=64": 32, "heads=4": 2, "seq-len=32": 16}.items():
            name, value = flag.split("=")
            self.refused(2, f"--{name}: found {value}, but", ["--model=" + path("model"), "--" + flag])
            self.refused(2, f"has {has}", ["--model=" + path("model"), "--" + flag])
        alone = write_safetensors(path("no_config.safetensors"), list(MODEL.tensors("F32")))
        done = run("--model=" + alone, *data_flags(), "--eval-only")
        self.assertEqual((done.returncode, done.stderr.count(b"\n")), (2, 1), done.stderr)
        self.assertIn(b"--heads: not given, and", done.stderr)
        self.refused(2, "--channels: found 32 channels and 3 heads", ["--model=" + alone, "--heads=3"])

    def test_nothing_there(self):
        for name in ["no/such", "none.bin", "none.safetensors"]:
            self.bad("No such file", path(name))
        os.mkdir(path("empty"))
        self.bad("empty/model.safetensors", path("empty"))
        shutil.copytree(path("model"), path("bare"))
        os.remove(path("bare/config.json"))
        self.bad("bare/config.json", path("bare"))

    def test_other_models(self):
        folder = path("other")
        for key, value in {"activation_function": "gelu", "model_type": "llama", "tie_word_embeddings": False,
                           "layer_norm_epsilon": 1e-6, "n_layer": 2, "n_head": 5}.items():
            MODEL.write_folder(folder, "F32", config=MODEL.config(**{key: value}))
            self.bad(f"config.json: {key} is '{json.dumps(value)}'", folder)
        tensors = list(MODEL.tensors("F32"))
        name, dtype, shape, data = tensors[0]
        untied = write_safetensors(path("untied.safetensors"),
                                   tensors + [("lm_head.weight", dtype, shape, data[:-1] + b"?")])
        self.bad("lm_head.weight differs from wte.weight", untied)
        more = write_safetensors(path("more.safetensors"), tensors + [("h.0.adapter", "F32", [0], b"")])
        self.bad("'h.0.adapter'", more)
        self.bad("no tensor ln_f.bias", write_safetensors(path("less.safetensors"), tensors[:-1]))

    def test_cut_short_or_damaged(self):
        for good in [path("model/model.safetensors"), MODEL.write_bin(path("good.bin"), 5)]:
            with open(good, "rb") as f:
                data = f.read()
            for size in [0, 1, 7, 8, 9, 32, 1023, 1024, 1025, len(data) // 2, len(data) - 1, len(data) + 1]:
                cut = path("cut" + os.path.splitext(good)[1])
                with open(cut, "wb") as f:
                    f.write((data + b"\0")[:size])
                self.bad("--model: ", cut)
                self.bad(cut, cut)


if __name__ == "__main__":
    unittest.main()
