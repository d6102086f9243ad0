"""The text of CUDA modules: one string without our includes, every format, every kernel found, no host code."""

from __future__ import annotations

import re

import pytest

from qwen35rt.backends.cuda import experts, lowering, ops, sample, source, tiles
from qwen35rt.errors import KernelCompileError
from qwen35rt.formats import FORMATS


@pytest.mark.parametrize("file", source.files())
def test_a_module_is_one_text(file: str) -> None:
    """CuPy's cache sees no headers, and NVRTC has no include path."""
    text = source.source(file)
    assert not re.search("# *include", text)
    assert text.count("#define QRT_COMMON_CUH") == 1
    assert "<<<" not in text
    assert source.kernels(file)


def test_kernels_are_all_that_a_compiler_sees() -> None:
    for file in source.files():
        text = source.source(file)
        marks = len(re.findall("__global__", text))
        macro = max(len(re.findall(rf"^{file.upper()}\(", text, re.MULTILINE)) - 1, 0)
        assert len(source.kernels(file)) == marks + macro, file


def test_formats_are_those_of_the_table() -> None:
    assert source.variants("linear") == [f.name for f in FORMATS]
    for file in source.TILED:
        assert source.variants(file) == [f.name for f in FORMATS if f.name != "F32"]
    text = source.source("linear")
    for f in FORMATS:
        assert f"defined(QRT_{f.name})" in text, f.name


def test_sizes_equal_those_of_the_kernels() -> None:
    """ops.py computes grids from constants that the kernels state again."""

    def number(file: str, name: str) -> int:
        (found,) = re.findall(rf"^#define {name} (\d+)", source.source(file), re.MULTILINE)
        return int(found)

    assert (number("attention", "QUERIES"), number("attention", "CHUNK")) == (ops.QUERIES, ops.CHUNK)
    assert number("attention", "PIECE") == lowering.PIECE
    of_attention = [number("attention_tiles", n) for n in ("TILE_QUERIES", "TILE_KEYS")]
    assert of_attention == [ops.TILE_QUERIES, ops.TILE_KEYS]
    assert [f"attention_tiles_{d}" for d in ops.TILE_DIMS] == source.kernels("attention_tiles")
    assert number("sample", "PART") == sample.TOP_PART == sample.TOP_THREADS * number("sample", "EACH")
    assert 32 * number("sample", "WARPS") == sample.TOP_THREADS
    assert 4 * 3 * number("sample", "WARPS") == sample.TOP_SHARED
    assert 32 * number("attention", "LANES_OF_DIM") == ops.MAX_HEAD_DIM
    assert (number("linear", "WARPS"), number("linear", "ROWS_OF_WARP")) == (ops.WARPS, ops.ROWS_OF_WARP)
    assert [f"linear_tiles_{tile}" for tile in tiles.TILES] == source.kernels("linear_tiles")
    assert number("moe_lists", "GROUP_PLACES") == experts.GROUP_PLACES
    assert len(re.findall(r"PART\(\d\)", source.source("linear"))) == ops.MAX_PARTS
    assert (number("conv1d_silu", "TILE"), number("conv1d_silu", "MAX_TAPS")) == (ops.CONV_TILE, ops.MAX_TAPS)
    assert (number("delta_net", "LANES"), number("delta_net", "ROWS")) == (ops.DELTA_LANES, ops.DELTA_ROWS)
    chunks = [number("delta_chunks", n) for n in ("CHUNK", "VALUES")]
    assert chunks == [ops.DELTA_CHUNK, ops.DELTA_VALUES]
    assert re.search(r"#define SQUARE_LD \(CHUNK \+ 4\).*\n#define ROOM +\(2 \* CHUNK\)", source.source("delta_chunks"))
    assert (chunks[0] + 4, 2 * chunks[0]) == (ops.DELTA_SQUARE, ops.DELTA_ROOM)
    assert [f"delta_net_{c}" for c in ops.DELTA_COLUMNS] == source.kernels("delta_net")


def test_every_op_of_a_program_is_lowered() -> None:
    from qwen35rt.model.program import OP_KINDS

    assert set(ops.LOWER) == set(OP_KINDS)


def test_a_file_that_is_missing_is_named() -> None:
    with pytest.raises(KernelCompileError, match=r"nothing\.cu cannot be read"):
        source.source("nothing")
