"""Quantisers of all writable formats at every level: error, importance weights, odd values, threads (B30).

Written blocks are read by gguf.quants, which knows nothing of this package.
"""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import quants

from qwen35rt.formats import BY_NAME, FORMATS
from tests.implementations import isa_levels, native, oracle

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

LEVELS = isa_levels()
ORDER = [f.name for f in FORMATS if not f.quantized] + [f.name for f in FORMATS if f.quantized]
NONE = np.zeros(0, np.float32)
# Squared error over the sum of squares: of normal values, of values with heavy tails (Student's t, 4 degrees).
ERRORS = {
    "Q8_0": (2.223e-05, 4.403e-05),
    "Q4_0": (0.00653, 0.01273),
    "Q4_1": (0.004763, 0.0069),
    "Q5_0": (0.001618, 0.003147),
    "Q5_1": (0.001133, 0.00162),
    "Q2_K": (0.06757, 0.08219),
    "Q3_K": (0.02058, 0.02992),
    "Q4_K": (0.004843, 0.007032),
    "Q5_K": (0.001171, 0.001696),
    "Q6_K": (0.0002747, 0.0004648),
    "IQ4_NL": (0.005325, 0.008171),
    "IQ4_XS": (0.005407, 0.008346),
    "MXFP4": (0.01258, 0.01681),
}
SIMPLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")

pytestmark = pytest.mark.skipif(not LEVELS, reason="the compiled module qwen35rt._native is not built")


@cache
def pool(threads: int) -> Any:
    """A thread pool for the whole run."""
    return native().Pool(threads)


def status(name: str, x: Floats, importance: Floats = NONE, isa: str = "", threads: int = 1) -> tuple[int, Bytes]:
    """(status, blocks of all rows); x: [rows, cols]."""
    out = np.full(x.shape[0] * BY_NAME[name].row_bytes(x.shape[1]), 0xAA, np.uint8)
    done: int = native().quantize(isa or LEVELS[-1], pool(threads), ORDER.index(name), x, importance, out)
    return done, out


def written(name: str, x: Floats, importance: Floats = NONE, isa: str = "", threads: int = 1) -> Bytes:
    """The blocks of all rows, which must succeed."""
    done, out = status(name, x, importance, isa, threads)
    assert done == 0
    return out


def read(name: str, raw: Bytes, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Values of blocks, by gguf.quants."""
    values = quants.dequantize(raw.reshape(shape[0], -1), gguf.GGMLQuantizationType[name])
    return np.asarray(values.reshape(shape), np.float64)


def error(name: str, raw: Bytes, x: Floats, weight: Floats | float = 1.0) -> float:
    """Weighted squared error of blocks, over the weighted sum of squares."""
    want = x.astype(np.float64)
    return float((weight * (read(name, raw, x.shape) - want) ** 2).sum() / (weight * want**2).sum())


def normal(rows: int = 12, cols: int = 1024) -> Floats:
    """Values as weights have them: standard deviation 0.02."""
    return (np.random.default_rng(351).standard_normal((rows, cols)) * 0.02).astype(np.float32)


def heavy(rows: int = 12, cols: int = 1024) -> Floats:
    """The same with heavy tails."""
    return (np.random.default_rng(352).standard_t(4, (rows, cols)) * 0.02).astype(np.float32)


def weights(cols: int = 1024) -> Floats:
    """Importance of columns, from nearly 0 to about 5."""
    return np.random.default_rng(353).gamma(0.5, size=cols).astype(np.float32)


@pytest.mark.parametrize("name", ERRORS)
def test_error(name: str) -> None:
    """B30: as measured, and no level is worse: all write the same bytes."""
    for x, want in zip((normal(), heavy()), ERRORS[name], strict=True):
        raw = written(name, x, isa="scalar")
        assert error(name, raw, x) < 1.01 * want
        for isa in LEVELS[1:]:
            np.testing.assert_array_equal(written(name, x, isa=isa), raw, err_msg=isa)


@pytest.mark.parametrize("name", ERRORS)
def test_importance_lowers_the_weighted_error(name: str) -> None:
    """At every level, by more than a hair; a factor common to all weights changes nothing that matters."""
    x, w = heavy(), weights()
    plain = error(name, written(name, x), x, w)
    raw = written(name, x, w, isa="scalar")
    assert error(name, raw, x, w) < 0.985 * plain
    assert error(name, written(name, x, w * np.float32(1e20)), x, w) < 0.985 * plain
    for isa in LEVELS[1:]:
        np.testing.assert_array_equal(written(name, x, w, isa=isa), raw, err_msg=isa)
    np.testing.assert_array_equal(written(name, x, np.zeros_like(w)), written(name, x))


@pytest.mark.parametrize("name", SIMPLE)
def test_error_is_below_the_reference_of_gguf(name: str) -> None:
    for x in (normal(), heavy()):
        theirs = quants.quantize(x, gguf.GGMLQuantizationType[name])
        assert error(name, written(name, x), x) < 0.94 * error(name, theirs, x)


@cache
def llama_cpp() -> Any:
    """ggml_quantize_chunk of the xllamacpp package; skips without it."""
    spec = importlib.util.find_spec("xllamacpp")
    library = next(Path(spec.origin).parent.glob("*.so"), None) if spec and spec.origin else None
    if library is None:
        pytest.skip("no xllamacpp, whose library has llama.cpp's quantisers")
    call = getattr(ctypes.CDLL(str(library)), "ggml_quantize_chunk", None)
    if call is None:
        pytest.skip("this xllamacpp hides ggml_quantize_chunk")
    call.restype = ctypes.c_size_t
    call.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    return call


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "importance"])
@pytest.mark.parametrize("name", ERRORS)
def test_error_is_below_llama_cpp(name: str, weighted: bool) -> None:
    call = llama_cpp()
    for x in (normal(4), heavy(4)):
        w = weights() if weighted else NONE
        theirs = np.zeros(len(x) * BY_NAME[name].row_bytes(x.shape[1]), np.uint8)
        call(BY_NAME[name].id, x.ctypes.data, theirs.ctypes.data, 0, *x.shape, w.ctypes.data if weighted else None)
        metric = w if weighted else 1.0
        assert error(name, written(name, x, w), x, metric) < 0.97 * error(name, theirs, x, metric)


@pytest.mark.parametrize("name", ERRORS)
def test_oracle_rows(name: str) -> None:
    """Rows that llama.cpp quantised: ours have less error, and its own values are met almost exactly."""
    path = oracle() / "quants.npz"
    if not path.exists():
        pytest.skip(f"no oracle data at {path}")
    data = np.load(path)
    x = np.ascontiguousarray(data["source"], np.float32).reshape(-1, 512)
    theirs = error(name, data[f"{name}.q.bytes"].ravel(), x)
    assert error(name, written(name, x), x) < theirs
    values = np.ascontiguousarray(data[f"{name}.q.values"], np.float32).reshape(x.shape)
    assert error(name, written(name, values), values) < 0.03 * theirs


@pytest.mark.parametrize("name", ERRORS)
def test_rounding_twice_changes_little(name: str) -> None:
    x = normal(4)
    once = read(name, written(name, x), x.shape).astype(np.float32)
    assert error(name, written(name, once), once) < 0.04 * ERRORS[name][0]


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("name", ERRORS)
def test_values_that_fit(name: str, isa: str) -> None:
    """Zeros stay zero; blocks of one value keep it; one block is enough for a row."""
    block = BY_NAME[name].block
    zero = np.zeros((2, block), np.float32)
    assert not read(name, written(name, zero, isa=isa), zero.shape).any()
    zero[0, 3] = 1e-40
    assert not read(name, written(name, zero, isa=isa), zero.shape).any()
    # MXFP4 has powers of two for scales, IQ4 no symmetric extremes.
    near = {"MXFP4": 0.03, "Q6_K": 2e-5, "IQ4_XS": 2e-5}.get(name, 1e-6)
    for value in (0.037, -0.037, 0.75, -1e3):
        x = np.full((1, block), value, np.float32)
        assert error(name, written(name, x, isa=isa), x) < near


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("name", ERRORS)
def test_small_values_and_outliers(name: str, isa: str) -> None:
    """Scales among the subnormal numbers of float16; a value a million times the others."""
    x = normal(2, 512)
    usual = error(name, written(name, x, isa=isa), x)
    small = x * np.float32(2**-8)
    assert error(name, written(name, small, isa=isa), small) < 1.1 * usual + 5e-6
    x[1, 77] = 2e4
    raw = written(name, x, isa=isa)
    values = read(name, raw, x.shape)
    # Neighbours in MXFP4's table are a factor of 1.5 apart.
    assert abs(values[1, 77] / 2e4 - 1) < {"IQ4_NL": 0.1, "IQ4_XS": 0.1, "MXFP4": 0.21}.get(name, 0.01)
    far = np.arange(512) // BY_NAME[name].block != 77 // BY_NAME[name].block
    same = written(name, normal(2, 512), isa=isa)
    np.testing.assert_array_equal(values[0], read(name, same, x.shape)[0])
    np.testing.assert_array_equal(values[1, far], read(name, same, x.shape)[1, far])


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [*ERRORS, "F32", "F16", "BF16"])
def test_values_that_are_not_numbers(name: str, bad: float, isa: str) -> None:
    """Any of them, wherever it stands, is a status and no garbage."""
    for threads in (1, 2):
        for at in (0, 17, 255, 511):
            x = normal(5, 512)
            x[3, at] = bad
            assert status(name, x, isa=isa, threads=threads)[0] == native().QUANTIZE_NOT_FINITE


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("name", [name for name in [*ERRORS, "F16"] if name != "MXFP4"])
def test_scales_beyond_float16(name: str, isa: str) -> None:
    x = normal(2, 512)
    x[1] *= np.float32(1e36)
    assert status(name, x, isa=isa)[0] == native().QUANTIZE_OUT_OF_RANGE
    x[1, :] = np.float32(3e38) * np.sign(x[1])
    assert status(name, x, isa=isa)[0] == native().QUANTIZE_OUT_OF_RANGE


@pytest.mark.parametrize("isa", LEVELS)
def test_largest_values_of_mxfp4(isa: str) -> None:
    """Its scales reach as far as float32; what would be read as infinite is refused."""
    x = np.full((1, 32), 8e37, np.float32)
    assert error("MXFP4", written("MXFP4", x, isa=isa), x) < 0.1
    assert status("MXFP4", x * np.float32(4), isa=isa)[0] == native().QUANTIZE_OUT_OF_RANGE


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_float_formats(name: str) -> None:
    """To nearest, ties to even, subnormal float16 included."""
    x = np.concatenate(
        [normal(1, 61), np.array([[1e-6, 6e-8, 2049.0, 2051.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8]])], axis=1
    )
    x = x.astype(np.float32)
    got = written(name, x)
    if name == "BF16":
        want = quants.quantize(x, gguf.GGMLQuantizationType.BF16).view(np.uint8).ravel()
    else:
        want = x.astype(np.float16 if name == "F16" else np.float32).view(np.uint8).ravel()
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ERRORS)
def test_bytes_do_not_depend_on_threads(name: str) -> None:
    x, w = heavy(7, 512), weights(512)
    np.testing.assert_array_equal(written(name, x, w, threads=1), written(name, x, w, threads=2))


def test_status_is_that_of_the_first_bad_row() -> None:
    x = normal(64, 256)
    x[20] *= np.float32(1e36)
    x[40, 0] = np.nan
    for threads in (1, 2):
        assert status("Q4_K", x, threads=threads)[0] == native().QUANTIZE_OUT_OF_RANGE


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_bad_importance(bad: float) -> None:
    w = weights(256)
    w[200] = bad
    assert status("Q6_K", normal(1, 256), w)[0] == 3


def test_sizes_are_checked() -> None:
    """B30: nothing is written outside the target."""
    module, x = native(), normal(2, 256)
    call = module.quantize
    target = np.zeros(2 * 144, np.uint8)
    q4_k = ORDER.index("Q4_K")
    with pytest.raises(ValueError, match="cannot be written"):
        call("scalar", pool(1), ORDER.index("IQ2_XXS"), x, NONE, target)
    for number in (-1, len(ORDER)):
        with pytest.raises(ValueError, match="cannot be written"):
            call("scalar", pool(1), number, x, NONE, target)
    with pytest.raises(ValueError, match="blocks of 256"):
        call("scalar", pool(1), q4_k, np.ascontiguousarray(x[:, :128]), NONE, target[:144])
    for wrong in (target[:-1], np.zeros(2 * 144 + 1, np.uint8)):
        with pytest.raises(ValueError, match="bytes"):
            call("scalar", pool(1), q4_k, x, NONE, wrong)
    with pytest.raises(ValueError, match="255 importance weights"):
        call("scalar", pool(1), q4_k, x, weights(255), target)
    closed = module.Pool(1)
    closed.close()
    with pytest.raises(ValueError, match="closed"):
        call("scalar", closed, q4_k, x, NONE, target)
    assert not target.any()
    assert call("scalar", pool(1), q4_k, np.zeros((0, 256), np.float32), NONE, target[:0]) == 0
