"""Choice of the instruction level (B88): forced ones give the same tokens, impossible ones are refused in words, and
a processor without AVX runs the module.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from qwen35rt.backends.base import Batch, Executable, Limits
from qwen35rt.errors import BackendUnavailable, ConfigError
from qwen35rt.model.source import open_source

from . import ahead
from .fixtures import write_tiny
from .implementations import cpu_backend, isa_levels, native

ROOT = Path(__file__).resolve().parents[1]
LEVELS = isa_levels()
PROMPT = [7, 65, 300, 12, 65, 7, 101]

pytestmark = pytest.mark.skipif(not LEVELS, reason="the compiled module qwen35rt._native is not built")


def greedy(exe: Executable, n: int) -> list[int]:
    """The first n tokens after the prompt."""
    pages, made, start = np.arange(exe.limits.pages, dtype=np.int32), list(PROMPT), 0
    for _ in range(n):
        logits, _ = exe.run(Batch.single(made[start:], start, pages))
        start = len(made)
        made.append(int(logits[0].argmax()))
    return made[len(PROMPT) :]


def tokens(path: Path, n: int, isa: str | None = None) -> list[int]:
    """Greedy tokens of a file at a level; None: what QWEN35RT_ISA says."""
    from qwen35rt.backends.cpu.backend import CpuBackend

    exe = CpuBackend(threads=1, isa=isa).compile(open_source(path).program, Limits(rows=16, out_rows=1, pages=2))
    try:
        return greedy(exe, n)
    finally:
        exe.close()


@pytest.mark.parametrize("model", ["tiny_dense", "tiny_moe"])
def test_every_level_gives_the_same_tokens(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """B88: QWEN35RT_ISA forces each level of this machine."""
    path = request.getfixturevalue(model)
    want = tokens(path, 24, "scalar")
    assert len(set(want)) > 3
    for isa in LEVELS:
        monkeypatch.setenv("QWEN35RT_ISA", isa)
        assert tokens(path, 24) == want, isa


def test_level_above_the_processor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """B88: a readable refusal, not an illegal instruction."""
    above = [isa for isa in native().isa_names() if isa not in LEVELS]
    if not above:
        pytest.skip("this machine has every level of the build")
    monkeypatch.setenv("QWEN35RT_ISA", above[0])
    with pytest.raises(BackendUnavailable) as e:
        tokens(Path(), 1)
    assert above[0] in str(e.value)
    assert "QWEN35RT_ISA" in str(e.value)
    assert LEVELS[-1] in str(e.value)


def test_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN35RT_ISA", "avx3")
    with pytest.raises(ConfigError, match=r"QWEN35RT_ISA.*avx3.*scalar"):
        tokens(Path(), 1)
    with pytest.raises(ConfigError, match=r"^isa: .*avx4.*scalar"):  # not what the variable says
        cpu_backend("avx4")


def test_best_level_is_the_highest_of_the_machine() -> None:
    assert native().best_isa() == LEVELS[-1]
    assert cpu_backend(LEVELS[0]).name == "cpu"


EMULATOR = shutil.which("qemu-x86_64")


def begin_ahead(chosen: list[pytest.Function]) -> list[pytest.Function]:
    waiting = [item for item in chosen if item.originalname == "test_processor_without_avx" and LEVELS and EMULATOR]
    if waiting:
        ahead.begin("without avx", partial(without_avx, write_tiny(ahead.folder() / "without_avx.gguf")))
    return waiting


def without_avx(path: Path) -> subprocess.CompletedProcess[str]:
    """Level and five tokens on a processor without AVX."""
    code = (
        "import sys; from pathlib import Path; from tests.test_isa import tokens, native;"
        "print(native().best_isa(), *tokens(Path(sys.argv[1]), 5))"
    )
    env = {k: v for k, v in os.environ.items() if k != "QWEN35RT_ISA"}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OPENBLAS_NUM_THREADS": "1"}
    command = [str(EMULATOR), "-cpu", "Nehalem", sys.executable, "-c", code, str(path)]
    return ahead.run(command, env=env)


def test_processor_without_avx(tiny_dense: Path) -> None:
    """B88: import and five tokens on an emulated processor without AVX, at the level chosen there."""
    if not EMULATOR:
        pytest.skip("no qemu-x86_64 (Debian package qemu-user)")
    ran = ahead.result("without avx", partial(without_avx, tiny_dense))
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.split() == ["scalar", *map(str, tokens(tiny_dense, 5, "scalar"))]
