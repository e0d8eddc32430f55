"""Writes and reads the golden files. safetensors: 8 bytes of header length, a JSON header, raw little-endian data.

Tensors are NumPy arrays; a bf16 tensor is a uint16 array wrapped in Bf16. The same input gives the same bytes.
"""
import json
import struct

import numpy as np

DTYPES = {"F64": np.float64, "F32": np.float32, "BF16": np.uint16, "I64": np.int64, "I32": np.int32, "U32": np.uint32,
          "I16": np.int16, "I8": np.int8}
NAMES = {np.dtype(t): name for name, t in DTYPES.items() if name != "BF16"}


class Bf16:
  """The 16-bit patterns of bf16 numbers."""

  def __init__(self, bits):
    self.bits = np.ascontiguousarray(bits, dtype=np.uint16)

  @staticmethod
  def of(values):
    """Of fp32 values that lie on the bf16 grid already."""
    u = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    assert not (u & 0xffff).any(), "not on the bf16 grid"
    return Bf16((u >> 16).astype(np.uint16))

  def floats(self):
    return (self.bits.astype(np.uint32) << 16).view(np.float32)


def save(path, tensors):
  """tensors: name -> NumPy array or Bf16, in the order of the file."""
  header, chunks, offset = {}, [], 0
  for name, tensor in tensors.items():
    bf16 = isinstance(tensor, Bf16)
    array = np.ascontiguousarray(tensor.bits if bf16 else tensor)
    data = array.astype(array.dtype.newbyteorder("<")).tobytes()
    header[name] = {"dtype": "BF16" if bf16 else NAMES[array.dtype], "shape": list(np.shape(array)),
                    "data_offsets": [offset, offset + len(data)]}
    chunks.append(data)
    offset += len(data)
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)
  with open(path, "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text + b"".join(chunks))


def load(path):
  """name -> NumPy array or Bf16."""
  with open(path, "rb") as file:
    raw = file.read()
  (length,) = struct.unpack("<Q", raw[:8])
  tensors = {}
  for name, entry in json.loads(raw[8:8 + length]).items():
    begin, end = (8 + length + o for o in entry["data_offsets"])
    array = np.frombuffer(raw[begin:end], dtype=np.dtype(DTYPES[entry["dtype"]]).newbyteorder("<"))
    array = array.reshape(entry["shape"]).astype(DTYPES[entry["dtype"]])
    tensors[name] = Bf16(array) if entry["dtype"] == "BF16" else array
  return tensors
