"""The script that measures drift: its figures against plain NumPy, its table and file, the peer where there is one."""

from __future__ import annotations

import csv
import importlib
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import qwen35rt

from ..fixtures import write_tiny
from ..implementations import isa_levels

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
TEXT = "the hen in the other world is on the land and at rest; hello world, said the user. " * 4
N_CTX = 24
SCORED = N_CTX - 1 - N_CTX // 2
Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def drift() -> Iterator[Any]:
    """The script, whose neighbours are found where it lies."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("drift")
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("drift", "peer_logits", "compare", "runtimes"):
            if name not in before:
                sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drift") / "text.txt"
    path.write_text(TEXT)
    return path


def _normal(name: str, *shape: int) -> Array:
    return np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)


def test_divergence_equals_plain_numpy(drift: Any) -> None:
    """Design 5: KL divergence and top-1 agreement against exact logits; a shift of all logits changes nothing."""
    p, q = 3 * _normal("p", 40, 50), 3 * _normal("p", 40, 50) + _normal("q", 40, 50)
    found = drift.Closeness.of(p, q + 7)
    lp, lq = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    np.testing.assert_allclose(found.kld, (np.exp(lp) * (lp - lq)).sum(-1), rtol=1e-9)
    assert found.same_top.tolist() == (p.argmax(-1) == q.argmax(-1)).tolist()
    assert 0 < found.same_top.mean() < 1
    assert drift.Closeness.of(p, p).kld.max() < 1e-12


def test_interval_knows_that_neighbours_are_not_independent(drift: Any) -> None:
    values = _normal("values", 400) + 0.5
    low, high = drift.interval(values, np.arange(400))
    mean, error = values.mean(), values.std(ddof=1) / 20
    assert (low, high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.3 * error)
    groups = drift.runs_of(10, 40)
    assert np.bincount(groups).tolist() == [16, 16, 8] * 10
    # A value that a whole run shares is one observation, not sixteen.
    shared = _normal("shared", 30)[groups]
    wide, narrow = drift.interval(shared, groups), drift.interval(shared, np.arange(400))
    assert wide[1] - wide[0] > 2.5 * (narrow[1] - narrow[0])


def test_table_and_file(
    drift: Any, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A base in two types: each against itself in exact arithmetic and against the base, beside a peer."""
    base, out = write_tiny(tmp_path / "tiny.gguf"), tmp_path / "made" / "drift.csv"
    asked: list[tuple[str, Array, int]] = []

    def peer(path: Path, chunks: Array, n_vocab: int, threads: int) -> Array:
        asked.append((path.name, chunks, n_vocab))
        exact: Array = drift.own_logits(path, chunks, True, threads)
        return exact + 0.05 * _normal(path.name, *exact.shape)

    monkeypatch.setattr(drift, "peer_logits", peer)
    monkeypatch.setattr(drift, "find_spec", lambda name: name)
    monkeypatch.setattr(drift, "peer_version", lambda: "peer 1")
    flags = ["-b", str(base), "--type", "F32", "--type", "Q4_0", "-f", str(text), "-c", str(N_CTX), "--chunks", "3"]
    drift.main([*flags, "--out", str(out)])
    drift.main([*flags, "--out", str(out)])
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[:3] for line in shown[2:6]] == [
        [f"| tiny-{kind}", reference, str(3 * SCORED)]
        for kind in ("F32", "Q4_0")
        for reference in ("same file", "float32")
    ]
    with out.open(newline="") as f:
        rows = list(csv.DictReader(f))
    assert [r["file"] for r in rows] == ["tiny-F32", "tiny-F32", "tiny-Q4_0", "tiny-Q4_0"] * 2
    assert {(r["peer"], r["pages"]) for r in rows} == {("peer 1", "f16")}
    kld = [float(r["kld"]) for r in rows]
    assert kld[0] == kld[1] < 1e-6  # float weights meet float32 activations; pages of float16 are all that differs
    assert 1e-6 < kld[2] < kld[3]  # int8 activations cost less than Q4_0 weights
    assert float(rows[0]["less_high"]) < 0 < float(rows[0]["peer_kld"])
    # The peer was given the tokens that the project was, spread over the text.
    name, chunks, n_vocab = asked[1]
    with qwen35rt.load(base, device="cpu", threads=1, n_ctx=64) as model:
        ids = model.tokenize(TEXT)
        assert n_vocab == model.n_vocab
    count = len(ids) // N_CTX
    assert name == "tiny-Q4_0.gguf"
    assert chunks.tolist() == [ids[i * N_CTX : (i + 1) * N_CTX] for i in (0, round((count - 1) / 2), count - 1)]


def test_exact_logits_are_those_of_the_same_numbers_in_float32(drift: Any, tiny_dense: Path, tmp_path: Path) -> None:
    """No activation is rounded: what the file's type adds to the drift is only what its weights meet."""
    small, wide = tmp_path / "small.gguf", tmp_path / "wide.gguf"
    drift.quantise(tiny_dense, "Q4_0", small, 1)
    drift.quantise(small, "F32", wide, 1)
    chunks = np.random.default_rng(zlib.crc32(b"chunks")).integers(0, 256, size=(2, N_CTX))
    exact, usual = (drift.own_logits(small, chunks, exact, 1) for exact in (True, False))
    assert drift.Closeness.of(exact, drift.own_logits(wide, chunks, False, 1)).kld.max() < 1e-6
    assert drift.Closeness.of(exact, usual).kld.mean() > 1e-6


def test_without_a_peer_the_project_is_measured_alone(
    drift: Any, tiny_dense: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(drift, "find_spec", lambda name: None)
    out = tmp_path / "drift.csv"
    drift.main(["-m", str(tiny_dense), "-f", str(text), "-c", str(N_CTX), "--chunks", "2", "--out", str(out)])
    shown = capsys.readouterr()
    assert "xllamacpp wheel is not installed" in shown.err
    cells = shown.out.splitlines()[-1].strip("| ").split(" | ")
    assert cells[:3] == ["dense", "same file", str(2 * SCORED)]
    assert cells[4:7] + cells[8:] == ["-"] * 4
    with out.open(newline="") as f:
        (row,) = csv.DictReader(f)
    assert row["peer_kld"] == row["less"] == row["peer_same_top"] == ""


def test_files_of_the_oracle(drift: Any, oracle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Design 5: with equal pages, no file is farther from HF's logits than llama.cpp's, beyond the interval."""
    out = tmp_path / "drift.csv"
    drift.main(["--oracle", str(oracle), "--out", str(out)])
    capsys.readouterr()
    with out.open(newline="") as f:
        rows = {r["file"]: r for r in csv.DictReader(f)}
    assert {"dense.q8_0", "dense.q4_k_m", "dense.mix", "wide.q4_k_m", "moek.q4_k_m", "nano.f32"} <= set(rows)
    assert {r["pages"] for r in rows.values()} == {"f32"}
    rounds = "avx512bf16" in isa_levels()  # what meets BF16, as llama.cpp does: then chance decides
    for name, r in rows.items():
        assert int(r["positions"]) >= 24
        if rounds and name.endswith(".bf16"):
            assert float(r["kld"]) <= 2 * float(r["peer_kld"]), name
        else:
            assert float(r["kld"]) <= 1.1 * float(r["peer_kld"]) or float(r["kld"]) < 1e-9, name
            assert float(r["less_low"]) <= 0 or float(r["kld"]) < 1e-9, name
        assert float(r["same_top"]) >= 0.95, name


def test_llama_cpp_itself(drift: Any, tiny_dense: Path, tmp_path: Path) -> None:
    """The peer's rows are those of the same positions: on float32 weights its predictions are the reference's."""
    pytest.importorskip("xllamacpp", reason="the peer needs the xllamacpp wheel")
    with qwen35rt.load(tiny_dense, device="cpu", threads=1, n_ctx=N_CTX) as model:
        chunks, n_vocab = np.array([model.tokenize(TEXT)[i * N_CTX : (i + 1) * N_CTX] for i in range(2)]), model.n_vocab
    peer = drift.peer_logits(tiny_dense, chunks, n_vocab, 1)
    exact = drift.own_logits(tiny_dense, chunks, True, 1)
    assert peer.shape == exact.shape == (2 * SCORED, n_vocab)
    found = drift.Closeness.of(exact, peer)
    assert found.kld.max() < 1e-4
    with pytest.raises(RuntimeError, match=r"llama\.cpp on "):
        drift.peer_logits(tmp_path / "none.gguf", chunks, n_vocab, 1)
