"""Bytes of GGUF files put together by hand, right or wrong, and quantised rows for any format. Owns no model."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quants

from qwen35rt.formats import BY_NAME

Float = npt.NDArray[np.float32]

_DIRECT = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"}
# Where a block holds its float16 scale, and its float16 minimum with the ratio that centres the values on 0.
_SCALE_AT = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208, "TQ1_0": 52, "TQ2_0": 64}
_MINIMUM = {"Q4_1": (2, -7.5), "Q5_1": (2, -15.5), "Q2_K": (82, 1.5), "Q4_K": (2, 7.5), "Q5_K": (2, 15.5)}


def quantize(values: Float, name: str, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """float32 [..., cols] -> uint8 [..., row bytes].

    Formats that the gguf package cannot write get random blocks of the same standard deviation instead.
    """
    if name in _DIRECT:
        return np.ascontiguousarray(quants.quantize(values, GGMLQuantizationType[name])).view(np.uint8)
    return random_blocks(rng, name, values.shape, float(values.std()))


def random_blocks(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], std: float = 1.0
) -> npt.NDArray[np.uint8]:
    """Random valid blocks of a quantised format: every code occurs, the standard deviation is about ``std``."""
    form = BY_NAME[name]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // form.block, form.nbytes), np.uint8)
    put_scales(blocks, name, 1.0)
    found = float(quants.dequantize(blocks, GGMLQuantizationType[name]).std())
    put_scales(blocks, name, std / found)
    return blocks.reshape(*shape[:-1], -1)


def put_scales(blocks: npt.NDArray[np.uint8], name: str, d: float) -> None:
    """Write the scale ``d`` (or the nearest power of two) into all blocks uint8 [..., block bytes]."""
    half = np.frombuffer(np.float16(d).tobytes(), np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = int(np.clip(round(np.log2(d)) + 128, 1, 254))
    elif name == "NVFP4":
        blocks[..., :4] = int(np.clip((round(np.log2(d)) + 7) << 3, 0, 0x7E))
    elif name == "IQ1_M":
        bits = int(half.view(np.uint16)[0])
        for i in range(4):  # one nibble of d on top of each of the four scale words
            high = 48 + 2 * i + 1
            blocks[..., high] = (blocks[..., high] & 0x0F) | ((bits >> 4 * i & 0xF) << 4)
    else:
        at = _SCALE_AT.get(name, 0)
        blocks[..., at : at + 2] = half
        if name in _MINIMUM:
            at, ratio = _MINIMUM[name]
            blocks[..., at : at + 2] = np.frombuffer(np.float16(d * ratio).tobytes(), np.uint8)


def text(value: str | bytes) -> bytes:
    """A string of the container: u64 length, bytes."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    """A key with its value type and the raw bytes of its value."""
    return text(name) + struct.pack("<I", kind) + value


def string_key(name: str, value: str) -> bytes:
    """A key that holds a string."""
    return key(name, 8, text(value))


def u32_key(name: str, value: int) -> bytes:
    """A key that holds a u32."""
    return key(name, 4, struct.pack("<I", value))


def array_key(name: str, kind: int, count: int, payload: bytes) -> bytes:
    """A key that holds an array of ``count`` values of type ``kind``, or says so."""
    return key(name, 9, struct.pack("<IQ", kind, count) + payload)


def tensor(name: str | bytes, dims: Sequence[int], kind: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    """A tensor entry; ``n_dims`` lies about the number of dimensions."""
    n = len(dims) if n_dims is None else n_dims
    return text(name) + struct.pack("<I", n) + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


def file(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """A whole file; ``n_keys`` and ``n_tensors`` lie about the counts."""
    head = b"GGUF" + struct.pack(
        "<IQQ", version, len(tensors) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys
    )
    body = head + b"".join(keys) + b"".join(tensors)
    return body + bytes(-len(body) % alignment) + data


def numbers(dtype: str, values: Sequence[Any]) -> bytes:
    """Little-endian bytes of numbers."""
    return np.asarray(values, np.dtype(dtype).newbyteorder("<")).tobytes()
