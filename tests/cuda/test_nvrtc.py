"""NVRTC compiles every module without a GPU; ptxas reports what each kernel uses, held to a budget.

By default sm_80 for some formats and the other architectures for one; everything under ``-m long``.
"""

from __future__ import annotations

from typing import Any

import pytest

from qwen35rt.backends.cuda import source
from tests.cuda_host import nvrtc

ARCHITECTURES = (80, 75, 90, 120)
# Registers of a thread: 128 let two blocks of 256 threads live on a multiprocessor.
REGISTERS, SPILLS, STACK = 128, 0, 0
OFTEN = ("Q4_K", "IQ2_XS", "BF16")

pytestmark = pytest.mark.skipif(
    nvrtc.library() is None, reason="NVRTC is not installed (pip install nvidia-cuda-nvrtc)"
)


def _modules() -> list[Any]:
    made = []
    for file in source.files():
        for variant in source.variants(file):
            for arch in ARCHITECTURES:
                first = variant == ("Q4_K" if file in source.BY_FORMAT else source.variants(file)[0])
                often = arch == 80 and ((file in ("linear", "linear_tiles") and variant in OFTEN) or first)
                name = f"{file}-{variant}-sm_{arch}" if variant else f"{file}-sm_{arch}"
                marks = () if often or (file, arch) == ("quantize", 75) else pytest.mark.long
                made.append(pytest.param(file, variant, arch, id=name, marks=marks))
    return made


@pytest.mark.parametrize(("file", "variant", "arch"), _modules())
def test_modules_compile_within_their_budget(file: str, variant: str, arch: int) -> None:
    log, found = nvrtc.compile_file(file, variant, arch)
    assert {u.kernel for u in found} == set(source.kernels(file)), log
    assert "warning" not in log
    for use in found:
        assert use.registers <= REGISTERS, use
        assert use.spills <= SPILLS, use
        assert use.stack <= STACK, use
        assert use.shared == 0, use  # only dynamic shared memory
