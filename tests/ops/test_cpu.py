"""The CPU backend at every instruction level of this machine against the reference (B30: every SIMD level)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.implementations import ISA_LEVELS, cpu_backend, isa_levels

from .case import BAD_ACTIVATIONS, Case, check_bad_activation, check_case, run_case
from .cases import all_cases

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
@pytest.mark.parametrize(("fmt", "bad"), BAD_ACTIVATIONS)
def test_b29_one_bad_activation_reaches_every_product(fmt: str, bad: float, isa: str) -> None:
    check_bad_activation(cpu_backend(isa), fmt, bad)
