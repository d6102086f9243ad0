"""KL divergence against plain NumPy, the precision of the base file, files that do not fit, and the command."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import qwen35rt
from qwen35rt import Model
from qwen35rt.cli import main
from qwen35rt.convert.kl import compare, compare_row, write_base
from qwen35rt.convert.kl_file import HEADER, BaseFile, BaseWriter, decode, encode, record_type
from qwen35rt.convert.perplexity import perplexity
from qwen35rt.errors import ConfigError, GenerationFailed, ModelFileError

from ..fixtures import write_tiny

TEXT = "the hen in the other world is on the land and at rest; hello world, said the user. " * 4
N_CTX = 24
Double = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def tiny(tiny_dense: Path) -> Iterator[Model]:
    with qwen35rt.load(tiny_dense, device="cpu", n_ctx=64, threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in Q4_0."""
    formats = {"blk.*.ffn_*.weight": "Q4_0", "output.weight": "Q4_0", "blk.*.attn_qkv.weight": "Q4_0"}
    return write_tiny(tmp_path_factory.mktemp("kl") / "q4.gguf", formats=formats)


@pytest.fixture(scope="module")
def base(tiny: Model, tmp_path_factory: pytest.TempPathFactory) -> BaseFile:
    path = tmp_path_factory.mktemp("kl") / "base.klb"
    write_base(tiny, TEXT, path, N_CTX)
    return BaseFile(path)


def log_probabilities(model: Model) -> tuple[Double, list[int]]:
    """Of all scored positions, float64 [n, n_vocab], and the right tokens."""
    ids = model.tokenize(TEXT)
    rows, right = [], []
    for start in range(0, len(ids) - N_CTX + 1, N_CTX):
        chunk = ids[start : start + N_CTX]
        logits = model.logits(chunk).astype(np.float64)[N_CTX // 2 : -1]
        rows.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
        right += chunk[N_CTX // 2 + 1 :]
    return np.concatenate(rows), right


def test_a_model_does_not_diverge_from_itself(tiny: Model, base: BaseFile) -> None:
    found = compare(tiny, base, TEXT)
    assert 0 <= found.kld_min <= found.kld_max < 1e-7
    assert found.same_top.value == 1
    assert (found.ln_ratio.value, found.ratio.value, found.delta_p_rms.value) == (0, 1, 0)
    assert found.correlation == pytest.approx(1)
    assert found.ppl_base.value == found.ppl.value == perplexity(tiny, TEXT, N_CTX).value


def test_statistics_equal_plain_numpy(tiny: Model, smaller: Path, base: BaseFile) -> None:
    with qwen35rt.load(smaller, device="cpu", n_ctx=64, threads=1) as model:
        found = compare(model, base)
        (p, right), (q, _) = log_probabilities(tiny), log_probabilities(model)
    n, at = len(right), np.arange(len(right))
    kld = (np.exp(p) * (p - q)).sum(-1)
    assert found.ppl.scored == n
    assert found.kld.value > 1e-3  # there is something to measure
    assert found.kld.value == pytest.approx(kld.mean(), rel=1e-4)
    assert found.kld.error == pytest.approx(kld.std(ddof=1) / math.sqrt(n), rel=1e-4)
    assert (found.kld_max, found.kld_min) == pytest.approx((kld.max(), kld.min()), rel=1e-3)
    shares = (0.999, 0.99, 0.95, 0.9, 0.5, 0.1, 0.05, 0.01)
    assert found.kld_quantiles == pytest.approx({s: np.quantile(kld, s) for s in shares}, rel=1e-3)
    nll_p, nll_q = -p[at, right], -q[at, right]
    delta = np.exp(-nll_q) - np.exp(-nll_p)
    assert found.delta_p.value == pytest.approx(delta.mean(), abs=1e-6)
    assert found.delta_p.error == pytest.approx(delta.std(ddof=1) / math.sqrt(n), rel=1e-3)
    assert (found.delta_p_max, found.delta_p_min) == pytest.approx((delta.max(), delta.min()), abs=1e-6)
    more = (0.999, 0.99, 0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 0.05, 0.01, 0.001)
    assert found.delta_p_quantiles == pytest.approx({s: np.quantile(delta, s) for s in more}, abs=1e-6)
    rms = math.sqrt((delta**2).mean())
    assert found.delta_p_rms.value == pytest.approx(rms, rel=1e-4)
    assert found.delta_p_rms.error == pytest.approx((delta**2).std(ddof=1) / math.sqrt(n) / (2 * rms), rel=1e-3)
    same = p.argmax(-1) == q.argmax(-1)
    assert 0 < same.mean() < 1
    assert found.same_top.value == same.mean()
    assert found.same_top.error == pytest.approx(math.sqrt(same.mean() * (1 - same.mean()) / (n - 1)))
    assert found.ppl.value == pytest.approx(math.exp(nll_q.mean()), rel=1e-5)
    assert found.ppl_base.value == pytest.approx(math.exp(nll_p.mean()), rel=1e-5)
    assert found.ln_ratio.value == pytest.approx((nll_q - nll_p).mean(), abs=1e-5)
    assert found.ln_ratio.error == pytest.approx((nll_q - nll_p).std(ddof=1) / math.sqrt(n), rel=1e-3)
    assert found.ratio.value == pytest.approx(found.ppl.value / found.ppl_base.value, rel=1e-5)
    assert found.ratio.error == pytest.approx(found.ratio.value * found.ln_ratio.error)
    assert found.difference.value == pytest.approx(found.ppl.value - found.ppl_base.value)
    assert found.correlation == pytest.approx(np.corrcoef(nll_p, nll_q)[0, 1], rel=1e-4)
    gradient = np.exp(nll_q.mean()) * nll_q - np.exp(nll_p.mean()) * nll_p
    assert found.difference.error == pytest.approx(gradient.std(ddof=1) / math.sqrt(n), rel=1e-3)


def test_a_part_of_the_chunks(tiny: Model, smaller: Path, base: BaseFile) -> None:
    with qwen35rt.load(smaller, device="cpu", n_ctx=64, threads=1) as model:
        found = compare(model, base, chunks=2)
        (p, _), (q, _) = log_probabilities(tiny), log_probabilities(model)
    assert found.ppl.chunks == 2
    n = found.ppl.scored
    assert found.kld.value == pytest.approx((np.exp(p) * (p - q)).sum(-1)[:n].mean(), rel=1e-4)


@pytest.mark.parametrize("spread", [1.0, 3.0, 8.0])
def test_the_file_keeps_divergences_to_a_millionth(spread: float) -> None:
    rng = np.random.default_rng(7)
    n_vocab, rows = 248_320, 12
    dtype = record_type(n_vocab, 256)
    divergences, errors = [], []
    for _ in range(rows):
        logits = (spread * rng.standard_normal(n_vocab)).astype(np.float32)
        other = logits + (0.3 * rng.standard_normal(n_vocab)).astype(np.float32)
        kept = decode(np.frombuffer(encode(logits, 1.0, dtype).tobytes(), dtype)[0])
        p = logits.astype(np.float64) - logits.max()
        p -= math.log(np.exp(p).sum())
        assert (np.exp(p) * (p - log_softmax(kept))).sum() < 1e-7
        q = log_softmax(other)
        exact = (np.exp(p) * (p - q)).sum()
        found, _ = compare_row(kept, other)
        errors.append(found - exact)
        divergences.append(exact)
    assert np.mean(divergences) > 1e-3
    assert abs(np.mean(errors)) < 1e-6
    assert np.max(np.abs(errors)) < 5e-6
    assert dtype.itemsize == 2 * n_vocab + 16 + 8 * 256


def log_softmax(x: npt.NDArray[np.float32]) -> Double:
    wide = x.astype(np.float64) - float(x.max())
    return wide - math.log(np.exp(wide).sum())


def test_rows_that_are_flat_or_not_finite() -> None:
    dtype = record_type(10, 3)
    flat = np.full(10, 2.5, np.float32)
    np.testing.assert_array_equal(decode(encode(flat, 0.0, dtype)), np.zeros(10, np.float32))
    assert compare_row(decode(encode(flat, 0.0, dtype)), flat) == (0.0, True)
    flat[3] = -np.inf
    with pytest.raises(GenerationFailed):
        encode(flat, 0.0, dtype)


def test_write_refuses_what_exists_or_does_not_fit(
    tiny: Model, base: BaseFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = base.path.stat().st_size
    with pytest.raises(ConfigError, match=r"exists.*--kl-divergence"):
        write_base(tiny, TEXT, base.path, N_CTX)
    with pytest.raises(ConfigError, match="no such folder"):
        write_base(tiny, TEXT, tmp_path / "none" / "x.klb", N_CTX)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size - 1))
    with pytest.raises(ConfigError, match=r"GiB are free.*--chunks"):
        write_base(tiny, TEXT, tmp_path / "x.klb", N_CTX)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size))
    write_base(tiny, TEXT, tmp_path / "x.klb", N_CTX)
    assert (tmp_path / "x.klb").read_bytes() == base.path.read_bytes()


def test_a_run_that_fails_leaves_no_file(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "nan.gguf", overrides={"output_norm.weight": math.nan})
    with qwen35rt.load(path, device="cpu", n_ctx=64, threads=1) as model, pytest.raises(GenerationFailed):
        write_base(model, TEXT, tmp_path / "x.klb", N_CTX)
    assert [p.name for p in tmp_path.iterdir()] == ["nan.gguf"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_disk_that_is_full_at_once_leaves_no_file(tiny: Model, tmp_path: Path) -> None:
    partial = tmp_path / "x.klb.partial"
    partial.symlink_to("/dev/full")
    ids = np.zeros((100, 64), np.int32)  # more than a buffer holds
    with pytest.raises(OSError, match="No space left"), BaseWriter(tmp_path / "x.klb", ids, tiny.tokenizer):
        pytest.fail("it was entered")
    assert not partial.is_symlink()


def changed(base: BaseFile, at: int, value: bytes, cut: int | None = None) -> bytes:
    raw = bytearray(base.path.read_bytes())
    raw[at : at + len(value)] = value
    return bytes(raw[:cut])


@pytest.mark.parametrize(
    ("at", "value", "cut", "text"),
    [
        (0, b"GGUF", None, "not a KL base"),
        (0, b"", 20, "not a KL base"),
        (8, b"\x02", None, "version 2; this program reads 1"),
        (0, b"", -1, "damaged or cut short"),
        (0, b"", HEADER.size + 10, "damaged or cut short"),
        (16, bytes(4), None, "damaged or cut short"),  # chunks of 0 tokens
        (12, b"\xff\xff\xff\xff", None, "damaged or cut short"),  # a huge vocabulary
        (24, b"\xff\xff\xff\xff", None, "damaged or cut short"),  # more exact tokens than there are
        (HEADER.size, b"\xff\xff\xff\x7f", None, "a token id is not below 320"),
    ],
)
def test_files_that_are_no_base(base: BaseFile, tmp_path: Path, at: int, value: bytes, cut: int, text: str) -> None:
    (tmp_path / "x.klb").write_bytes(changed(base, at, value, cut))
    with pytest.raises(ModelFileError, match=text) as e:
        BaseFile(tmp_path / "x.klb")
    assert "x.klb" in str(e.value)


def test_a_base_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="No such file"):
        BaseFile(tmp_path / "none.klb")


def test_a_base_of_another_model_text_or_context(tiny: Model, base: BaseFile, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="another text"):
        compare(tiny, base, TEXT.replace("hen", "hat"))
    with pytest.raises(ModelFileError, match="another text"):
        compare(tiny, base, TEXT[: len(TEXT) // 2])
    larger = write_tiny(tmp_path / "larger.gguf", n_vocab=384)
    with (
        qwen35rt.load(larger, device="cpu", threads=1, n_ctx=64) as model,
        pytest.raises(ModelFileError, match=r"base of 320 tokens.*has 384"),
    ):
        compare(model, base)
    tokens = list(tiny.metadata["tokenizer.ggml.tokens"])
    tokens[5], tokens[6] = tokens[6], tokens[5]
    other = write_tiny(tmp_path / "other.gguf", metadata={"tokenizer.ggml.tokens": tokens})
    with (
        qwen35rt.load(other, device="cpu", threads=1, n_ctx=64) as model,
        pytest.raises(ModelFileError, match="other tokens"),
    ):
        compare(model, base)
    with (
        qwen35rt.load(tiny.path, device="cpu", threads=1, n_ctx=16) as model,
        pytest.raises(ModelFileError, match="chunks of 24 tokens; the model's context holds 16"),
    ):
        compare(model, base)


# ---------------------------------------------------------------------------------------------- command


def test_command_writes_and_compares(
    tiny_dense: Path, smaller: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    text, base = ["-f", str(tmp_path / "text.txt")], ["--kl-base", str(tmp_path / "base.klb")]

    def run(model: Path, *flags: str) -> tuple[str, str]:
        code = main(["perplexity", "-m", str(model), "--device", "cpu", "-t", "1", *flags])
        out, err = capsys.readouterr()
        assert code == (1 if "error" in err else 0)
        return out, err

    out, _ = run(tiny_dense, *text, *base, "-c", "24")
    assert out.startswith("PPL = ")
    assert "exists" in run(tiny_dense, *text, *base, "-c", "24")[1]
    out, err = run(smaller, *text, *base, "--kl-divergence")
    assert err.count("\n") == 1
    rows = dict(line.split(":", 1) for line in out.splitlines()[1:] if ":" in line)
    figures = {name.strip(): value.split() for name, value in rows.items()}
    same: dict[str, Any] = json.loads(run(smaller, *base, "--kl-divergence", "--json")[0])
    assert float(figures["Mean    KLD"][0]) == pytest.approx(same["kld"]["value"], abs=1e-6)
    assert float(figures["Median  KLD"][0]) == pytest.approx(same["kld_quantiles"]["0.5"], abs=1e-6)
    assert float(figures["99.9%   Δp"][0]) == pytest.approx(100 * same["delta_p_quantiles"]["0.999"], abs=1e-6)
    assert float(figures["Same top p"][0]) == pytest.approx(100 * same["same_top"]["value"], abs=1e-6)
    assert float(figures["Mean PPL(Q)"][0]) == pytest.approx(same["ppl"]["value"], abs=1e-6)
    assert same["ppl"]["n_ctx"] == 24
    assert "chunks of 24 tokens; leave -c out" in run(smaller, *base, "--kl-divergence", "-c", "32")[1]
