"""The C structs of csrc/qrt.h as NumPy dtypes, and the numbers of its enums. Checked against the C side at import."""

from __future__ import annotations

import numpy as np

from ... import _native
from ...formats import FORMATS

VIEW = np.dtype([("ptr", "u8"), ("ld", "i8"), ("heads", "i4"), ("dim", "i4"), ("stride", "i4")], align=True)
TENSOR = np.dtype(
    [
        ("data", "u8"),
        ("format", "i4"),
        ("experts", "i4"),
        ("rows", "i8"),
        ("cols", "i8"),
        ("row_bytes", "i8"),
        ("expert_bytes", "i8"),
        ("scale", "u8"),
    ],
    align=True,
)
QUANT = np.dtype([*((name, "u8") for name in ("q", "d", "s32", "s16", "n32", "n16")), ("cols", "i8")], align=True)
PART = np.dtype([("w", TENSOR), ("out", VIEW), ("residual", "u8")], align=True)
OP = np.dtype(
    [
        ("kind", "i4"),
        ("layer", "i4"),
        ("gathered", "i4"),
        ("n", "i4", 4),
        ("f", "f4", 2),
        ("out", VIEW),
        ("ins", VIEW, 4),
        ("vec", "u8", 2),
        ("parts", "u8"),
        ("n_parts", "i4"),
        ("quant", QUANT),
    ],
    align=True,
)
STATE = np.dtype(
    [(name, "u8") for name in ("k", "v", "delta", "conv")]
    + [
        (name, "i4")
        for name in (
            "kv_bytes",
            "n_pages",
            "page_tokens",
            "kv_heads",
            "head_dim",
            "attention_layers",
            "delta_layers",
            "v_heads",
            "d",
            "channels",
            "conv_kernel",
        )
    ],
    align=True,
)

# In the order of qrt_kind.
KINDS = (
    "embed",
    "rms_norm",
    "linear",
    "rope",
    "kv_append",
    "attention",
    "attention_merge",
    "sigmoid_mul",
    "conv1d_silu",
    "delta_gates",
    "l2_norm",
    "delta_net",
    "gated_rms_norm",
    "silu_mul",
    "add",
    "moe_route",
    "moe_linear",
    "gather_rows",
    "quantize",
    "moe_sum",
)
KIND = {name: number for number, name in enumerate(KINDS)}

# blocks.h lists the float formats first, each group in the order of formats.py.
FORMAT = {
    f.name: number
    for number, f in enumerate([f for f in FORMATS if not f.quantized] + [f for f in FORMATS if f.quantized])
}

for _name, _dtype in (("op", OP), ("part", PART), ("state", STATE)):
    if _native.struct_sizes()[_name] != _dtype.itemsize:
        raise ImportError(f"the compiled module is of another version: struct {_name}; reinstall qwen35rt")
