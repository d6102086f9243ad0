"""The script for a machine with a GPU, without one: a dry run, phases that die or hang, goals; files of benchmarks."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from qwen35rt.backends.base import Batch, Limits
from qwen35rt.backends.reference import ReferenceBackend
from qwen35rt.model.gguf_file import open_gguf
from qwen35rt.model.source import open_source
from tests import ahead
from tests.cuda_host import host

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
PHASES = """
import json, sys, time
def row(**more): print(json.dumps({"value": 1.5, "unit": "s", **more}), flush=True)
row(test="began")
print("noise")
if sys.argv[1] == "dies": print('{"test": "half')
if sys.argv[1] == "dies": print("Traceback\\nBoom: the end", file=sys.stderr); sys.exit(3)
if sys.argv[1] == "hangs": time.sleep(60)
row(test="done")
"""


def _script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def gpu_check() -> Any:
    return _script("gpu_check")


@pytest.fixture(scope="module")
def make_files() -> Any:
    return _script("make_files")


def _rows(out: Path) -> list[dict[str, str]]:
    with (out / "gpu_check.csv").open(newline="") as f:
        return list(csv.DictReader(f))


def _dry_run(out: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    command = ["bash", str(FOLDER / "gpu_check.sh"), "--dry-run", "--emulation", str(host.folder()), "--seconds", "270"]
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(out), "HOME": str(out / "none")}
    return ahead.run(command, 280, environment), out


def begin_ahead(chosen: list[pytest.Function]) -> list[pytest.Function]:
    waiting = [item for item in chosen if item.originalname == "test_the_dry_run_passes" and host.compiler()]
    if waiting:
        host.begin([("linear", "F32"), ("linear", "Q4_K"), *(host.of_all_models() if ahead.is_long() else ())])
        out = ahead.folder() / "dry"
        out.mkdir()
        ahead.begin("dry run", partial(_dry_run, out))
    return waiting


@pytest.mark.skipif(host.compiler() is None, reason="no g++ to build the kernels for the CPU")
def test_the_dry_run_passes(tmp_path: Path) -> None:
    """All of the script but what finds CuPy, which needs a driver."""
    done, tmp_path = ahead.result("dry run", partial(_dry_run, tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "gpu_check.log").read_text()
    rows = _rows(tmp_path)
    assert {r["status"] for r in rows} == {"ok"}
    tests = {r["phase"]: [q["test"] for q in rows if q["phase"] == r["phase"]] for r in rows}
    assert list(tests) == ["device", "ops", "oracle", "checks", "peaks", "dry", "tests"]
    assert all(names[-1] == "phase" for names in tests.values())
    assert {"decode, 1 sequence", "decode, 2 sequences", "first token of 2"} <= set(tests["dry"])
    assert any(n.startswith("prefill of") for n in tests["dry"])
    (decode,) = (r for r in rows if r["test"] == "decode, 1 sequence")
    assert float(decode["of_peak"]) > 0
    assert "nothing failed" in (tmp_path / "gpu_check.md").read_text()


def test_what_was_found_stays_when_a_phase_dies_or_hangs(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gpu_phases.py").write_text(PHASES)
    monkeypatch.setattr(gpu_check, "HERE", tmp_path)
    made = [gpu_check.Plan(name, name, "", share) for name, share in (("dies", 60), ("hangs", 10), ("works", 60))]
    made.append(gpu_check.Plan("file", "works", "dry", 60))
    monkeypatch.setattr(gpu_check, "plans", lambda sizes, dry: made)
    seconds = ["--seconds", "140"]  # of which hanging takes a 13th
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path / "out"), "--size", "dry", *seconds])
    assert gpu_check.main() == 1
    found = [(r["phase"], r["test"], r["status"], r["detail"]) for r in _rows(tmp_path / "out")]
    assert found[:4] == [
        ("dies", "began", "ok", ""),
        ("dies", "phase", "failed", "Boom: the end"),
        ("hangs", "began", "ok", ""),
        ("hangs", "phase", "cut", "its time was up"),
    ]
    assert [row[:3] for row in found[4:7]] == [("works", name, "ok") for name in ("began", "done", "phase")]
    assert found[7][:3] == ("file", "phase", "failed")  # there is no make_files.py beside this gpu_phases.py
    assert "noise" in (tmp_path / "out" / "gpu_check.log").read_text()
    assert "failed: dies: phase; hangs: phase; file: phase" in capsys.readouterr().out


def test_a_check_that_is_told_to_end_writes_what_it_has(tmp_path: Path) -> None:
    """A signal to the script reaches the phase; nothing is left that runs or lies about."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    for name in ("gpu_check.sh", "gpu_check.py"):
        shutil.copy(FOLDER / name, folder)
    (folder / "gpu_phases.py").write_text(PHASES.replace('"hangs"', '"device"'))
    command = ["bash", str(folder / "gpu_check.sh"), "--dry-run", "--only", "device", "--seconds", "200"]
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path / "out"), "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as script:
        line = ""
        while "began" not in line:
            line = next(script.stdout or iter(()))
        script.send_signal(signal.SIGTERM)
        rest = script.communicate(timeout=100)[0]
    assert script.returncode == 143
    assert "| device | began | 1.5 s |" in rest
    assert [r["test"] for r in _rows(tmp_path / "out")] == ["began"]
    assert "began" in (tmp_path / "out" / "gpu_check.md").read_text()
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("seconds", [345, 120, 40])
def test_shares_of_phases_add_up_to_less_than_the_time(gpu_check: Any, seconds: float) -> None:
    """Six minutes with what the shell does before and behind, even where every phase is stopped at its limit; what one
    leaves goes to all behind it; the checks have as much as the measurements and come first."""
    todo = gpu_check.plans(list(gpu_check.SIZES), False)
    assert gpu_check.SECONDS <= 360 - 15
    stopped, quick, limits = 0.0, 0.0, []
    for number in range(len(todo)):
        limits.append(gpu_check.limit_of(todo[number:], seconds - stopped))
        assert gpu_check.limit_of(todo[number:], seconds - quick) >= limits[-1]
        stopped += limits[-1] + gpu_check.END_SECONDS
        quick += 1
    assert stopped == pytest.approx(seconds)
    if seconds == gpu_check.SECONDS:
        assert min(limits) > 3 * gpu_check.LEAST_SECONDS
        names = [plan.name for plan in todo]
        assert names == ["device", "ops", "oracle", "checks", "peaks", "0.8b", "4b", "9b", "tests"]


def test_all_ends_in_time_where_every_phase_hangs(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is cut and says so, and keeps what it found."""
    hanging = PHASES.replace('if sys.argv[1] == "hangs"', "if True")
    (tmp_path / "gpu_phases.py").write_text(hanging)
    (tmp_path / "make_files.py").write_text("")
    monkeypatch.setattr(gpu_check, "HERE", tmp_path)
    monkeypatch.setattr(gpu_check, "END_SECONDS", 0.5)
    monkeypatch.setattr(gpu_check, "LEAST_SECONDS", 0.1)
    seconds = 15.0
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path / "out"), "--seconds", str(seconds)])
    began = time.monotonic()
    assert gpu_check.main() == 1
    assert time.monotonic() - began < seconds + 2
    rows = _rows(tmp_path / "out")
    names = [plan.name for plan in gpu_check.plans(list(gpu_check.SIZES), False)]
    assert [r["phase"] for r in rows if r["status"] == "cut"] == names
    assert [r["phase"] for r in rows if r["test"] == "began"] == names


def test_phases_without_time_are_left_out(gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "plans", lambda sizes, dry: [gpu_check.Plan("late", "ops")])
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path), "--seconds", "1", "--dry-run"])
    assert gpu_check.main() == 1
    assert [r["detail"] for r in _rows(tmp_path)] == ["no time was left"]


@pytest.fixture
def phase(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A phase of which half a second is left, without a device."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    made = object.__new__(_script("gpu_phases").Phase)
    made.options, made.end = {"emulate": "."}, time.monotonic() + 0.5
    return made


def test_a_phase_says_what_it_finds_no_time_for(phase: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert phase.has_time("quick", 0.1)
    assert not phase.has_time("long", 3)
    assert not phase.has_time("usual")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["test"], r["cut"]) for r in rows] == [("long", True), ("usual", True)]


def test_tests_that_are_stopped_count_what_passed(phase: Any, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    phase._run_tests("oracle")
    assert time.monotonic() - began < 30
    (row,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (row["test"], row["cut"], row["detail"]) == ("tests passed", True, "its time was up; 0 skipped")


def test_shares_and_goals(gpu_check: Any, tmp_path: Path) -> None:
    """A goal that is missed is said and is no failure."""
    results = gpu_check.Results(tmp_path / "r.csv")
    results.add("peaks", "memory reads", 4000.0, "GB/s", key="read")
    results.add("peaks", "memory, by its clock", 5000.0, "GB/s", key="nominal_read")
    results.add("9b", "decode, 1 sequence", 500.0, "tokens/s", share_of="read", share=3000.0)
    results.add("9b", "decode, 32 sequences", 4000.0, "tokens/s", share_of="read", share=750.0)
    results.add("4b", "first token of 2000", 99.0, "ms")
    results.add("4b", "prefill of 4096, steps of 512", 24_999.0, "tokens/s", share_of="int8", share=1.0)
    results.close()
    one, many, first, prefill = results.rows[2:]
    assert (one["of_peak"], one["of_nominal"], one["status"]) == (0.75, 0.6, "ok")
    assert one["goal"] == ">= 0.7 of the peak"
    assert (many["status"], many["goal"]) == ("missed", ">= 10 x one")
    assert many["detail"].startswith("8.0 times one")
    assert (first["status"], first["goal"]) == ("ok", "<= 100")
    assert (prefill["status"], prefill["of_peak"]) == ("missed", "")  # the peak of int8 was not measured
    assert results.failed == []


@pytest.mark.parametrize("kind", ["Q4_K_M", "Q8_0", "BF16", "IQ4_XS"])
def test_files_are_those_of_a_seed_and_sane(make_files: Any, tmp_path: Path, kind: str) -> None:
    """Equal bytes for a seed, others for another; values with the spread of a trained layer; logits that are finite."""
    paths = [tmp_path / f"{name}.gguf" for name in "abc"]
    for path, seed in zip(paths, (1, 1, 2), strict=True):
        make_files.write(path, make_files.SIZES["dry"], kind, seed, plain_vocab=True)
    a, b, c = (open_gguf(path) for path in paths)
    for name, tensor in a.tensors.items():
        raw = np.asarray(tensor.data)
        np.testing.assert_array_equal(raw, np.asarray(b.tensors[name].data))
        if tensor.format.quantized:
            assert not np.array_equal(raw, np.asarray(c.tensors[name].data))
            values = gguf.quants.dequantize(raw.reshape(-1), gguf.GGMLQuantizationType(tensor.format.id))
            if values.size < 1 << 16:
                continue
            assert abs(values.mean()) < 0.1 * values.std()
            if not name.endswith(("_output.weight", "down.weight", "out.weight")):  # these are narrower
                assert values.std() == pytest.approx(tensor.shape[0] ** -0.5, rel=0.1)
    program = open_source(paths[0]).program
    exe = ReferenceBackend().compile(program, Limits(8, 1, 1, 1))
    logits = exe.run(Batch.single([1, 2, 3], 0, np.zeros(1, np.int32)))[0]
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 10


def test_real_shapes_are_those_of_the_family(make_files: Any) -> None:
    """Elements of all matrices: the sizes that the names state, the head or table of 248,320 tokens among them."""
    for size, billions in (("0.8b", 0.75), ("2b", 1.9), ("4b", 4.2), ("9b", 9.0)):
        shapes = [shape for _, shape, _, _ in make_files.tensors(make_files.SIZES[size], "Q4_K_M")]
        assert sum(float(np.prod(shape)) for shape in shapes) / 1e9 == pytest.approx(billions, rel=0.06), size
