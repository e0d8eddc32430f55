#!/usr/bin/env python3
"""Every layer forward and backward by PyTorch autograd: the oracle of kernels/.

Results are computed in double and stored as fp32: the truth. Beside each, NAME.error holds how far off (largest, root
mean square) PyTorch is when it does the same in fp32, or in bf16 for the file of bf16 cases, whose inputs lie on the
bf16 grid. Tensors are named CASE/NAME; gradients have a d in front. Layouts are the program's: linear weights
(out, in), qkv packed (B,T,3,NH,d), logits padded to Vp columns.

Usage: layers.py OUT_FOLDER
"""
import math
import sys

import numpy as np
import torch
import torch.nn.functional as F

import safetensors
from safetensors import Bf16


def wide(x):
  return x.float() if x.dtype == torch.bfloat16 else x


def evaluate(run, inputs, douts, dtype):
  """Outputs and gradients, as double arrays."""
  leaves = {name: torch.tensor(x).to(dtype).requires_grad_() for name, x in inputs.items()}
  outputs = run(**leaves)
  torch.autograd.backward([outputs[name] for name in douts],
                          [torch.tensor(d).to(outputs[name].dtype) for name, d in douts.items()])
  results = {name: out.detach().double().numpy() for name, out in outputs.items()}
  results.update({"d" + name: leaf.grad.double().numpy() for name, leaf in leaves.items()})
  return results


def tensors(bf16, inputs, run, douts, sizes, integers=None):
  """One case: inputs and run(), which maps them as tensors that require gradients to outputs by name, all by name."""
  grid = (lambda x: torch.tensor(x).bfloat16().float().numpy()) if bf16 else (lambda x: x)
  store = Bf16.of if bf16 else lambda x: x
  inputs = {name: grid(x.astype(np.float32)) for name, x in inputs.items()}
  douts = {name: grid(x.astype(np.float32)) for name, x in douts.items()}
  out = {"sizes": np.array(sizes, dtype=np.int32), **(integers or {})}
  out.update({name: store(x) for name, x in inputs.items()})
  out.update({"d" + name: store(x) for name, x in douts.items()})
  truth = evaluate(run, inputs, douts, torch.float64)
  other = evaluate(run, inputs, douts, torch.bfloat16 if bf16 else torch.float32)
  for name, x in truth.items():
    off = other[name] - x
    out[name] = x.astype(np.float32)
    out[name + ".error"] = np.array([np.max(np.abs(off)), np.sqrt(np.mean(off**2))])
  return out


# --- the layers -----------------------------------------------------------------------------------

def encoder(random, B, T, C, V):
  tokens = random.randint(0, V, (B, T)).astype(np.int32)
  tokens[0, :2] = V - 1  # a repeated token, and the last one
  index = torch.tensor(tokens, dtype=torch.long)
  inputs = {"wte": .5 * random.randn(V, C), "wpe": .5 * random.randn(T + 3, C)}  # more positions than T

  def run(wte, wpe):
    return {"out": F.embedding(index, wte) + wpe[:T]}
  return inputs, run, {"out": random.randn(B, T, C)}, [B, T, C, V], {"tokens": tokens}


def layernorm_inputs(random, B, T, C):
  return {"weight": 1 + .2 * random.randn(C), "bias": .2 * random.randn(C)}, {"out": random.randn(B, T, C)}


def layernorm(random, B, T, C):
  inputs, douts = layernorm_inputs(random, B, T, C)
  inputs["inp"] = 2 * random.randn(B, T, C) + random.randn(B, T, 1)

  def run(weight, bias, inp):
    x = wide(inp.detach())
    return {"out": F.layer_norm(inp, (C,), weight, bias, 1e-5), "mean": x.mean(-1),
            "rstd": 1 / torch.sqrt(x.var(-1, unbiased=False) + 1e-5)}
  return inputs, run, douts, [B, T, C]


def residual_layernorm(random, B, T, C):
  """The sum is an output too, with a gradient of its own, as in the residual stream."""
  inputs, douts = layernorm_inputs(random, B, T, C)
  inputs["inp1"], inputs["inp2"] = 2 * random.randn(B, T, C), random.randn(B, T, C)
  douts["residual"] = random.randn(B, T, C)

  def run(weight, bias, inp1, inp2):
    residual = inp1 + inp2
    return {"out": F.layer_norm(residual, (C,), weight, bias, 1e-5), "residual": residual}
  return inputs, run, douts, [B, T, C]


def matmul(random, B, T, C, OC, bias=True):
  inputs = {"inp": random.randn(B, T, C), "weight": random.randn(OC, C) / math.sqrt(C)}
  if bias:
    inputs["bias"] = .5 * random.randn(OC)

  def run(inp, weight, bias=None):
    return {"out": F.linear(inp, weight, bias)}
  return inputs, run, {"out": random.randn(B, T, OC)}, [B, T, C, OC]


def attention(random, B, T, C, NH, spread=1.0):
  """spread: scale of the queries; at 8 most rows of the softmax are nearly one-hot."""
  d = C // NH
  qkv = random.randn(B, T, 3, NH, d)
  qkv[:, :, 0] *= spread
  future = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)

  def run(qkv):
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B,NH,T,d)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(d)).masked_fill(future, -math.inf)
    out = F.softmax(scores, -1) @ v
    return {"out": out.transpose(1, 2).reshape(B, T, C), "lse": torch.logsumexp(wide(scores.detach()), -1)}
  return {"qkv": qkv}, run, {"out": random.randn(B, T, C)}, [B, T, C, NH]


def gelu(random, n):
  inp = np.concatenate([3 * random.randn(n - 12), [0, -0., 1e-6, -1e-6, 5, -5, 10, -10, 30, -30, 100, -100]])

  def run(inp):
    # approximate="tanh" in its own words, so that the bf16 run rounds as a framework's fused kernel does: once.
    x = wide(inp)
    return {"out": (.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + .044715 * x**3)))).to(inp.dtype)}
  return {"inp": inp}, run, {"out": random.randn(n)}, [n]


def classifier(random, rows, V, Vp, dloss, spread=2.0):
  """losses of the first V columns; the padding holds values that must not count."""
  targets = random.randint(0, V, rows).astype(np.int32)
  targets[0], targets[-1] = 0, V - 1
  index = torch.tensor(targets, dtype=torch.long)
  logits = spread * random.randn(rows, Vp)
  logits[0, targets[0]] += 20  # a certain and right one, a certain and wrong one
  logits[-1, (targets[-1] + 1) % V] += 20

  def run(logits):
    return {"losses": F.cross_entropy(logits[:, :V], index, reduction="none")}
  douts = {"losses": np.full(rows, dloss)}
  return {"logits": logits}, run, douts, [rows, V, Vp], {"targets": targets}


# --- the cases ------------------------------------------------------------------------------------

FP32 = [
    (encoder, (2, 5, 12, 97)), (encoder, (3, 4, 7, 257)),
    (layernorm, (2, 4, 32)), (layernorm, (3, 5, 33)), (layernorm, (1, 1, 257)), (layernorm, (1, 3, 1)),
    (residual_layernorm, (2, 4, 32)), (residual_layernorm, (3, 5, 33)),
    (matmul, (2, 4, 16, 24)), (matmul, (3, 5, 33, 17)), (matmul, (2, 7, 20, 97, False)), (matmul, (1, 1, 1, 1)),
    (attention, (2, 8, 32, 4)), (attention, (1, 17, 21, 3)), (attention, (3, 5, 10, 1)), (attention, (1, 33, 16, 2)),
    (attention, (1, 70, 6, 1)), (attention, (2, 9, 12, 2, 8.0)), (attention, (2, 1, 6, 2)),
    (gelu, (301,)),
    (classifier, (6, 97, 128, 1 / 6)), (classifier, (5, 257, 384, .03)), (classifier, (3, 128, 128, 1.0)),
]
BF16 = [
    (encoder, (3, 4, 18, 97)),
    (layernorm, (2, 5, 64)), (layernorm, (3, 5, 33)),
    (residual_layernorm, (3, 5, 47)),
    (matmul, (2, 8, 32, 48)), (matmul, (3, 5, 65, 33)),
    (attention, (2, 8, 32, 4)), (attention, (1, 35, 21, 3)),
    (gelu, (501,)),
    (classifier, (7, 97, 128, 1 / 7)), (classifier, (5, 257, 384, .03)),
]


def golden(table, bf16):
  out = {}
  for i, (layer, sizes) in enumerate(table):
    random = np.random.RandomState(100 * bf16 + i)
    case = tensors(bf16, *layer(random, *sizes))
    out.update({f"{layer.__name__}.{i}/{name}": x for name, x in case.items()})
  return out


def main():
  torch.set_num_threads(1)
  safetensors.save(f"{sys.argv[1]}/layers_fp32.safetensors", golden(FP32, False))
  safetensors.save(f"{sys.argv[1]}/layers_bf16.safetensors", golden(BF16, True))


if __name__ == "__main__":
  main()
