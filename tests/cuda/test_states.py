"""States that are saved, shared, copied and put back, and pages that are copied: the tests of every backend, on the
CUDA backend in emulation. A row's sums run in one order whatever the step, so results are compared bit for bit; with
tensor cores and the chunks of the delta rule those of steps that are cut elsewhere are compared with a bound, those of
one step with and without saves still bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from qwen35rt.backends.cuda.backend import CudaBackend
from tests.cuda_host.host import HostLauncher, compiler
from tests.implementations import Implementation
from tests.ops.test_states import (  # noqa: F401
    Array,
    Check,
    test_a_partly_filled_page_is_shared_by_copying_it,
    test_a_state_that_was_read_can_be_put_back,
    test_a_step_that_contradicts_itself_is_refused,
    test_saved_states_are_those_of_steps_that_end_there,
    test_sizes_of_a_slot_and_a_page,
    test_unknown_slots_and_pages_and_other_shapes_are_refused,
)

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to build the kernels for the CPU")


ONE_ORDER = "cuda-emulated"


@pytest.fixture(params=[ONE_ORDER, "cuda-emulated-tensor-cores"])
def implementation(request: pytest.FixtureRequest) -> Implementation:
    cores = request.param != ONE_ORDER
    return Implementation(
        request.param, lambda: CudaBackend(HostLauncher(), tensor_cores=cores), frozenset(), ("f16", "f32")
    )


def _exact(got: Array, want: Array) -> None:
    np.testing.assert_array_equal(got, want)


def _near(got: Array, want: Array) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-6 * float(np.abs(want).max(initial=1)))


@pytest.fixture
def equal(implementation: Implementation) -> Check:
    """How results of different steps are compared."""
    return _exact if implementation.name == ONE_ORDER else _near


def test_results_are_compared_bit_for_bit(equal: Check, implementation: Implementation) -> None:
    one: Array = np.ones(1, np.float32)
    with pytest.raises(AssertionError):
        equal(one, np.nextafter(one, np.float32(2)) if implementation.name == ONE_ORDER else one + 1e-5)
