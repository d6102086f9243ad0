"""States that are saved, shared, copied and put back, and pages that are copied: the tests of every backend, on CUDA in
emulation and on a GPU. A row's sums run in one order whatever the step, so results are compared bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.implementations import Implementation
from tests.ops.test_states import (  # noqa: F401
    Array,
    Check,
    equal,
    test_a_partly_filled_page_is_shared_by_copying_it,
    test_a_state_that_was_read_can_be_put_back,
    test_a_step_that_contradicts_itself_is_refused,
    test_saved_states_are_those_of_steps_that_end_there,
    test_sizes_of_a_slot_and_a_page,
    test_unknown_slots_and_pages_and_other_shapes_are_refused,
)

from .device import Device


@pytest.fixture
def implementation(device: Device) -> Implementation:
    name = "cuda-emulated" if device.small else "cuda"
    return Implementation(name, lambda: device.backend, frozenset(), ("f16", "f32"))


def test_results_are_compared_bit_for_bit(equal: Check) -> None:  # noqa: F811
    one: Array = np.ones(1, np.float32)
    with pytest.raises(AssertionError):
        equal(one, np.nextafter(one, np.float32(2)))
