"""Weight formats: one table in three places, lookup grids as generated, values equal to ggml's bit by bit."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from qwen35rt.formats import FORMATS

ROOT = Path(__file__).resolve().parents[2]
QUANTS = Path(os.environ.get("QWEN35RT_ORACLE", ROOT.parent / "shared" / "oracle")) / "quants.npz"
QUANTISED = [f.name for f in FORMATS if f.quantized]


class Row(NamedTuple):
    """A row of blocks.h; bits, group and off are 0 for the float formats."""

    name: str
    id: int
    block: int
    nbytes: int
    bits: int = 0
    group: int = 0
    off: int = 0


def blocks_h() -> list[Row]:
    """The rows of the two format lists of csrc/blocks.h."""
    text = (ROOT / "csrc" / "blocks.h").read_text()
    rows = re.findall(r"X\(([A-Z0-9_]+), ([a-z0-9_]+), (\d+(?:, \d+)+)\)", text)
    assert all(upper.lower() == lower for upper, lower, _ in rows)
    return [Row(upper, *map(int, numbers.split(", "))) for upper, _, numbers in rows]


def native() -> Any:
    """The compiled extension; skips without it."""
    try:
        return importlib.import_module("qwen35rt._native")
    except ModuleNotFoundError:
        pytest.skip("qwen35rt._native is not built")


def dequantize(module: Any, isa: str, name: str, data: npt.NDArray[np.uint8], n: int) -> npt.NDArray[np.float32]:
    """``n`` values of a row of bytes, by the kernels of a level."""
    order = [f.name for f in FORMATS if not f.quantized] + QUANTISED
    out = np.full(n, np.nan, np.float32)
    module.dequantize(isa, order.index(name), data, out)
    return out


def oracle() -> Any:
    """The arrays of quants.npz; skips without them."""
    if not QUANTS.exists():
        pytest.skip(f"no oracle data at {QUANTS}")
    return np.load(QUANTS)


def test_formats_equal_blocks_h() -> None:
    python = sorted((f.name, f.id, f.block, f.nbytes) for f in FORMATS)
    assert python == sorted((r.name, r.id, r.block, r.nbytes) for r in blocks_h())


def test_formats_equal_gguf_package() -> None:
    for f in FORMATS:
        kind = gguf.GGMLQuantizationType[f.name]
        assert (kind.value, *gguf.GGML_QUANT_SIZES[kind]) == (f.id, f.block, f.nbytes)


def test_traits_fit_kernels() -> None:
    """Groups of 16 or 32 columns; unsigned integers have room for OFF, signed ones have none."""
    for row in blocks_h():
        if row.block == 1:
            continue
        assert row.bits in (4, 5, 6, 8)
        assert row.group in (16, 32)
        assert row.block in (32, 64, 256)
        assert row.off < 1 << row.bits if row.bits < 8 else row.off == 0


@pytest.mark.parametrize(("flags", "file"), [((), "csrc/unpack/grids.h"), (("--cuda",), "cuda/grids.cuh")])
def test_grids_equal_their_script(flags: Sequence[str], file: str) -> None:
    command = [sys.executable, str(ROOT / "tools" / "make_grids.py"), *flags]
    made = subprocess.run(command, capture_output=True, check=True, text=True)
    assert made.stdout == (ROOT / file).read_text()


@pytest.mark.parametrize("part", ["q", "r"], ids=["quantised", "random"])
@pytest.mark.parametrize("name", QUANTISED)
def test_dequantize_is_bit_exact(name: str, part: str) -> None:
    """B30: every format at every level; "random" are blocks of arbitrary bytes."""
    module, data = native(), oracle()
    levels: Sequence[str] = module.isa_levels()
    raw, want = data[f"{name}.{part}.bytes"].ravel(), data[f"{name}.{part}.values"].ravel()
    assert "scalar" in levels
    for isa in levels:
        got = dequantize(module, isa, name, raw, want.size)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32), err_msg=isa)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 64])
@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_dequantize_float_rows_of_any_length(name: str, n: int) -> None:
    """B30: widening keeps each value, also behind the last whole vector; with zeros, subnormals and infinities."""
    module = native()
    rng = np.random.default_rng(35)
    x = np.resize(np.array([0.0, -0.0, np.inf, -np.inf, 3e-7, -65504.0], np.float32), n)
    x[6:] = rng.standard_normal(max(n - 6, 0))
    stored: np.ndarray[Any, np.dtype[Any]]
    if name == "F16":
        stored = x.astype(np.float16)
        want = stored.astype(np.float32)
    elif name == "BF16":
        stored = (x.view(np.uint32) >> 16).astype(np.uint16)
        want = (stored.astype(np.uint32) << 16).view(np.float32)
    else:
        stored = want = x
    for isa in module.isa_levels():
        got = dequantize(module, isa, name, stored.view(np.uint8), n)
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32), err_msg=isa)
