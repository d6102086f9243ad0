"""The emulation finds what it is there to find: each fault below is put into a small kernel."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import pytest

from .host import HostLauncher, build, compiler, launch

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to build the kernels for the CPU")

KERNELS = """
extern "C" __global__ void turned(float *out, int barrier) { // out[i] = 63 - i through shared memory
    QRT_DYN_SMEM(float, room);
    int i = threadIdx.x;
    room[i] = (float)i;
    if (barrier) __syncthreads();
    out[i] = room[63 - i];
}
extern "C" __global__ void half_read(float *out) { // reads what nobody wrote
    QRT_DYN_SMEM(float, room);
    if (threadIdx.x < 32) room[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = room[threadIdx.x];
}
extern "C" __global__ void some_leave(float *out, int barrier) {
    if (threadIdx.x == 40) return;
    if (barrier) __syncthreads();
    if (!barrier) out[0] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
    out[threadIdx.x] = 1;
}
extern "C" __global__ void sums(const float *x, float *out) {
    float v = x[blockIdx.x * 64 + threadIdx.x];
    for (int lane = 16; lane; lane /= 2) v += __shfl_xor_sync(0xffffffffu, v, lane);
    out[blockIdx.x * 64 + threadIdx.x] = v;
}
"""


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    return build("faults", KERNELS, ["turned", "half_read", "some_leave", "sums"])


def _out() -> npt.NDArray[np.float32]:
    return np.full(64, -1, np.float32)


@pytest.mark.parametrize("order", [0, 1, 5])
def test_a_barrier_lets_all_arrive(kernels: ctypes.CDLL, order: int) -> None:
    out = _out()
    launch(kernels, "turned", (1, 1, 1), 64, 256, (out, np.int32(1)), order)
    np.testing.assert_array_equal(out, 63 - np.arange(64))


def test_a_missing_barrier_shows_between_orders(kernels: ctypes.CDLL) -> None:
    outs = [_out(), _out()]
    for order, out in enumerate(outs):
        launch(kernels, "turned", (1, 1, 1), 64, 256, (out, np.int32(0)), order)
    assert not np.array_equal(outs[0], outs[1])


def test_shared_memory_that_nobody_wrote_shows(kernels: ctypes.CDLL) -> None:
    outs = [_out(), _out()]
    for order, out in enumerate(outs):
        launch(kernels, "half_read", (1, 1, 1), 64, 256, (out,), order)
    assert (outs[0][:32] == 1).all()
    assert np.isnan(outs[0][32:]).all()
    assert not np.array_equal(outs[0][32:], outs[1][32:])


@pytest.mark.parametrize("barrier", [0, 1])
def test_threads_that_wait_for_one_that_left_are_an_error(kernels: ctypes.CDLL, barrier: int) -> None:
    with pytest.raises(AssertionError, match=r"block \(0, 0, 0\): \d+ of 64 threads are done, the others wait"):
        launch(kernels, "some_leave", (1, 1, 1), 64, 0, (_out(), np.int32(barrier)), 0)
    launch(kernels, "turned", (1, 1, 1), 64, 256, (_out(), np.int32(1)), 0)  # the next launch is sound


@pytest.mark.parametrize("order", [0, 1, 5])
def test_shuffles_exchange_within_warps(kernels: ctypes.CDLL, order: int) -> None:
    x = np.random.default_rng(8).integers(-99, 99, 192).astype(np.float32)
    out = np.empty_like(x)
    launch(kernels, "sums", (3, 1, 1), 64, 0, (x, out), order)
    np.testing.assert_array_equal(out, x.reshape(-1, 32).sum(1).repeat(32))


@pytest.mark.parametrize("wrong", [np.float32(1), np.int64(1), np.zeros(3, np.float32)], ids=["float", "long", "array"])
def test_arguments_are_checked_against_the_declaration(kernels: ctypes.CDLL, wrong: object) -> None:
    with pytest.raises((AssertionError, KeyError)):
        launch(kernels, "turned", (1, 1, 1), 64, 256, (_out(), wrong), 0)
    with pytest.raises(AssertionError, match="1 arguments"):
        launch(kernels, "turned", (1, 1, 1), 64, 256, (_out(),), 0)


def test_memory_is_full_of_junk_until_it_is_written() -> None:
    assert np.isnan(HostLauncher().empty((4,), np.float32)).all()
    assert HostLauncher(order=1).empty((1,), np.uint8)[0] == 0xA5
