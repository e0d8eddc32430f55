#!/usr/bin/env python3
"""AdamW under every precision strategy, in NumPy: the oracle of mcf/strategies.h, written from the formulas alone.

Every value is an fp32 array; NumPy rounds each operation to fp32 once and never fuses two. rn() rounds to the bf16
grid. update_strict() rounds to bf16 after every operation of the paper's algorithm (arXiv 2405.03637);
update_register() computes in fp32 and rounds when it stores.

Usage: adamw.py OUT_FOLDER writes the golden files that adamw_test.cpp compares with, bit for bit.
"""
import math
import sys
import zlib
from dataclasses import dataclass

import numpy as np

import safetensors
from safetensors import Bf16

f32 = np.float32


def rn(x):
  """To the bf16 grid: nearest, ties to even, subnormals kept, beyond the largest to infinity. By double, not bits."""
  x = np.asarray(x, dtype=f32)
  with np.errstate(all="ignore"):
    wide = x.astype(np.float64)
    finite = np.isfinite(wide)
    _, exponent = np.frexp(np.where(finite, wide, 1.0))  # |x| = f 2^exponent, f in [1/2, 1)
    spacing = np.ldexp(1.0, np.maximum(exponent - 1, -126) - 7)
    rounded = np.rint(wide / spacing) * spacing
    rounded = np.where(np.abs(rounded) >= 2.0**128, np.copysign(np.inf, wide), rounded)
    return np.where(finite, rounded, wide).astype(f32)


# --- multi-component floats -----------------------------------------------------------------------

def fast_two_sum(a, b):
  s = rn(a + b)
  return s, rn(b - rn(s - a))


def two_sum(a, b):
  s = rn(a + b)
  t = rn(s - a)
  return s, rn(rn(a - rn(s - t)) + rn(b - t))


def two_prod(a, b):
  p = rn(a * b)
  return p, rn(a * b - p)


def grow(pair, a):
  x, y = pair
  u, v = two_sum(x, a)
  return fast_two_sum(u, rn(y + v))


def mul(pair, factor):
  (x, y), (c, d) = pair, factor
  p, e = two_prod(x, c)
  e = rn(e + rn(rn(x * d) + rn(y * c)))
  return fast_two_sum(p, e)


def mul_as_released(pair, factor):
  """The product of the paper's released code, whose in-place multiplication overwrites an operand too early."""
  (x, y), (c, d) = pair, factor
  p = rn(x * c)
  e = rn(p * c - p)
  y = rn(rn(rn(y * c) + p * d) + e)
  return rn(p + y), y


# --- scalars --------------------------------------------------------------------------------------

@dataclass
class Scalars:
  """Computed in double, rounded to fp32 once. beta2 is a pair of bf16 too."""
  beta1: f32
  one_minus_beta1: f32
  beta2: f32
  one_minus_beta2: f32
  eps: f32
  beta2_pair: tuple
  a1: f32
  r2: f32
  lw: f32
  clip: f32
  random: np.ndarray  # key of the step's random bits


def scalars(lr, beta1, beta2, eps, weight_decay, grad_clip, norm, t):
  hi = rn(f32(beta2))[()]
  lo = rn(f32(beta2 - float(hi)))[()]
  return Scalars(f32(beta1), f32(1 - beta1), f32(beta2), f32(1 - beta2), f32(eps), (hi, lo),
                 a1=f32(lr / (1 - math.pow(beta1, t))), r2=f32(1 / math.sqrt(1 - math.pow(beta2, t))),
                 lw=f32(lr * weight_decay), clip=f32(grad_clip / norm if grad_clip > 0 and norm > grad_clip else 1),
                 random=step_key(SEED, t))


# --- how the register form stores and loads a value -----------------------------------------------

class Codec:
  """names: suffixes of the tensors that hold a value. store(W) gives them, load(*tensors) the value."""
  names = ("",)

  def load(self, x):
    return x

  def store(self, w):
    return (w,)


class Fp32Codec(Codec):
  pass


class Bf16Codec(Codec):
  def store(self, w):
    return (rn(w),)


class PairCodec(Codec):
  names = ("", ".lo")

  def load(self, hi, lo):
    return hi + lo

  def store(self, w):
    hi = rn(w)
    return hi, rn(w - hi)


class MasterCodec(Codec):
  names = ("", ".master")

  def load(self, theta, master):
    return master

  def store(self, w):
    return rn(w), w


class Rem16Codec(Codec):
  """bf16 and the int16 that makes it exactly the fp32 number."""
  names = ("", ".rem")

  def load(self, hi, rem):
    upper = (hi.view(np.uint32) >> 16).astype(np.int64) - (rem < 0)
    return ((upper << 16) | (rem.astype(np.int64) & 0xffff)).astype(np.uint32).view(f32)

  def store(self, w):
    bits = np.where(np.isnan(w), np.uint32(0x7fc00000), np.ascontiguousarray(w).view(np.uint32))
    rem = (bits & 0xffff).astype(np.uint16).view(np.int16)
    upper = (bits >> 16).astype(np.uint32) + (rem < 0)
    return (upper.astype(np.uint32) << 16).view(f32), rem


class Int8Codec(Codec):
  """bf16 and the remainder in 127ths of half an ulp."""
  names = ("", ".rho")

  @staticmethod
  def half_ulp(hi):
    exponent = (hi.view(np.uint32) >> 23 & 0xff).astype(np.int64)
    return np.ldexp(1.0, np.maximum(exponent, 1) - 135).astype(f32)

  def load(self, hi, rho):
    return hi + (rho.astype(f32) / f32(127)) * self.half_ulp(hi)

  def store(self, w):
    hi = rn(w)
    with np.errstate(all="ignore"):
      rho = np.rint(f32(127) * ((w - hi) / self.half_ulp(hi)))
    return hi, np.where(np.isfinite(rho), np.clip(rho, -127, 127), 0).astype(np.int8)


def mix64(x):
  """SplitMix64's finaliser on uint64 arrays, which wrap."""
  with np.errstate(over="ignore"):
    x = x + np.uint64(0x9e3779b97f4a7c15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xbf58476d1ce4e5b9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94d049bb133111eb)
    return x ^ (x >> np.uint64(31))


def step_key(seed, t):
  """Of the step's random bits: four words hashed in turn, the second a tag, the last 0."""
  x = np.zeros(1, dtype=np.uint64)
  for word in (seed, 2**64 - 2, t, 0):
    with np.errstate(over="ignore"):
      x = mix64(x + np.uint64(word))
  return x


class StochasticCodec(Codec):
  """Adds 16 random bits and cuts. place: of each element in the flat buffer; a state takes 16 of its 64 bits."""

  def __init__(self, place, which):
    self.place, self.shift, self.key = place, np.uint64(16 * which), None

  def store(self, w):
    if self.key is None:  # the initial value lies on the grid
      return (w,)
    with np.errstate(over="ignore"):
      r = (mix64(self.key + self.place) >> self.shift & np.uint64(0xffff)).astype(np.uint32)
    bits = ((w.view(np.uint32) + r) & np.uint32(0xffff0000)).view(f32)
    return (np.where(np.isfinite(w), bits, w),)


# --- the strategies -------------------------------------------------------------------------------

STRICT = ("bf16", "bf16_kahan", "collage_light", "collage_plus")


def register_codecs(name):
  """Codecs of theta, m and v for a strategy in register form."""
  bf16, fp32 = Bf16Codec(), Fp32Codec()
  return {
      "bf16": (bf16, bf16, bf16),
      "bf16_kahan": (PairCodec(), bf16, bf16),
      "collage_light": (PairCodec(), bf16, bf16),
      "collage_plus": (PairCodec(), bf16, PairCodec()),
      "bf16_rem16": (Rem16Codec(), bf16, bf16),
      "bf16_int8": (Int8Codec(), bf16, bf16),
      "fp32_optim": (bf16, fp32, fp32),
      "fp32_master": (MasterCodec(), fp32, fp32),
      "fp32": (fp32, fp32, fp32),
  }[name]


class Strategy:
  """States of n elements, all named as in mcf/strategies.h, and update(), one AdamW step.

  mode: "strict", "fused" or "as-released"; it matters for the four strategies of STRICT only. place: of the elements
  in the flat buffer, for the random bits of bf16_sr.
  """

  def __init__(self, name, theta0, mode="strict", place=None):
    self.name, self.mode = name, mode
    self.strict = name in STRICT and mode != "fused"
    if name == "bf16_sr":
      self.codecs = [StochasticCodec(place, which) for which in range(3)]
    else:
      self.codecs = register_codecs(name)
    theta0 = np.asarray(theta0, dtype=f32)
    start = theta0 if name == "fp32" else rn(theta0)
    self.theta = self.codecs[0].store(start)
    zero = np.zeros_like(start)
    self.m, self.v = self.codecs[1].store(zero), self.codecs[2].store(zero)

  def tensors(self):
    """theta and the states, by name, in the order of mcf/strategies.h."""
    codec = self.codecs[0]
    out = {"theta": self.theta[0]}
    out.update({"master" if n == ".master" else "theta" + n: t for n, t in zip(codec.names[1:], self.theta[1:])})
    out["m"] = self.m[0]
    out.update({"v" + n: t for n, t in zip(self.codecs[2].names, self.v)})
    return out

  def value(self):
    """The weight's full value in double."""
    if isinstance(self.codecs[0], PairCodec):
      return self.theta[0].astype(np.float64) + self.theta[1]
    return self.codecs[0].load(*self.theta).astype(np.float64)

  def update(self, g, k, decay):
    """g: gradient, bf16 values unless fp32. decay: which elements are decayed. Returns u, the intended update."""
    lw = np.where(decay, k.lw, f32(0))
    with np.errstate(all="ignore"):
      return (self.update_strict if self.strict else self.update_register)(g, k, lw)

  def update_strict(self, g, k, lw):
    (m,), v, theta = self.m, self.v, self.theta[0]
    if k.clip < 1:
      g = rn(k.clip * g)
    m = rn(rn(k.beta1 * m) + k.one_minus_beta1 * g)
    if self.name == "collage_plus":
      v = (mul_as_released if self.mode == "as-released" else mul)(v, k.beta2_pair)
      v = grow(v, rn(k.one_minus_beta2 * (g * g)))
    else:
      v = (rn(rn(k.beta2 * v[0]) + k.one_minus_beta2 * (g * g)),)
    d = rn(rn(rn(np.sqrt(v[0])) * k.r2) + k.eps)
    u = rn(-rn(rn(k.a1 * m) / d) - rn(lw * theta))
    if self.name == "bf16":
      self.theta = (rn(theta + u),)
    elif self.name == "bf16_kahan":
      c = rn(self.theta[1] + u)
      q = rn(theta + c)
      self.theta = q, rn(c + rn(theta - q))
    else:
      self.theta = grow(self.theta, u)
    self.m, self.v = (m,), v
    return u

  def update_register(self, g, k, lw):
    for codec in self.codecs:
      if isinstance(codec, StochasticCodec):
        codec.key = k.random
    w, m, v = (codec.load(*t) for codec, t in zip(self.codecs, (self.theta, self.m, self.v)))
    if k.clip < 1:
      g = k.clip * g
    m = k.beta1 * m + k.one_minus_beta1 * g
    v = k.beta2 * v + k.one_minus_beta2 * (g * g)
    u = -((k.a1 * m) / (np.sqrt(v) * k.r2 + k.eps)) - lw * w
    self.theta, self.m, self.v = (codec.store(x) for codec, x in zip(self.codecs, (w + u, m, v)))
    return u


def quality(before, after, theta_before, theta_after, u, g, decay, v_before, v_after):
  """The sums of mcf/quality.cuh: uu, ue, ee, ue_hi, ee_hi, decay, lost_decay, intended, lost, lost_hi, fed, stale_v."""
  u = u.astype(np.float64)
  e = after - before
  e_hi = theta_after.astype(np.float64) - theta_before
  same_v = np.all([a == b for a, b in zip(v_before, v_after)], axis=0)
  dot = lambda a, b: math.fsum((a * b).tolist())
  square = np.where(decay, theta_before.astype(np.float64)**2, 0)
  return [dot(u, u), dot(u, e), dot(e, e), dot(u, e_hi), dot(e_hi, e_hi), math.fsum(square),
          math.fsum(square * (e == 0)), float(np.sum(u != 0)),
          float(np.sum((u != 0) & (e == 0))), float(np.sum((u != 0) & (theta_after == theta_before))),
          float(np.sum(g != 0)), float(np.sum((g != 0) & same_v))]


# --- golden files ---------------------------------------------------------------------------------

STEPS = 200
SEED = 7  # of the random bits
KEPT = (1, 2, 200)  # steps whose states are stored; of the others a CRC
QUALITY_EVERY = 10
DECAYED, NOT_DECAYED = 53, 43  # elements of the two tensors, odd on purpose
N = DECAYED + NOT_DECAYED
UNCLIPPED = [5.0] * STEPS  # a norm that grad_clip = 0 must ignore
PLACE = np.concatenate([np.arange(DECAYED), 64 + np.arange(NOT_DECAYED)]).astype(np.uint64)  # tensors start at 64 k
# Name and mode of all that the program has.
RUNS = ([(name, "strict") for name in STRICT + ("bf16_sr", "fp32_optim", "fp32_master", "bf16_rem16", "bf16_int8",
                                                "fp32")] +
        [(name, "fused") for name in STRICT] + [("collage_plus", "as-released")])


@dataclass
class Case:
  name: str
  theta0: np.ndarray
  g: np.ndarray  # (STEPS, N) fp32
  lr: list  # a step
  norm: list  # the gradient norm of the whole model, a step
  beta1: float = .9
  beta2: float = .95
  eps: float = 1e-8
  weight_decay: float = .1
  grad_clip: float = 0.0


def digits(x):
  """Six digits of x, so that no input depends on the last bit of some library's exp or cos."""
  return float(f"{x:.6g}")


def warmup_cosine(peak, warmup=40):
  def lr(t):
    if t <= warmup:
      return peak * t / warmup
    return peak * (.1 + .45 * (1 + math.cos(math.pi * (t - warmup) / (STEPS - warmup))))
  return [digits(lr(t)) for t in range(1, STEPS + 1)]


def cases():
  """Hyper-parameters and gradients of each golden file. RandomState: its streams are frozen for ever."""
  def usual(seed, drift=.3):
    random = np.random.RandomState(seed)
    theta0 = .02 * random.randn(N)
    scale = 10**random.uniform(-6, -2, N)
    return random, theta0, scale * (drift * random.randn(N) + random.randn(STEPS, N))

  # Clipping active in about half of the steps, schedule, decay.
  random, theta0, g = usual(1)
  norms = [digits(x) for x in np.exp(random.randn(STEPS))]
  yield Case("clip", theta0, g, warmup_cosine(6e-4), norms, grad_clip=1.0)

  # beta2 .999, constant lr: plus must decay its second moment; gradients fall by a factor 30.
  random, theta0, g = usual(2)
  yield Case("beta2_999", theta0, g * np.exp(-np.arange(STEPS) / 60)[:, None], [6e-4] * STEPS, UNCLIPPED, beta2=.999)

  # Fine-tuning: lr 1e-6, weights near 1 as in LayerNorm, no decay at all.
  random, theta0, g = usual(3)
  yield Case("low_lr", 1 + theta0, g, [1e-6] * STEPS, UNCLIPPED, beta2=.99, weight_decay=0.0)

  # Weights that start at 0 or pass through it at a large lr; gradients that are often exactly 0.
  random, theta0, g = usual(4)
  theta0[::2] = 0
  g *= random.rand(STEPS, N) < .4
  g[:, ::3] *= np.sign(np.sin(np.arange(STEPS) / 7))[:, None]
  g[:, 5] = 0
  yield Case("through_zero", theta0, g, [1e-2] * STEPS, UNCLIPPED, beta1=.95, beta2=.98, eps=1e-6)

  # Exponents far apart: gradients from subnormal to 1e18 (whose squares are finite), weights to 1e30, large lr. A third
  # of the gradients lie where the error term of a second moment's product underflows.
  random, theta0, g = usual(5)
  exponents = np.concatenate([np.linspace(-36, 22, N - N // 3), np.linspace(-17, -13, N // 3)])
  g *= 10.0**exponents[random.permutation(N)]
  g = np.clip(g, -1e18, 1e18)
  theta0 *= 10.0**np.linspace(-38, 30, N)[random.permutation(N)]
  norms = [.5 if t % 3 else digits(1 + 1e-3 * t) for t in range(STEPS)]
  yield Case("extremes", theta0, g, warmup_cosine(.1), norms, eps=1e-12, grad_clip=1.0)


def stored(tensor, fp32):
  if tensor.dtype == np.float32:
    return tensor if fp32 else Bf16.of(tensor)
  return tensor


def is_fp32(strategy, state):
  return strategy == "fp32" or state == "master" or (strategy in ("fp32_master", "fp32_optim") and state in ("m", "v"))


def golden(case):
  """All tensors of one golden file."""
  theta0, g32 = case.theta0.astype(f32), case.g.astype(f32)
  decay = np.arange(N) < DECAYED
  steps = [scalars(lr, case.beta1, case.beta2, case.eps, case.weight_decay, case.grad_clip, norm, t)
           for t, (lr, norm) in enumerate(zip(case.lr, case.norm), 1)]
  out = {
      # beta1, beta2, eps, weight decay, grad_clip
      "hyper": np.array([case.beta1, case.beta2, case.eps, case.weight_decay, case.grad_clip]),
      "lr": np.array(case.lr), "norm": np.array(case.norm), "theta0": theta0, "g": g32,
      "tensors": np.array([DECAYED, NOT_DECAYED], dtype=np.int32), "kept_steps": np.array(KEPT, dtype=np.int32),
      "quality_every": np.array([QUALITY_EVERY], dtype=np.int32),
      "scalars": np.array([[k.a1, k.r2, k.lw, k.clip] for k in steps], dtype=f32),
      "constants": np.array([steps[0].beta1, steps[0].one_minus_beta1, steps[0].beta2, steps[0].one_minus_beta2,
                             steps[0].eps, *steps[0].beta2_pair], dtype=f32),
  }
  for name, mode in RUNS:
    label = name if mode == "strict" else f"{name}:{mode}"
    run = Strategy(name, theta0, mode, PLACE)
    crc, sums = [], []
    for t, k in enumerate(steps, 1):
      g = g32[t - 1] if name == "fp32" else rn(g32[t - 1])
      value, theta, v = run.value(), run.theta[0], run.v
      u = run.update(g, k, decay)
      tensors = {state: stored(x, is_fp32(name, state)) for state, x in run.tensors().items()}
      crc.append(0)
      for tensor in tensors.values():
        crc[-1] = zlib.crc32((tensor.bits if isinstance(tensor, Bf16) else tensor).tobytes(), crc[-1])
      if t in KEPT:
        out.update({f"{label}/{t}/{state}": tensor for state, tensor in tensors.items()})
      if t % QUALITY_EVERY == 0:
        sums.append(quality(value, run.value(), theta, run.theta[0], u, g, decay & (k.lw != 0), v, run.v))
    assert all(np.isfinite(x).all() for x in run.tensors().values()), (case.name, label)
    out[f"{label}/crc"] = np.array(crc, dtype=np.uint32)
    out[f"{label}/quality"] = np.array(sums)
  return out


def main():
  for case in cases():
    safetensors.save(f"{sys.argv[1]}/adamw_{case.name}.safetensors", golden(case))


if __name__ == "__main__":
  main()
