"""States that are saved, shared, copied and put back, and pages that are copied: the tests of every backend, on CUDA in
emulation and on a GPU. A row's sums run in one order whatever the step, so results are compared bit for bit; with
tensor cores and the chunks of the delta rule those of steps that are cut elsewhere are compared with a bound, those of
one step with and without saves still bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from qwen35rt.backends.cuda.backend import CudaBackend
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

from .device import Device


@pytest.fixture(params=[False, True], ids=["one-order", "tensor-cores"])
def tensor_cores(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def implementation(device: Device, tensor_cores: bool) -> Implementation:
    name = "cuda-emulated" if device.small else "cuda"
    return Implementation(
        name, lambda: CudaBackend(device.launcher, tensor_cores=tensor_cores), frozenset(), ("f16", "f32")
    )


def _exact(got: Array, want: Array) -> None:
    np.testing.assert_array_equal(got, want)


def _near(got: Array, want: Array) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-6 * float(np.abs(want).max(initial=1)))


@pytest.fixture
def equal(tensor_cores: bool) -> Check:
    """How results of different steps are compared."""
    return _near if tensor_cores else _exact


def test_results_are_compared_bit_for_bit(equal: Check, tensor_cores: bool) -> None:
    one: Array = np.ones(1, np.float32)
    with pytest.raises(AssertionError):
        equal(one, one + 1e-5 if tensor_cores else np.nextafter(one, np.float32(2)))
