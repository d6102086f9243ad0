"""NVRTC compiles every module without a GPU; ptxas reports what each kernel uses, held to a budget.

By default each file and several formats of products for sm_80, a few files for the other architectures; everything
under ``-m long``.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from qwen35rt.backends.cuda import source
from qwen35rt.cpu_count import usable_cpus
from tests.cuda_host import nvrtc

# Most registers of a thread, bytes of spills and of stack. 128 registers let two blocks of 256 threads live on a
# multiprocessor; for sm_120, which nothing is tuned for, the compiler takes more.
BUDGETS = {75: (128, 0, 0), 80: (128, 0, 0), 90: (128, 0, 0), 120: (160, 8, 8)}
OFTEN = ("Q4_K", "Q6_K", "Q8_0", "Q5_1", "IQ2_XS", "TQ1_0", "NVFP4", "BF16")  # of linear
TILED = ("Q2_K", "Q6_K", "F16", "BF16")  # of linear_tiles
ELSEWHERE = (
    "linear",
    "linear_tiles",
    "moe_tiles",
    "moe_lists",
    "attention",
    "attention_tiles",
    "delta_chunks",
)  # files that are compiled for other architectures

pytestmark = pytest.mark.skipif(
    nvrtc.library() is None, reason="NVRTC is not installed (pip install nvidia-cuda-nvrtc)"
)


def _modules() -> list[Any]:
    made = []
    for file in source.files():
        for variant in source.variants(file):
            for arch in BUDGETS:
                first = variant == ("Q4_K" if file in source.BY_FORMAT else source.variants(file)[0])
                often = first and (arch == 80 or file in ELSEWHERE)
                often = often or (arch == 80 and file == "linear" and variant in OFTEN)
                often = often or (arch in (80, 90) and file == "linear_tiles" and variant in TILED)
                name = f"{file}-{variant}-sm_{arch}" if variant else f"{file}-sm_{arch}"
                marks = () if often else pytest.mark.long
                made.append(pytest.param(file, variant, arch, id=name, marks=marks))
    return made


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[dict[Any, Future[tuple[str, list[nvrtc.Usage]]]]]:
    """Log and kernels of each module that was chosen, compiled as many at once as there are cores."""
    found: list[Any] = [item for item in request.session.items if item.path == request.path]
    chosen = [tuple(item.callspec.params[name] for name in ("file", "variant", "arch")) for item in found]
    pool = ProcessPoolExecutor(usable_cpus().affinity, get_context("spawn"))
    try:
        yield {module: pool.submit(nvrtc.compile_file, *module) for module in chosen}
    finally:
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(("file", "variant", "arch"), _modules())
def test_modules_compile_within_their_budget(compiled: Any, file: str, variant: str, arch: int) -> None:
    log, found = compiled[file, variant, arch].result()
    assert {u.kernel for u in found} == set(source.kernels(file)), log
    assert "warning" not in log
    for use in found:
        registers, spills, stack = BUDGETS[arch]
        assert use.registers <= registers, use
        assert use.spills <= spills, use
        assert use.stack <= stack, use
        assert use.shared == 0, use  # only dynamic shared memory
