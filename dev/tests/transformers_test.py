"""Models go to Hugging Face's transformers and come back: the same names, logits, losses and bytes.

Run by transformers_check.sh, which installs the library. Truth is transformers in float64. A result of ours in some type
may be off from it twice as far as transformers is in the same type, which rounds at other places, and in any case by
some unit roundoffs of the largest value.
"""
import copy
import os
import struct
import subprocess
import unittest
import warnings

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import transformers
    from safetensors.torch import load_file
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

import program
from program import T, VOCAB, ProgramTest, Run, path, set_up, tear_down

# Layers, channels and heads that differ from each other and from all defaults.
SHAPE = ("--layers=3", "--channels=48", "--heads=4")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
UNIT = {"fp32": 2**-24, "bf16": 2**-8}


def setUpModule():
    transformers.logging.set_verbosity_error()
    torch.manual_seed(1)
    set_up()


def tearDownModule():
    tear_down()


def ids():
    """Some text, as long as the model has positions."""
    return program.text_ids(1)[:T]


def loaded(folder, **kwargs):
    """A folder's model; nothing of it may be missing, too much or of another shape."""
    model, info = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True, **kwargs)
    assert not any(info.values()), info
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([ids()])).logits[0].double().numpy()


def our_logits(folder, arithmetic):
    done = subprocess.run([os.environ["LOGITS"], folder, arithmetic, *map(str, ids())], stdout=subprocess.PIPE,
                          check=True)
    return np.frombuffer(done.stdout, np.float32).reshape(T, VOCAB).astype(np.float64)


def val_loss(folder):
    return Run(("--eval-only", "--val-sequences=0", "--precision=fp32", "--model=" + folder, *SHAPE)).val_losses()[0]


def torch_val_loss(model):
    """The mean loss of the validation shard's sequences."""
    with open(path("data/val_000.bin"), "rb") as f:
        header = struct.unpack("<256i", f.read(1024))
        tokens = torch.tensor(struct.unpack(f"<{header[2]}H", f.read()))
    n = (len(tokens) - 1) // T
    with torch.no_grad():
        out = model(tokens[:n * T].view(n, T)).logits
    return torch.nn.functional.cross_entropy(out.reshape(n * T, VOCAB), tokens[1:n * T + 1]).item()


def trained(precision):
    """The newest checkpoint of a short run."""
    run = Run((*SHAPE, "--steps=4", "--checkpoint-every=4", "--val-every=0", "--lr=3e-3", "--precision=" + precision))
    return os.path.join(run.out, "checkpoints", "step_00000004")


class Transformers(ProgramTest):
    def check_logits(self, folder, arithmetic):
        truth = logits(loaded(folder, torch_dtype=torch.float64))
        theirs = logits(loaded(folder, torch_dtype=torch.float32 if arithmetic == "fp32" else torch.bfloat16))
        ours = our_logits(folder, arithmetic)
        off, their_off = abs(ours - truth).max(), abs(theirs - truth).max()
        bound = 2 * their_off + 4 * UNIT[arithmetic] * abs(truth).max()
        print(f"{arithmetic}: logits up to {abs(truth).max():.3g}; off by {off:.2g}, transformers by {their_off:.2g}")
        self.assertLessEqual(off, bound)

    def test_ours_load_there(self):
        for precision in ["fp32", "bf16", "collage_plus"]:
            with self.subTest(precision=precision):
                folder = trained(precision)
                for arithmetic in ["fp32"] if precision == "fp32" else ["bf16", "fp32"]:
                    self.check_logits(folder, arithmetic)

    def test_theirs_load_here(self):
        config = GPT2Config(n_layer=3, n_embd=48, n_head=4, n_positions=T, vocab_size=VOCAB, initializer_range=0.2)
        model = GPT2LMHeadModel(config)
        for p in model.parameters():  # biases too, and LayerNorm's weights
            p.data += 0.1 * torch.randn_like(p)
        for dtype, torch_dtype in DTYPES.items():
            with self.subTest(dtype=dtype):
                folder = path("theirs_" + dtype)
                copy.deepcopy(model).to(torch_dtype).save_pretrained(folder, safe_serialization=True)
                stored = {t.dtype for t in load_file(os.path.join(folder, "model.safetensors")).values()}
                self.assertEqual(stored, {torch_dtype})
                self.check_logits(folder, "fp32")
                self.check_logits(folder, "bf16")
                truth = torch_val_loss(loaded(folder, torch_dtype=torch.float64))
                theirs = torch_val_loss(loaded(folder, torch_dtype=torch.float32))
                ours = val_loss(folder)
                self.assertLessEqual(abs(ours - truth), 2 * abs(theirs - truth) + 16 * UNIT["fp32"] * truth)
        # Without the language model's head the names have no prefix.
        bare = GPT2Model(config)
        bare.save_pretrained(path("bare"), safe_serialization=True)
        self.assertIn("wte.weight", load_file(path("bare/model.safetensors")))
        head = GPT2LMHeadModel(config)
        head.transformer.load_state_dict(bare.state_dict())
        truth = torch_val_loss(head.eval().double())
        self.assertLessEqual(abs(val_loss(path("bare")) - truth), 16 * UNIT["fp32"] * truth)

    def test_there_and_back(self):
        for precision, dtype in {"fp32": "F32", "collage_plus": "BF16"}.items():
            with self.subTest(precision=precision):
                folder, there = trained(precision), path("there_" + precision)
                model = loaded(folder, torch_dtype="auto")
                self.assertEqual(model.dtype, DTYPES[dtype])
                model.save_pretrained(there, safe_serialization=True)
                ours = load_file(os.path.join(folder, "model.safetensors"))
                theirs = load_file(os.path.join(there, "model.safetensors"))
                self.assertEqual({"transformer." + name for name in ours}, set(theirs))
                for name, tensor in ours.items():
                    bits = torch.int32 if dtype == "F32" else torch.int16
                    other = theirs["transformer." + name]
                    self.assertTrue(torch.equal(tensor.view(bits), other.view(bits)), name)
                # A step that moves nothing, and its checkpoint: the same file, byte for byte.
                run = Run((*SHAPE, "--model=" + there, "--precision=" + precision, "--steps=1", "--checkpoint-every=1",
                           "--lr=0", "--val-every=0"))
                back = os.path.join(run.out, "checkpoints", "step_00000001", "model.safetensors")
                with open(back, "rb") as a, open(os.path.join(folder, "model.safetensors"), "rb") as b:
                    self.assertTrue(a.read() == b.read(), back)


if __name__ == "__main__":
    unittest.main()
