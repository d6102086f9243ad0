"""B36: thousands of damaged copies of small models, opened and run on the CPU backend in child processes.

Each is a documented error or a model that generates: never a signal, another exception, or 64 MiB beyond the file.
The long form is ``pytest -m long tests/test_mutations.py``.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from qwen35rt.cpu_count import usable_cpus

from . import ahead
from .fixtures import write_tiny
from .implementations import native
from .mutate import MOST_GROWTH, mutate

pytestmark = [
    pytest.mark.skipif(native() is None, reason="the compiled module qwen35rt._native is not built"),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc for the peak of memory"),
]
# Rows of 32 take every format of 32 columns; quantised blocks hold scales that a change makes infinite or NaN.
SMALL: dict[str, Any] = {
    "n_layer": 2, "interval": 2, "n_embd": 32, "n_ff": 32, "n_head": 2, "head_dim": 16, "n_expert": 4,
    "n_ff_expert": 32, "n_ff_shared": 32, "ssm_state": 8, "n_ctx": 256, "rope_dim": 8,
}  # fmt: skip
FORMATS = {"token_embd*": "Q8_0", "*ffn_down*": "Q4_0", "*ffn_up*": "IQ4_NL", "*attn_qkv*": "F16", "*ssm_out*": "BF16"}
BATCH = 500


def small(path: Path, kind: str) -> Path:
    """A model of some 60 kB in mixed formats."""
    return write_tiny(path, kind, formats=FORMATS, **SMALL)


def run(file: Path, seed: int, first: int, end: int) -> Counter[str]:
    """Mutations ``first`` .. ``end`` - 1 in one child; fails naming the mutation that ended it."""
    command = [sys.executable, "-W", "error", "-m", "tests.mutate", str(file), str(seed), str(first), str(end)]
    root = Path(__file__).parents[1]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path]), "OPENBLAS_NUM_THREADS": "1"}
    done = ahead.run(command, 280, env, root)
    lines = done.stdout.splitlines()
    if done.returncode:
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        at = f"mutate(whole, {seed}, {lines[-1]})" if lines else "the start"
        pytest.fail(f"{file.stem}, {at}: {how}\n{done.stderr[-3000:]}")
    return Counter(json.loads(lines[-1]))


@cache
def model(kind: str) -> Path:
    """Shared by the children."""
    return small(ahead.folder() / f"{kind}.gguf", kind)


def parts_of(kind: str, seed: int, count: int) -> dict[tuple[str, int, int], Callable[[], Counter[str]]]:
    """The children's work by its name."""
    ends = {at: min(at + BATCH, count) for at in range(0, count, BATCH)}
    return {(kind, seed, at): partial(run, model(kind), seed, at, end) for at, end in ends.items()}


def begin_ahead(chosen: list[pytest.Function]) -> list[pytest.Function]:
    if any(mark.args[0] for mark in pytestmark):
        return []
    waiting = [item for item in chosen if item.originalname.startswith("test_b36_5000")]
    for item in waiting:
        given: dict[str, Any] = item.callspec.params
        for name, work in parts_of(given["kind"], 36, given["count"]).items():
            ahead.begin(name, work)
    return waiting


def check(kind: str, seed: int, count: int) -> None:
    found: Counter[str] = Counter()
    file = model(kind)
    with ThreadPoolExecutor(usable_cpus().affinity) as pool:
        parts = [pool.submit(ahead.result, name, work) for name, work in parts_of(kind, seed, count).items()]
    for part in [done.result() for done in parts]:
        assert part.pop("growth") < MOST_GROWTH + file.stat().st_size
        found += part
    assert set(found) <= {"ran", "refused", "not finite", "small context", "merges do not fit"}, found
    assert found.total() == count
    # All three ends are met often, so that none of them is tested by name only.
    assert found["ran"] > count // 20
    assert found["refused"] > count // 5
    assert found["not finite"] > count // 1000


@pytest.mark.parametrize(("kind", "count"), [("dense", 2_500), ("moe", 2_500)])
def test_b36_5000_mutations_are_errors_or_working_models(kind: str, count: int) -> None:
    check(kind, 36, count)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("seed", range(37, 41))
def test_b36_mutations_long(kind: str, seed: int) -> None:
    check(kind, seed, 10_000)


def test_mutations_are_the_same_each_time_and_all_different(tmp_path: Path) -> None:
    whole = small(tmp_path / "m.gguf", "dense").read_bytes()
    assert mutate(whole, 36, 5) == mutate(whole, 36, 5)
    assert len({mutate(whole, 36, n) for n in range(300)} - {whole}) > 290


def test_a_child_that_dies_is_a_failure_that_names_the_mutation(tmp_path: Path) -> None:
    """The test of the tests: here a file that does not run, so that the child ends before the first mutation."""
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(pytest.fail.Exception, match=r"bad, the start: exit code 1"):
        run(tmp_path / "bad.gguf", 36, 0, 1)
