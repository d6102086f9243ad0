"""Which kernels the op cases launch, in every format and type of pages. Nothing is computed: launches are noted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen35rt.backends.cuda import source
from qwen35rt.backends.cuda.backend import CudaBackend
from qwen35rt.backends.fusion import PRODUCTS
from tests.cuda_host.host import HostLauncher
from tests.ops.case import Case, run_case
from tests.ops.cases import all_cases

# Kernels that no op case launches -> the tests that do, in all formats.
ELSEWHERE = {
    "copy_items": "test_copy.py",
    "top_k_parts": "test_b29_top_k_equals_a_stable_sort",
    "top_k_join": "test_b29_top_k_equals_a_stable_sort",
    "top_k": "test_b29_top_k_equals_a_stable_sort",
    "linear_tiles_128": "test_tiles_on_tensor_cores_equal_passes_over_rows, test_op_in_large_tiles",
}
Launched = set[tuple[str, str, str]]  # file, variant, kernel


class Noted(HostLauncher):
    """A launcher that computes nothing. Results are zeros."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.launched: Launched = set()

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.empty(shape, dtype)

    def download(self, array: npt.NDArray[Any], to: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        return np.zeros(array.shape, array.dtype)

    def capture(self, go: Callable[[], None]) -> Callable[[], None]:
        return go

    def kernel(self, file: str, variant: str, name: str) -> Any:
        return partial(self._note, file, variant, name)

    def _note(self, file: str, variant: str, name: str, *launch: Any) -> None:
        self.launched.add((file, variant, name))


def _chosen() -> list[Case]:
    """Of products those of each format that differ in more than their sizes; other cases but for those that are cut."""
    chosen: dict[object, Case] = {}
    for case in all_cases():
        name, *rest = case.label.split("-")
        of_format = case.op, name, "reduce" in rest, rest[-1] if rest else ""
        if rest[-1:] not in (["by1"], ["mixed"]):
            chosen.setdefault(of_format if case.op in ("embed", *PRODUCTS) else case.id, case)
    return list(chosen.values())


def test_every_kernel_is_launched_by_an_op_case() -> None:
    launched: Launched = set()
    for case in _chosen():
        launcher = Noted()
        run_case(case, CudaBackend(launcher))
        launched |= launcher.launched
    there = {(f, v, name) for f in source.files() for v in source.variants(f) for name in source.kernels(f)}
    assert sorted({name for _, _, name in there - launched}) == sorted(ELSEWHERE)
    assert {launch for launch in there - launched if launch[2] not in ELSEWHERE} == set()
    assert launched <= there
