"""Pages and slots are copied by one launch: the item alone changes, whatever its size, in all of a pool's layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qwen35rt.backends.cuda import backend
from qwen35rt.model.program import StateShape
from tests.cuda_host.copies import copy_and_check
from tests.cuda_host.cupy_host import Machine, launch_module
from tests.cuda_host.host import HostLauncher, compiler

from .device import table_executable

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to build the kernels for the CPU")


@pytest.mark.parametrize("order", [0, 1, 3])
def test_an_item_is_copied_and_nothing_else(order: int) -> None:
    copy_and_check(HostLauncher(order=order))


def _filled(pools: tuple[Any, ...]) -> list[npt.NDArray[Any]]:
    rng = np.random.default_rng(29)
    made = [rng.normal(size=pool.shape).astype(pool.dtype) for pool in pools]
    for pool, numbers in zip(pools, made, strict=True):
        pool.set(numbers)
    return made


def test_copies_are_launched_on_the_stream_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch a copy, behind the steps before it; more than a block's share where a state is large."""
    monkeypatch.setattr(backend, "MOST_COPYING", 2)
    machine = Machine()
    launcher = launch_module(machine).CupyLauncher()
    exe = table_executable(launcher, StateShape(3, 2, 16, 2, 4, 96, 24, 4))
    pools = exe._pools.keys, exe._pools.values, exe._pools.delta, exe._pools.conv
    with launcher.activate():
        keys, values, delta, conv = _filled(pools)
    assert exe._pools.delta[0].nbytes > 2 * 2 * backend.COPIED_BYTES
    machine.launches = 0
    exe.copy_page(4, 1)
    exe.copy_slot(0, 2)
    exe.copy_slot(1, 1)  # nothing to do
    assert machine.launches == 2
    assert machine.streams == {launcher._stream.ptr}
    keys[:, 1], values[:, 1] = keys[:, 4], values[:, 4]
    delta[2], conv[2] = delta[0], conv[0]
    for pool, want in zip(pools, (keys, values, delta, conv), strict=True):
        np.testing.assert_array_equal(pool.get(), want)


def test_a_state_that_is_empty_takes_no_launch() -> None:
    """Models without attention have no pages, those without delta layers no slots."""
    launcher = HostLauncher()
    exe = table_executable(launcher)
    exe.copy_page(0, 1)
    exe.copy_slot(0, 1)
    assert launcher.launches == 0
