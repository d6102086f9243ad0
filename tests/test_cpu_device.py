"""The interface on the CPU backend: auto (B90), instruction levels (B88), threads (B87), same numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qwen35rt
from qwen35rt.cli import main
from qwen35rt.cpu_count import own_cpus

native: Any = pytest.importorskip("qwen35rt._native", reason="the compiled part is not built")


@pytest.fixture(scope="module", autouse=True)
def _settings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("QWEN35RT_ISA", "QWEN35RT_THREADS"):
            patch.delenv(name, raising=False)
        yield


def test_b90_auto_works_and_says_what_it_chose_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "Who are you?", "--temp", "0", "-n", "3"]) == 0
    out, err = capsys.readouterr()
    assert out
    if "device cpu" in err:
        assert f"device cpu ({native.best_isa()}, " in err
        assert "cuda does not work here: " in err
        assert "on_gpu false" in err


@pytest.mark.parametrize("isa", native.isa_levels())
def test_b88_every_level_gives_the_same_tokens(isa: str, tiny_dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
    prompt = "hello world, the rain is in"
    with qwen35rt.load(tiny_dense, device="reference") as model:
        expected = model.generate(prompt, **options).ids
    with qwen35rt.load(tiny_dense, device="cpu", isa=isa) as model:
        assert f"({isa}, " in model.device_description
        assert model.generate(prompt, **options).ids == expected
    monkeypatch.setenv("QWEN35RT_ISA", isa)
    with qwen35rt.load(tiny_dense, device="cpu", threads=1) as model:
        assert model.device_description.startswith(f"device cpu ({isa}, 1 thread)")


def test_b88_level_that_the_machine_lacks(tiny_dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-m", str(tiny_dense), "--isa", "avx9000", "hi"]) == 1
    assert "avx9000" in capsys.readouterr().err
    for isa in set(native.isa_names()) - set(native.isa_levels()):
        with pytest.raises(qwen35rt.errors.BackendUnavailable, match=isa):
            qwen35rt.load(tiny_dense, isa=isa, device="cpu")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
@pytest.mark.parametrize("cpus", [1, 2])
def test_b87_threads_follow_the_affinity(cpus: int, tiny_dense: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < cpus:
        pytest.skip(f"this process may use {len(mine)} CPUs")
    code = (
        f"import os; os.sched_setaffinity(0, {mine[:cpus]}); import qwen35rt;"
        f"m = qwen35rt.load({str(tiny_dense)!r}, device='cpu'); print(m.device_description); m.close()"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert f", {cpus} thread" in out


def test_logits_agree_with_the_reference(tiny_dense: Path) -> None:
    ids = [int(i) for i in np.random.default_rng(4).integers(0, 256, 100)]
    with qwen35rt.load(tiny_dense, device="cpu") as cpu, qwen35rt.load(tiny_dense, device="reference") as reference:
        np.testing.assert_allclose(cpu.logits(ids), reference.logits(ids), atol=2e-2)


def test_more_threads_than_cpus_are_warned_of(tiny_dense: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are what was asked for, so they are used, and change no token."""
    found = []
    for threads in (own_cpus(), own_cpus() + 3):
        with qwen35rt.load(tiny_dense, device="cpu", threads=threads) as model:
            found.append(model.generate("hello world", max_tokens=8, temperature=0, ignore_eos=True).ids)
    assert found[0] == found[1]
    (warning,) = [r.message for r in caplog.records if "threads on" in r.message]
    assert f"{own_cpus() + 3} threads on {own_cpus()} CPUs" in warning


def test_c25_slices_threads_and_reuse_do_not_change_the_answer(tiny_dense: Path) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "tell me something long enough to be cut"}]
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    answers = []
    variants: list[dict[str, Any]] = [{}, {"n_batch": 7}, {"threads": 1}, {"n_batch": 1}]
    for load_options in variants:
        with qwen35rt.load(tiny_dense, device="cpu", **load_options) as model:
            answers += [model.chat(messages, **options) for _ in range(2)]
    assert len({tuple(a.ids) for a in answers}) == 1
    assert answers[1].usage.cached_tokens > 30


def test_b29_not_finite_ends_the_turn(tmp_path: Path) -> None:
    from .fixtures import write_tiny

    def spoil(values: Any) -> Any:
        values[3, 5] = np.inf
        return values

    path = write_tiny(tmp_path / "inf.gguf", overrides={"blk.3.ffn_down.weight": spoil})
    with (
        qwen35rt.load(path, device="cpu") as model,
        pytest.raises(qwen35rt.errors.GenerationFailed, match="not finite"),
    ):
        model.generate("hello", max_tokens=50)


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cpu"]["levels"] == native.isa_levels()
    assert found["cpu"]["threads"] >= 1
    assert found["run"]["works"] is True
    assert found["gpu"]["driver"]
    assert found["packages"]["numpy"] == np.__version__
    assert main(["doctor"]) == 0
    assert "best level" in capsys.readouterr().out


def test_bench_shows_shares_and_a_profile(tiny_dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["bench", "-m", str(tiny_dense), "-p", "8", "-n", "4", "-r", "1", "--device", "cpu", "--profile"]
    assert main([*args, "-o", "jsonl"]) == 0
    out, err = capsys.readouterr()
    import json

    prefill, decode = (json.loads(line) for line in out.splitlines())
    assert prefill["isa"] == native.best_isa()
    assert prefill["bandwidth_share"] is None
    assert decode["int8_share"] is None
    assert 0 < prefill["int8_share"] < 1.5
    assert decode["bandwidth_share"] > 0
    assert prefill["probe_gb_s"] > 0.1
    assert "linear" in err
    assert "delta_net" in err
