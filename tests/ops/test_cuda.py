"""The CUDA backend in emulation: the unchanged .cu files on NumPy arrays, against the reference.

Each case runs with two orders of threads and blocks that must agree bit for bit: a missing barrier shows. By default a
part of the many cases runs here; all of them under ``-m long``. See tests/cuda_host/host.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen35rt.backends.base import Batch, Limits
from qwen35rt.backends.cuda.backend import CudaBackend
from qwen35rt.backends.cuda.memory import HEADER
from qwen35rt.backends.cuda.source import kernel_folder
from qwen35rt.formats import FORMATS
from qwen35rt.model.program import Builder, Program, StateShape
from tests.cuda_host.host import HostLauncher, compiler

from .case import Case, Outcome, check_outcome, run_case
from .cases import all_cases
from .tensors import random_tensor

CASES = all_cases()
PRODUCTS, OTHERS = 24, 4  # of them every so-many-th runs by default, and the first of each op
SANITIZED_OFTEN = (
    "linear-Q4_K-5x256-normal",
    "attention-6-3-48-sharp1-mixed",
    "attention-3-1-64-several",
    "delta_net-jumps-3x20",
)
SANITIZED = (
    "rope-2x32-3d",
    "delta_net-3-3-48-mixed-decay-mixed",
    "delta_net-jumps-2x128",
    "embed-Q6_K-256",
    "linear-F16-17x33-odd",
    "linear-Q8_0-17x96-exact",
    "linear-IQ3_S-3x512-exact",
    "linear-MXFP4-5x96-exact",
    "moe_linear-Q6_K-17x768-3of5-exact",
    "moe_linear-Q4_0-17x96-3of5-reduce-exact",
    "rms_norm-heads-1",
    "sigmoid_mul-gate-columns",
    "gather_rows-7",
    "moe_route-2of5-ties",
    "attention-3-1-20-f32",
    "attention-4-2-128-several",
    "conv1d_silu-16k5-mixed",
)
FOLDER = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(compiler() is None, reason="no g++ to build the kernels for the CPU")


def _cases() -> list[Any]:
    made, seen = [], set()
    for case in CASES:
        product = case.op in ("linear", "moe_linear") and not case.label.endswith("odd")
        often = zlib.crc32(case.id.encode()) % (PRODUCTS if product else OTHERS) == 0
        often = often or case.op not in seen or case.id in SANITIZED_OFTEN
        seen.add(case.op)
        made.append(pytest.param(case, id=case.id, marks=() if often else pytest.mark.long))
    return made


def _same(a: Outcome, b: Outcome) -> None:
    for x, y in zip(a.rows + a.delta + a.conv, b.rows + b.delta + b.conv, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("case", _cases())
def test_op(case: Case) -> None:
    got = run_case(case, CudaBackend(HostLauncher()))
    check_outcome(case, got)
    _same(run_case(case, CudaBackend(HostLauncher(order=1))), got)


def _case(name: str) -> Case:
    (found,) = (c for c in CASES if c.id == name)
    return found


# Decode behind 280 tokens: three blocks share a row's attention, from the second step on in a graph.
PIECES = replace(_case("attention-2-1-32-sharp8"), label="pieces", lengths=(288, 5), chunks=((280, *[1] * 8), (1,)))


@pytest.mark.parametrize(
    "case", [PIECES, _case("delta_net-T65"), _case("delta_net-jumps-4x32"), _case("ffn-Q8_0")], ids=lambda c: c.id
)
def test_graphs_and_thread_orders_change_no_bit(case: Case) -> None:
    """Steps replayed from a bucket's graph equal those launched one by one; threads at random too."""
    eager = run_case(case, CudaBackend(HostLauncher(order=7), graphs=False))
    check_outcome(case, eager)
    _same(run_case(case, CudaBackend(HostLauncher(order=3))), eager)


def test_pieces_of_attention_are_joined_as_one_block_joins_them() -> None:
    """A row in the middle of a prompt, which one block serves, and the same row in decode, shared by three."""
    whole = run_case(replace(PIECES, chunks=((288,), (5,))), CudaBackend(HostLauncher()))
    _same(run_case(PIECES, CudaBackend(HostLauncher())), whole)


TILED = ("Q8_0", "Q2_K", "Q4_K", "NVFP4")


@pytest.mark.parametrize(
    "fmt", [f.name if f.name in TILED else pytest.param(f.name, marks=pytest.mark.long) for f in FORMATS if f.quantized]
)
def test_tiles_on_tensor_cores_equal_passes_over_rows(fmt: str) -> None:
    """The plain path computes what the fragments mean; rows and columns that fill no tile, several tiles, a scale."""
    rng = np.random.default_rng(zlib.crc32(fmt.encode()))
    b = Builder()
    x = b.embed(random_tensor(rng, "table", "F32", 70, 768))
    w = replace(random_tensor(rng, "w", fmt, 83, 768), scale=np.array([1.5], np.float32))
    y = b.linear(x, w, "y")
    out = b.gather_rows(y, "out")
    program = Program(tuple(b.ops), tuple(b.values), x, out, StateShape(0, 1, 16, 0, 1, 16, 16, 4), 70)
    limits = Limits(rows=70, out_rows=70, pages=5, page_tokens=16)
    batch = Batch.single(range(70), 0, np.arange(5, dtype=np.int32), out_rows=range(70))
    outs = []
    for cores, order in ((False, 0), (True, 0), (True, 1)):
        exe = CudaBackend(HostLauncher(order=order), tensor_cores=cores).compile(program, limits)
        outs.append(exe.run(batch)[0].copy())
        exe.close()
    assert np.abs(outs[1] - outs[0]).max() < 1e-5 * np.abs(outs[0]).max()
    np.testing.assert_array_equal(outs[1], outs[2])


@pytest.mark.parametrize("fmt", ["Q8_0", "Q4_0", "IQ4_NL"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_b29_one_bad_activation_reaches_every_product(fmt: str, bad: float) -> None:
    """Rounding to int8 must not turn a NaN or an infinity into a number."""
    rng = np.random.default_rng(29)
    b = Builder()
    table = random_tensor(rng, "table", "F32", 4, 96)
    x = b.embed(table)
    y = b.linear(x, random_tensor(rng, "w", fmt, 17, 96), "y")
    table.data.view(np.float32).reshape(4, 96)[2, 40] = bad
    program = Program(tuple(b.ops), tuple(b.values), x, y, StateShape(0, 1, 16, 0, 1, 16, 16, 4), 4)
    exe = CudaBackend(HostLauncher()).compile(program, Limits(rows=4, out_rows=4, pages=1))
    out = exe.run(Batch.single([0, 1, 2, 3], 0, np.zeros(1, np.int32), out_rows=[0, 1, 2, 3]))[0]
    assert np.isfinite(out[[0, 1, 3]]).all()
    assert not np.isfinite(out[2]).any()
    exe.close()


@pytest.mark.parametrize("n", [5, 2048, 5000])
@pytest.mark.parametrize("k", [1, 4, 40])
def test_top_k_equals_a_stable_sort(n: int, k: int) -> None:
    """Ties go to the lower id, a NaN comes first; k may exceed what a part of a row has."""
    rng = np.random.default_rng([n, k])
    rows = rng.integers(-50, 50, (4, n)).astype(np.float32)
    rows[1] = 3
    rows[2, n // 2] = np.nan
    rows[3, 1:] = -np.inf
    b = Builder()
    x = b.embed(random_tensor(rng, "table", "F32", 4, n))
    x_table = b.ops[0].weights[0]
    x_table.data.view(np.float32)[:] = rows.reshape(-1)
    out = b.gather_rows(x, "wanted")
    program = Program(tuple(b.ops), tuple(b.values), x, out, StateShape(0, 1, 16, 0, 1, 16, 16, 4), 4)
    exe = CudaBackend(HostLauncher()).compile(program, Limits(rows=4, out_rows=4, pages=1))
    batch = Batch.single([0, 1, 2, 3], 0, np.zeros(1, np.int32), out_rows=[0, 1, 2, 3])
    ids, values, report = exe.run_top(batch, min(k, n))
    want = np.argsort(-np.where(np.isnan(rows), np.inf, rows), 1, kind="stable")[:, :k]
    np.testing.assert_array_equal(ids, want)
    np.testing.assert_array_equal(values, np.take_along_axis(rows, want, 1))
    assert report.on_gpu
    exe.close()


def test_the_head_of_a_step_is_that_of_the_kernels() -> None:
    text = (kernel_folder() / "common.cuh").read_text()
    (body,) = re.findall(r"enum \{(.*?)\bHEADER\n", text, re.DOTALL)
    assert tuple(re.findall(r"^\s*(\w+),", body, re.MULTILINE)) == HEADER


@pytest.mark.parametrize(
    "names", [SANITIZED_OFTEN, pytest.param(SANITIZED, marks=pytest.mark.long)], ids=["some", "more"]
)
def test_kernels_under_sanitizers(names: tuple[str, ...]) -> None:
    """Addresses (shared memory and every array have their exact size), alignment, shifts and overflows."""
    library = _libasan()
    if library is None:
        pytest.skip("no address sanitizer for g++")
    environment = os.environ | {
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "PYTHONPATH": f"{FOLDER / 'src'}:{FOLDER}",
    }
    command = [sys.executable, "-m", "tests.cuda_host.sanitized", *names]
    done = subprocess.run(command, env=environment, cwd=FOLDER, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"{len(names)} cases" in done.stdout


def _libasan() -> str | None:
    path = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    return path if Path(path).is_absolute() else None
