"""The pool of threads under the thread sanitizer: see pool.c."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.kernels.test_levels import HERE, ROOT, Compiler, call

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pool")
    compiler = Compiler(folder, flags=("-O1", "-g1", "-fsanitize=thread", "-Wall", "-Wextra", "-Werror"))
    compiler.run(HERE / "pool.c", ROOT / "csrc" / "threadpool.c", "-o", folder / "pool", "-lpthread")
    return folder / "pool"


@pytest.mark.parametrize("threads", [1, 2, 5, 32])
def test_nobody_passes_a_barrier_before_all_have_come(program: Path, threads: int) -> None:
    """B87: also with more threads than processors, where those that wait sleep."""
    assert call(program, str(threads), "40", "25") == (0, "")
