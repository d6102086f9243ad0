"""On a real NVIDIA GPU: ``pytest -m gpu``. Skipped, with the reason, where there is none; left out without ``-m``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen35rt import load
from qwen35rt.backends.base import Batch, Limits
from qwen35rt.backends.cuda import open_cuda
from qwen35rt.backends.cuda.backend import CudaBackend
from qwen35rt.errors import BackendUnavailable
from qwen35rt.model.gguf_file import open_gguf
from qwen35rt.model.graph import build_program
from qwen35rt.model.hparams import read_hparams
from qwen35rt.model.program import Program
from qwen35rt.model.weights import load_weights
from tests.ops.case import Case, check_case, run_case
from tests.ops.cases import all_cases
from tests.oracle import ALL_FILES, EXPERTS, compiled, golden, model, needs_oracle, prompt_logits

pytestmark = pytest.mark.gpu
CASES = all_cases()
LIMITS = Limits(64, 64, 8, 40, 16)


@pytest.fixture(scope="session")
def gpu() -> CudaBackend:
    """The first device."""
    try:
        return open_cuda()
    except BackendUnavailable as e:
        pytest.skip(str(e))


def _program(path: Path) -> Program:
    f = open_gguf(path)
    hp = read_hparams(f)
    return build_program(hp, load_weights(f, hp))


@pytest.mark.parametrize("case", CASES, ids=[c.id for c in CASES])
def test_op(gpu: CudaBackend, case: Case) -> None:
    check_case(case, gpu)


@pytest.mark.parametrize("name", ["attention-long", "delta_net-T129", "ffn-Q8_0"])
def test_graphs_change_no_bit(gpu: CudaBackend, name: str) -> None:
    (case,) = (c for c in CASES if c.id == name)
    got, want = run_case(case, gpu), run_case(case, CudaBackend(gpu.launcher, graphs=False))
    for a, b in zip(got.rows + got.delta + got.conv, want.rows + want.delta + want.conv, strict=True):
        np.testing.assert_array_equal(a, b)


@needs_oracle
@pytest.mark.parametrize(("name", "variant"), ALL_FILES)
def test_logits_of_the_oracle(gpu: CudaBackend, name: str, variant: str) -> None:
    """Within 1e-3 of HF where activations are not rounded; else on average within 1.2 (experts: 2) times llama.cpp."""
    z, names = golden(name), ["p9", "text"]
    exe = compiled(gpu, model(name, variant).program, 256)
    got = np.concatenate([prompt_logits(exe, name, p) for p in names])
    exe.close()
    want = np.concatenate([z[f"hf.{variant}.{p}"] for p in names])
    if variant in ("f32", "f16", "bf16"):
        assert np.abs(got - want).max() < 1e-3
    else:
        theirs = np.concatenate([z[f"lcpp.{variant}.{p}"] for p in names])
        assert np.abs(got - want).mean() <= (2.0 if name in EXPERTS else 1.2) * np.abs(theirs - want).mean()


@pytest.mark.parametrize("kind", ["tiny_dense", "tiny_moe"])
def test_the_device_finds_the_largest_logits(gpu: CudaBackend, kind: str, request: pytest.FixtureRequest) -> None:
    exe = gpu.compile(_program(request.getfixturevalue(kind)), LIMITS)
    batch = Batch.single(range(1, 20), 0, np.arange(2, dtype=np.int32), out_rows=range(19))
    logits = exe.run(batch)[0].copy()
    ids, values, report = exe.run_top(batch, 8)
    want = np.argsort(-logits, 1, kind="stable")[:, :8]
    np.testing.assert_array_equal(ids, want)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, want, 1))
    assert report.on_gpu
    exe.close()


def test_greedy_text_equals_that_of_the_cpu_up_to_near_ties(gpu: CudaBackend, tiny_dense: Path) -> None:
    """200 tokens. Where the lists part, the CPU's logits of the two tokens are near each other."""
    with load(tiny_dense, device="cpu") as cpu, load(tiny_dense, device="cuda") as cuda:
        prompt: list[int] = cpu.tokenize("def add(a, b):")
        a = cpu.generate("def add(a, b):", max_tokens=200, temperature=0.0, ignore_eos=True)
        b = cuda.generate("def add(a, b):", max_tokens=200, temperature=0.0, ignore_eos=True)
        assert b.on_gpu
        at = next((i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=True)) if x != y), None)
        if at is not None:
            row: Any = cpu.logits([*prompt, *a.ids[:at]])[-1]
            assert abs(row[a.ids[at]] - row[b.ids[at]]) < 0.05


def test_a_thousand_sequences_leave_no_memory_behind(gpu: CudaBackend, tiny_dense: Path) -> None:
    exe = gpu.compile(_program(tiny_dense), LIMITS)
    pool = gpu.launcher.xp.get_default_memory_pool()
    used = 0
    for i in range(1000):
        exe.run(Batch.single([1, 2, 3, i % 50], 0, np.arange(1, dtype=np.int32), i % 8))
        exe.run(Batch.single([4], 4, np.arange(1, dtype=np.int32), i % 8))
        if i == 10:
            used = pool.used_bytes()
    assert pool.used_bytes() == used
    exe.close()
