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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen35rt.backends.base import Batch, Limits
from qwen35rt.backends.cuda import ops, source
from qwen35rt.backends.cuda.backend import CudaBackend
from qwen35rt.backends.cuda.memory import HEADER
from qwen35rt.backends.cuda.source import kernel_folder
from qwen35rt.backends.reference import ReferenceBackend
from qwen35rt.formats import FORMATS
from qwen35rt.model.program import Builder, Program, StateShape, Value
from tests import ahead
from tests.cuda_host import host
from tests.cuda_host.host import HostLauncher, compiler
from tests.engine.rig import check_best

from .case import BAD_ACTIVATIONS, Case, Outcome, check_bad_activation, check_outcome, run_case
from .cases import all_cases
from .tensors import plain_tensor, random_tensor

CASES = all_cases()
PRODUCTS, OTHERS = 24, 4  # of them every so-many-th runs by default, and the first of each op
SANITIZED_OFTEN = ("linear-Q4_K-5x256-normal", "attention-3-1-64-several")
# group -> cases and flags of sanitized.py, and kernels that must be among those that they run: each is in some group.
SANITIZED: dict[str, tuple[tuple[str, ...], str]] = {
    "some": (SANITIZED_OFTEN, "copy_items attention_tiles_64 embed linear_8"),
    "delta": (
        (
            "delta_net-jumps-3x20",
            "delta_net-jumps-2x128",
            "delta_net-jumps-4x32",
            "delta_net-3-3-48-mixed-decay-mixed",
            "delta_net-2-4-16-keep-mixed",
            "conv1d_silu-16k5-mixed",
        ),
        "delta_net_4 delta_net_8 delta_net_16 delta_prepare delta_walk conv1d_silu conv1d_keep",
    ),
    "attention": (
        (
            "attention-6-3-48-sharp1-mixed",
            "attention-3-1-20-f32",
            "attention-4-2-128-several",
            "attention-long-f32",
        ),
        "kv_append attention attention_merge attention_tiles_128",
    ),
    "wide": (("attention-2-1-256-sharp8",), "attention_tiles_256"),
    "delta-wide": (("delta_net-2-2-160-wide",), "delta_net_32 delta_prepare delta_walk"),
    "products": (
        (
            "embed-Q6_K-256",
            "linear-F16-17x33-odd",
            "linear-Q8_0-17x96-exact",
            "linear-IQ3_S-3x512-exact",
            "linear-MXFP4-5x96-exact",
            "linear-Q5_0-5x96-exact",
            "linear-Q5_K-3x512-exact",
        ),
        "embed quantize linear_1 linear_2 linear_4 linear_8",
    ),
    "tiles": (("linear-Q4_K-513x768-exact", "linear-BF16-513x768-exact"), "linear_tiles_64"),
    "large": (("--large", "linear-Q6_K-513x768-exact", "linear-BF16-513x768-exact"), "linear_tiles_128"),
    "experts": (
        (
            "moe_linear-Q6_K-17x768-3of5-exact",
            "moe_linear-Q4_0-17x96-3of5-reduce-exact",
            "moe_linear-BF16-17x96-3of5-reduce-exact",
        ),
        "moe_route moe_linear moe_linear_reduce moe_lists moe_sum moe_tiles",
    ),
    "sample": (("--top",), "top_k_parts top_k_join top_k"),
    "rest": (
        (
            "rope-2x32-3d",
            "rms_norm-heads-1",
            "gated_rms_norm-3x24",
            "l2_norm-heads-1",
            "sigmoid_mul-gate-columns",
            "silu_mul-views",
            "add-7",
            "delta_gates-bias0",
            "gather_rows-7",
            "moe_route-2of5-ties",
            "ffn-Q4_K",
        ),
        "rope rms_norm gated_rms_norm l2_norm sigmoid_mul silu_mul add delta_gates gather_rows moe_route",
    ),
}
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


def begin_ahead(chosen: list[pytest.Function]) -> list[pytest.Function]:
    """Libraries of the formats that the chosen cases name, and the runs under sanitizers."""
    if compiler() is None:
        return []
    names = [item.name for item in chosen]
    host.begin(
        ("linear", f.name) for f in FORMATS if any(f"linear-{f.name}-" in n or f"embed-{f.name}-" in n for n in names)
    )
    for item in chosen:
        if item.originalname.startswith("test_tiles_o"):
            given: dict[str, Any] = item.callspec.params
            host.begin([("moe_tiles" if "reduce" in given else "linear_tiles", given["fmt"])])
    waiting = [item for item in chosen if item.originalname == "test_kernels_under_sanitizers"]
    for item in waiting:
        group: Any = item.callspec.params["group"]
        ahead.begin(("sanitized", group), partial(_sanitized, group))
    return waiting


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


# Of each group of formats one (a scale for 32 columns or 16, with minima or without, floats), for tiles of 64; some of
# them for tiles of 128 and for experts.
OFTEN_TILED = ("Q8_0", "Q2_K", "Q4_K", "NVFP4", "F16", "BF16")
SOMETIMES_TILED = ("Q2_K", "BF16")


def _formats(often: tuple[str, ...], *more: Any) -> list[Any]:
    """Those with tiles; but for ``often`` they take long."""
    names = source.variants("linear_tiles")
    return [pytest.param(n, *more, marks=() if n in often else pytest.mark.long) for n in names]


def _run_tiles(program: Program, rows: int) -> None:
    """Tiles equal passes over rows but for the order of sums, and themselves in another order of threads."""
    limits = Limits(rows=rows, out_rows=rows, pages=16, page_tokens=16)
    batch = Batch.single(range(rows), 0, np.arange(16, dtype=np.int32), out_rows=range(rows))
    outs = []
    for cores, order in ((False, 0), (True, 0), (True, 1)):
        launcher = HostLauncher(order=order)
        exe = CudaBackend(launcher, tensor_cores=cores).compile(program, limits)
        outs.append(exe.run(batch)[0].copy())
        exe.close()
        assert any("tiles" in name for name in launcher.names) == cores
    assert np.abs(outs[1] - outs[0]).max() < 1e-5 * np.abs(outs[0]).max()
    np.testing.assert_array_equal(outs[1], outs[2])


def _program(b: Builder, x: Value, out: Value, rows: int) -> Program:
    return Program(tuple(b.ops), tuple(b.values), x, out, StateShape(0, 1, 16, 0, 1, 16, 16, 4), rows)


@pytest.mark.parametrize(("fmt", "tile"), _formats(OFTEN_TILED, 64) + _formats(SOMETIMES_TILED, 128))
def test_tiles_on_tensor_cores_equal_passes_over_rows(fmt: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain path computes what the fragments mean; rows and columns that fill no tile, several tiles, a scale."""
    monkeypatch.setattr(ops, "LARGE_FROM", 1 if tile == 128 else 1000)
    rng = np.random.default_rng(zlib.crc32(fmt.encode()))
    b, rows = Builder(), tile + 6
    x = b.embed(plain_tensor("table", rng.normal(size=(rows, 768))))
    w = replace(random_tensor(rng, "w", fmt, tile + 19, 768), scale=np.array([1.5], np.float32))
    out = b.gather_rows(b.linear(x, w, "y"), "out")
    _run_tiles(_program(b, x, out, rows), rows)


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("fmt", _formats(SOMETIMES_TILED))
def test_tiles_of_experts_equal_products_one_by_one(fmt: str, reduce: bool) -> None:
    """An expert that all rows name, one that few do and one that nobody does; scores that are no numbers; a scale for
    each expert; two products that share the groups."""
    rng = np.random.default_rng(zlib.crc32(fmt.encode()) + reduce)
    b, rows, used, experts = Builder(), 70, 3, 6
    scores = rng.normal(size=(rows, experts)).astype(np.float32) + np.array([9, 0, 0, -20, -1, 0], np.float32)
    scores[5] = np.nan
    table = plain_tensor("scores", scores)
    route = b.moe_route(b.embed(table), used, "route")
    b.scope("x.")
    x = b.embed(plain_tensor("table", rng.normal(size=(rows, 512 * (used if reduce else 1)))))
    scale = rng.uniform(0.5, 2, experts).astype(np.float32)
    w, v = (replace(random_tensor(rng, n, fmt, 83, 512, experts), scale=scale) for n in "wv")
    y = b.add(b.moe_linear(x, w, route, used, reduce, "y"), b.moe_linear(x, v, route, used, reduce, "z"), "sum")
    scores[5] = 0 if reduce else np.nan  # its weights would be no numbers
    table.data.view(np.float32)[:] = scores.reshape(-1)
    _run_tiles(_program(b, x, b.gather_rows(y, "out"), rows), rows)


@pytest.mark.parametrize("fmt", ["F16", "BF16"])
def test_tiles_of_floats_hold_numbers_of_any_size(fmt: str) -> None:
    """Rows from 1e-30 to 1e30, and columns of a row between 1e-6 and 1 of its largest."""
    rng = np.random.default_rng(zlib.crc32(fmt.encode()) + 1)
    b, rows = Builder(), 61
    numbers = rng.normal(size=(rows, 512)) * 10.0 ** rng.uniform(-6, 0, (rows, 512))
    numbers *= 10.0 ** np.linspace(-30, 30, rows)[:, None]
    x = b.embed(plain_tensor("table", numbers.astype(np.float32)))
    w = random_tensor(rng, "w", fmt, 16, 512)
    out = b.gather_rows(b.linear(x, w, "y"), "out")
    batch = Batch.single(range(rows), 0, np.arange(4, dtype=np.int32), out_rows=range(rows))
    limits = Limits(rows=rows, out_rows=rows, pages=4, page_tokens=16)
    program = _program(b, x, out, rows)
    want = ReferenceBackend(np.float64).compile(program, limits).run(batch)[0]
    exe = CudaBackend(HostLauncher()).compile(program, limits)
    got = exe.run(batch)[0]
    exe.close()
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert error.max() < 2.0**-16  # that of a number is 2^-18; sums are smaller than their parts


@pytest.mark.parametrize(("fmt", "bad"), BAD_ACTIVATIONS)
def test_b29_one_bad_activation_reaches_every_product(fmt: str, bad: float) -> None:
    check_bad_activation(CudaBackend(HostLauncher()), fmt, bad)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize(("n", "k"), [(5, 1), (5, 4), (8200, 40), (16_500, 4096)])
def test_b29_top_k_equals_a_stable_sort(n: int, k: int, order: int) -> None:
    """Ties go to the lower id, a NaN comes first; k may exceed what a part of a row has, and take several rounds."""
    rng = np.random.default_rng([n, k])
    rows = rng.integers(-50, 50, (4, n)).astype(np.float32)
    rows[0] = np.where(rows[0] == 0, rng.choice([0.0, -0.0], n), -np.abs(rows[0]))  # 0 and -0 are one value
    rows[1] = 3
    rows[2, n // 2] = np.nan
    rows[2, n // 2 - 1] = -np.float32(np.nan)
    rows[3, 1:] = -np.inf
    rows[3, n // 2] = np.inf
    b = Builder()
    x = b.embed(random_tensor(rng, "table", "F32", 4, n))
    x_table = b.ops[0].weights[0]
    x_table.data.view(np.float32)[:] = rows.reshape(-1)
    out = b.gather_rows(x, "wanted")
    program = Program(tuple(b.ops), tuple(b.values), x, out, StateShape(0, 1, 16, 0, 1, 16, 16, 4), 4)
    exe = CudaBackend(HostLauncher(order=order)).compile(program, Limits(rows=4, out_rows=4, pages=1))
    pages = np.zeros(1, np.int32)
    for wanted in ([2, 1], [0, 1, 2, 3], [3, 0], []):  # what a step found is gone with the next
        found, report = exe.run(Batch.single([0, 1, 2, 3], 0, pages, out_rows=wanted), top=k)
        check_best(found, rows[wanted], k)
        assert report.on_gpu
        for place, row in enumerate(wanted):
            np.testing.assert_array_equal(exe.full_logits(place), rows[row])
    exe.close()


@pytest.mark.parametrize(("n", "k"), [(5, 5), (5, 40), (8192, 4097)])
def test_more_logits_than_can_be_found_are_all(n: int, k: int) -> None:
    rng = np.random.default_rng(n)
    b = Builder()
    x = b.embed(random_tensor(rng, "table", "F32", 4, n))
    out = b.gather_rows(x, "wanted")
    program = Program(tuple(b.ops), tuple(b.values), x, out, StateShape(0, 1, 16, 0, 1, 16, 16, 4), 4)
    launcher = HostLauncher()
    exe = CudaBackend(launcher).compile(program, Limits(rows=4, out_rows=4, pages=1))
    batch = Batch.single([3], 0, np.zeros(1, np.int32))
    want = exe.run(batch)[0].copy()
    np.testing.assert_array_equal(exe.run(batch, top=k)[0], want)
    assert "top_k" not in launcher.names
    exe.close()


def test_the_head_of_a_step_is_that_of_the_kernels() -> None:
    text = (kernel_folder() / "common.cuh").read_text()
    (body,) = re.findall(r"enum \{(.*?)\bHEADER\n", text, re.DOTALL)
    assert tuple(re.findall(r"^\s*(\w+),", body, re.MULTILINE)) == HEADER


@pytest.mark.parametrize("group", [g if g == "some" else pytest.param(g, marks=pytest.mark.long) for g in SANITIZED])
def test_kernels_under_sanitizers(group: str) -> None:
    """Addresses (shared memory and every array have their exact size), alignment, shifts and overflows."""
    if _libasan() is None:
        pytest.skip("no address sanitizer for g++")
    done = ahead.result(("sanitized", group), partial(_sanitized, group))
    names, kernels = SANITIZED[group]
    assert done.returncode == 0, done.stderr[-4000:]
    count, _, ran = done.stdout.strip().partition(" cases: ")
    assert int(count) == len([n for n in names if not n.startswith("--")])
    assert set(kernels.split()) <= set(ran.split())


def _sanitized(group: str) -> subprocess.CompletedProcess[str]:
    """Run a group's cases in a child."""
    environment = os.environ | {
        "LD_PRELOAD": _libasan() or "",
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "PYTHONPATH": f"{FOLDER / 'src'}:{FOLDER}",
    }
    command = [sys.executable, "-m", "tests.cuda_host.sanitized", str(host.folder()), *SANITIZED[group][0]]
    return ahead.run(command, 280, environment, FOLDER)


def test_every_kernel_is_in_a_group_under_sanitizers() -> None:
    named = {name for _, kernels in SANITIZED.values() for name in kernels.split()}
    assert named == {name for file in source.files() for name in source.kernels(file)}


def _libasan() -> str | None:
    path = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    return path if Path(path).is_absolute() else None
