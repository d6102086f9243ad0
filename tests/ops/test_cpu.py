"""The CPU backend at every instruction level of this machine against the reference (B30: every SIMD level)."""

from __future__ import annotations

import numpy as np
import pytest

from qwen35rt.backends.base import Batch, Limits
from qwen35rt.model.program import Builder, Program, StateShape
from tests.implementations import ISA_LEVELS, cpu_backend, isa_levels

from .case import Case, check_case, run_case
from .cases import all_cases
from .tensors import random_tensor

CASES = all_cases()
LEVELS = isa_levels()
THREADED = ("linear-Q4_K-513x768-exact", "linear-F32-17x33-odd", "attention-long", "delta_net-T129", "ffn-Q8_0")

pytestmark = pytest.mark.skipif(not LEVELS, reason="the compiled module qwen35rt._native is not built")


@pytest.mark.parametrize("isa", ISA_LEVELS)
def test_level_is_covered(isa: str) -> None:
    """Shows in the test report which levels this machine leaves untested."""
    if isa not in LEVELS:
        pytest.skip(f"{isa} cannot run on this machine")
    assert cpu_backend(isa).name.startswith("cpu")


@pytest.mark.parametrize("isa", LEVELS or ("none",))
@pytest.mark.parametrize("case", CASES, ids=[c.id for c in CASES])
def test_op(case: Case, isa: str) -> None:
    check_case(case, cpu_backend(isa))


@pytest.mark.parametrize("isa", LEVELS or ("none",))
@pytest.mark.parametrize("name", THREADED)
def test_any_number_of_threads_gives_the_same_bits(name: str, isa: str) -> None:
    (case,) = (c for c in CASES if c.id == name)
    one = run_case(case, cpu_backend(isa, 1))
    for threads in (2, 3, 5):
        many = run_case(case, cpu_backend(isa, threads))
        for a, b in zip(one.rows + one.delta + one.conv, many.rows + many.delta + many.conv, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("isa", LEVELS or ("none",))
@pytest.mark.parametrize("fmt", ["Q8_0", "Q4_0", "IQ4_NL"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_b29_one_bad_activation_reaches_every_product(fmt: str, bad: float, isa: str) -> None:
    """Rounding to int8 must not turn a NaN or an infinity into a number."""
    rng = np.random.default_rng(29)
    b = Builder()
    table = random_tensor(rng, "table", "F32", 4, 96)
    x = b.embed(table)
    y = b.linear(x, random_tensor(rng, "w", fmt, 17, 96), "y")
    table.data.view(np.float32).reshape(4, 96)[2, 40] = bad
    program = Program(tuple(b.ops), tuple(b.values), x, y, StateShape(0, 1, 16, 0, 1, 16, 16, 4), 4)
    exe = cpu_backend(isa).compile(program, Limits(rows=4, out_rows=4, pages=1))
    out = exe.run(Batch.single([0, 1, 2, 3], 0, np.zeros(1, np.int32), out_rows=[0, 1, 2, 3]))[0]
    assert np.isfinite(out[[0, 1, 3]]).all()
    assert not np.isfinite(out[2]).any()
    exe.close()
