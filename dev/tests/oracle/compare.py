#!/usr/bin/env python3
"""Compares two golden files tensor by tensor. Usage: compare.py COMMITTED REGENERATED (--exact | --close)

--exact: equal bits, for files that NumPy makes by correctly rounded operations. --close: for what PyTorch computes,
since its sums depend on version and processor. There a result, computed in double and stored as fp32, may differ by
1e-6 of the tensor's largest; an error of PyTorch in fp32 or bf16 (NAME.error, NAME.fp32_error, ...) only in size: by a
factor 3 and what a sum in another order changes, 1e-6 (fp32) or 2^-6 (bf16) of the largest value.
"""
import sys

import numpy as np

import safetensors
from safetensors import Bf16


def bits(x):
  return x.bits if isinstance(x, Bf16) else x


def difference(name, old, new, committed, exact):
  """None, or what differs."""
  if type(old) is not type(new) or bits(old).shape != bits(new).shape or bits(old).dtype != bits(new).dtype:
    return "type or shape"
  if exact or isinstance(old, Bf16) or old.dtype.kind in "iu":
    count = int(np.sum(bits(old).view(np.uint8) != bits(new).view(np.uint8)))
    return f"{count} bytes of {bits(old).nbytes}" if count else None
  if name.endswith("error"):
    result = committed[name[:name.rindex(".")]]
    bf16 = name.endswith("bf16_error") or isinstance(committed.get(name.split("/")[0] + "/dout"), Bf16)
    slack = np.max(np.abs(result)) * (2**-6 if bf16 else 1e-6)
    wrong = (new > 3 * old + slack) | (old > 3 * new + slack)
    return f"{old} became {new}" if wrong.any() else None
  worst, largest = np.max(np.abs(old - new), initial=0), np.max(np.abs(old), initial=0)
  return f"by {worst:g}, largest value {largest:g}" if not worst <= 1e-6 * largest else None


def main():
  committed, regenerated = safetensors.load(sys.argv[1]), safetensors.load(sys.argv[2])
  problems = [f"{name}: only in one file" for name in committed.keys() ^ regenerated.keys()]
  for name in committed.keys() & regenerated.keys():
    what = difference(name, committed[name], regenerated[name], committed, sys.argv[3] == "--exact")
    if what:
      problems.append(f"{name}: {what}")
  for problem in sorted(problems)[:20]:
    print(f"{sys.argv[1]}: {problem}")
  sys.exit(bool(problems))


if __name__ == "__main__":
  main()
