"""Random weights in any storage format, made without a quantiser: random blocks with sane scales.

Every code of a format occurs, which quantised normal numbers would not give.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qwen35rt.formats import BY_NAME, Format
from qwen35rt.model.weights import QTensor

Bytes = npt.NDArray[np.uint8]
Float = npt.NDArray[np.float32]

# Byte offsets of a block's float16 scales (the second, where there is one, is the scale of the minimum).
SCALE_AT: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ3_XXS": (0,),
    "IQ1_S": (0,),
    "IQ4_NL": (0,),
    "IQ3_S": (0,),
    "IQ2_S": (0,),
    "IQ4_XS": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}


def random_blocks(rng: np.random.Generator, fmt: Format, count: int) -> Bytes:
    """``count`` blocks [count, nbytes] of random codes; scales between 0.005 and 0.02, minima as large."""
    blocks = rng.integers(0, 256, (count, fmt.nbytes), dtype=np.uint8)
    scale = rng.uniform(0.005, 0.02, (count, 2)).astype(np.float16)
    if fmt.name == "MXFP4":
        blocks[:, 0] = rng.integers(118, 124, count)  # power of two, biased by 127
    elif fmt.name == "NVFP4":
        blocks[:, :4] = rng.integers(0x10, 0x40, (count, 4))  # unsigned e4m3: 0x7f would be NaN
    elif fmt.name == "IQ1_M":  # the float16 scale lies in the upper nibbles of four uint16
        words = blocks[:, 48:56].copy().view("<u2")
        nibbles = scale[:, :1].view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16) & 15
        blocks[:, 48:56] = (words & 0x0FFF | nibbles << 12).astype("<u2").view(np.uint8)
    else:
        for i, at in enumerate(SCALE_AT[fmt.name]):
            blocks[:, at : at + 2] = np.ascontiguousarray(scale[:, i : i + 1]).view(np.uint8)
    return blocks


def bf16_bytes(values: Float) -> Bytes:
    """The upper halves of float32 numbers, which must be representable in bfloat16."""
    bits = values.view(np.uint32)
    if np.any(bits & 0xFFFF):
        raise ValueError("a value is not representable in bfloat16")
    return np.ascontiguousarray((bits >> 16).astype("<u2")).view(np.uint8)


def plain_tensor(name: str, values: npt.ArrayLike, format_name: str = "F32") -> QTensor:
    """An F32, F16 or BF16 tensor [rows, cols] or [experts, rows, cols] of the given numbers."""
    array = np.ascontiguousarray(values, np.float32)
    if format_name == "BF16":
        data = bf16_bytes(array)
    else:
        data = array.astype("<f2" if format_name == "F16" else "<f4").view(np.uint8)
    return _make(name, BY_NAME[format_name], data, array.shape)


def random_tensor(
    rng: np.random.Generator, name: str, format_name: str, rows: int, cols: int, experts: int = 1
) -> QTensor:
    """Random numbers in any format. Those of F32, F16 and BF16 are of one kind: exact in all three."""
    fmt = BY_NAME[format_name]
    shape = (experts, rows, cols)
    if not fmt.quantized:
        return plain_tensor(name, rng.integers(-128, 129, shape) / 256, format_name)
    return _make(name, fmt, random_blocks(rng, fmt, experts * rows * cols // fmt.block), shape)


def _make(name: str, fmt: Format, data: Bytes, shape: tuple[int, ...]) -> QTensor:
    rows, cols = shape[-2:]
    row_bytes = fmt.row_bytes(cols)
    experts = shape[0] if len(shape) == 3 else 1
    return QTensor(name, fmt, rows, cols, experts, data.reshape(-1), row_bytes, rows * row_bytes)
