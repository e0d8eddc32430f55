#!/usr/bin/env python3
"""GPT-2 in PyTorch, written from the architecture: the oracle of train_gpt.cu.

Learned positions, LayerNorm before attention and MLP, tanh GELU, output projection tied to the embedding. The golden
file holds parameters (Hugging Face names; linear weights as (out, in)), tokens, and what follows from them, computed in
double: logits, losses, gradients, and ten AdamW steps on ten batches. Beside a result, NAME.fp32_error and
NAME.bf16_error hold how far off (largest, root mean square) PyTorch is when every tensor is of that type. Parameters
lie on the bf16 grid, so that all three start equal.

Usage: model.py OUT_FOLDER
"""
import math
import sys

import numpy as np
import torch
import torch.nn.functional as F

import safetensors

L, NH, C, T, MAX_T, V, B = 2, 3, 24, 19, 23, 97, 2
STEPS = 10
LR, BETAS, EPS, WEIGHT_DECAY, GRAD_CLIP = 3e-3, (.9, .95), 1e-8, .1, 2.0  # clips about half of the steps


def parameters():
  """name -> array, larger than GPT-2's initial values, so that every gradient counts."""
  random = np.random.RandomState(7)
  shapes = {"wte.weight": (V, C), "wpe.weight": (MAX_T, C)}
  for l in range(L):
    shapes.update({f"h.{l}.{name}": shape for name, shape in {
        "ln_1.weight": (C,), "ln_1.bias": (C,), "attn.c_attn.weight": (3 * C, C), "attn.c_attn.bias": (3 * C,),
        "attn.c_proj.weight": (C, C), "attn.c_proj.bias": (C,), "ln_2.weight": (C,), "ln_2.bias": (C,),
        "mlp.c_fc.weight": (4 * C, C), "mlp.c_fc.bias": (4 * C,), "mlp.c_proj.weight": (C, 4 * C),
        "mlp.c_proj.bias": (C,)}.items()})
  shapes.update({"ln_f.weight": (C,), "ln_f.bias": (C,)})

  def draw(name, shape):
    if ".ln_" in name or name.startswith("ln_"):
      return (1 if name.endswith("weight") else 0) + .1 * random.randn(*shape)
    return (.2 if len(shape) == 2 else .1) * random.randn(*shape)
  return {name: torch.tensor(draw(name, shape)).bfloat16().double() for name, shape in shapes.items()}


def logits(p, tokens):
  """(B,T,V) from tokens (B,T)."""
  batch, length = tokens.shape
  x = F.embedding(tokens, p["wte.weight"]) + p["wpe.weight"][:length]
  future = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)

  def norm(name, x):
    return F.layer_norm(x, (C,), p[name + ".weight"], p[name + ".bias"], 1e-5)

  def linear(name, x):
    return F.linear(x, p[name + ".weight"], p[name + ".bias"])
  for l in range(L):
    h = f"h.{l}."
    qkv = linear(h + "attn.c_attn", norm(h + "ln_1", x))
    q, k, v = qkv.view(batch, length, 3, NH, C // NH).permute(2, 0, 3, 1, 4)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(C // NH)).masked_fill(future, -math.inf)
    attended = (F.softmax(scores, -1) @ v).transpose(1, 2).reshape(batch, length, C)
    x = x + linear(h + "attn.c_proj", attended)
    y = linear(h + "mlp.c_fc", norm(h + "ln_2", x))
    y = .5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + .044715 * y**3)))
    x = x + linear(h + "mlp.c_proj", y)
  return F.linear(norm("ln_f", x), p["wte.weight"])


def evaluate(start, tokens, targets, dtype):
  """logits, losses a token, mean loss and gradients."""
  p = {name: x.to(dtype, copy=True).requires_grad_() for name, x in start.items()}
  z = logits(p, tokens)
  losses = F.cross_entropy(z.view(-1, V), targets.reshape(-1), reduction="none")
  loss = losses.mean()
  loss.backward()
  results = {"logits": z, "losses": losses.view(targets.shape), "loss": loss.view(1)}
  results.update({"grad/" + name: x.grad for name, x in p.items()})
  return {name: x.detach().double().numpy() for name, x in results.items()}


def train(start, batches, dtype):
  """Loss and gradient norm of each AdamW step, and the parameters after the last."""
  p = {name: x.to(dtype, copy=True).requires_grad_() for name, x in start.items()}
  decayed = [x for x in p.values() if x.ndim == 2]
  others = [x for x in p.values() if x.ndim != 2]
  optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": WEIGHT_DECAY},
                                 {"params": others, "weight_decay": 0.0}], lr=LR, betas=BETAS, eps=EPS)
  losses, norms = [], []
  for tokens, targets in batches:
    optimizer.zero_grad()
    loss = F.cross_entropy(logits(p, tokens).view(-1, V), targets.reshape(-1))
    loss.backward()
    norm = math.sqrt(sum(float((x.grad.double()**2).sum()) for x in p.values()))
    if norm > GRAD_CLIP:
      for x in p.values():
        x.grad *= GRAD_CLIP / norm
    optimizer.step()
    losses.append(loss.item())
    norms.append(norm)
  results = {"curve/loss": np.array(losses), "curve/grad_norm": np.array(norms)}
  results.update({"trained/" + name: x.detach().double().numpy() for name, x in p.items() if name in ENDS})
  return results


ENDS = ("wte.weight", "h.0.ln_1.weight", "h.1.mlp.c_fc.bias")  # of the trained parameters only these are stored


def off(results, truth):
  difference = results - truth
  return np.array([np.max(np.abs(difference)), np.sqrt(np.mean(difference**2))])


def main():
  torch.set_num_threads(1)
  start = parameters()
  random = np.random.RandomState(8)
  # Tokens of a skewed distribution, so that there is something to learn in ten steps.
  text = np.minimum(random.geometric(.05, (STEPS, B, T + 1)) - 1, V - 1).astype(np.int32)
  text[0, 0, 3] = V - 1
  as_long = torch.tensor(text, dtype=torch.long)
  batches = [(x[:, :-1], x[:, 1:]) for x in as_long]

  out = {"sizes": np.array([L, NH, C, T, MAX_T, V, B], dtype=np.int32),
         "hyper": np.array([LR, *BETAS, EPS, WEIGHT_DECAY, GRAD_CLIP]), "text": text}
  out.update({"param/" + name: x.float().numpy() for name, x in start.items()})
  truth = evaluate(start, *batches[0], torch.float64)
  truth.update(train(start, batches, torch.float64))
  fp32 = evaluate(start, *batches[0], torch.float32)
  fp32.update(train(start, batches, torch.float32))
  bf16 = evaluate(start, *batches[0], torch.bfloat16)
  for name, x in truth.items():
    out[name] = x.astype(np.float32)
    out[name + ".fp32_error"] = off(fp32[name], x)
    if name in bf16:
      out[name + ".bf16_error"] = off(bf16[name], x)
  safetensors.save(f"{sys.argv[1]}/model.safetensors", out)


if __name__ == "__main__":
  main()
