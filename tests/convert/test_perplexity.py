"""Perplexity against plain NumPy on Model.logits, texts and flags that cannot be used, and the command."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import qwen35rt
from qwen35rt import Model
from qwen35rt.cli import main
from qwen35rt.cli import perplexity as command
from qwen35rt.convert.perplexity import Mean, Perplexity, negative_log_likelihood, perplexity
from qwen35rt.convert.text import cut_text, read_text
from qwen35rt.errors import ConfigError, GenerationFailed, RequestError

from ..fixtures import write_tiny

TEXT = "the hen in the other world is on the land and at rest; hello world, said the user. " * 8


@pytest.fixture(scope="module")
def tiny(tiny_dense: Path) -> Iterator[Model]:
    with qwen35rt.load(tiny_dense, device="cpu", n_ctx=256, threads=1) as model:
        yield model


def expected_nll(model: Model, n_ctx: int, bos: int | None = None) -> npt.NDArray[np.float64]:
    """Of each scored token: written anew, with all logits of a chunk in memory and in float64."""
    ids = model.tokenize(TEXT) if bos is None else [bos, *model.tokenize(TEXT)]
    found = []
    for start in range(0, len(ids) - n_ctx + 1, n_ctx):
        chunk = ids[start : start + n_ctx] if bos is None else [bos, *ids[start + 1 : start + n_ctx]]
        logits = model.logits(chunk).astype(np.float64)
        for position in range(n_ctx // 2, n_ctx - 1):
            row = logits[position] - logits[position].max()
            found.append(math.log(np.exp(row).sum()) - row[chunk[position + 1]])
    return np.array(found)


@pytest.mark.parametrize("n_ctx", [4, 16, 33, 128])
def test_equals_plain_numpy(tiny: Model, n_ctx: int) -> None:
    nll = expected_nll(tiny, n_ctx)
    found = perplexity(tiny, TEXT, n_ctx)
    assert found.value == pytest.approx(math.exp(nll.mean()), rel=1e-5)
    assert found.error == pytest.approx(found.value * nll.std(ddof=1) / math.sqrt(len(nll)), rel=1e-5)
    chunks = len(tiny.tokenize(TEXT)) // n_ctx
    assert (found.chunks, found.n_ctx, found.scored) == (chunks, n_ctx, len(nll))
    assert found.tokens == chunks * (n_ctx - 1)
    assert found.device == "cpu"


@pytest.mark.parametrize("n_batch", [1, 7, 64])
def test_does_not_depend_on_the_step_size(tiny: Model, tiny_dense: Path, n_batch: int) -> None:
    with qwen35rt.load(tiny_dense, device="cpu", n_ctx=64, threads=1, n_batch=n_batch) as model:
        assert perplexity(model, TEXT, 64).value == pytest.approx(perplexity(tiny, TEXT, 64).value, rel=1e-5)


def test_a_uniform_model_has_the_size_of_its_vocabulary(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "uniform.gguf", overrides={"output.weight": 0.0})
    with qwen35rt.load(path, device="cpu", n_ctx=32, threads=1) as model:
        found = perplexity(model, TEXT, 32)
    assert found.value == pytest.approx(320, rel=1e-12)
    assert found.error == pytest.approx(0, abs=1e-9)


def test_each_chunk_begins_with_bos_where_the_model_wants_it(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "bos.gguf", metadata={"tokenizer.ggml.add_bos_token": True})
    with qwen35rt.load(path, device="cpu", n_ctx=32, threads=1) as model:
        bos = model.tokenizer.vocab.bos
        assert bos is not None
        ids = cut_text(model.tokenizer, TEXT, 32)
        assert set(ids[:, 0]) == {bos}
        assert ids[1, 1:].tolist() == model.tokenize(TEXT)[32:63]
        nll = expected_nll(model, 32, bos)
        assert perplexity(model, TEXT, 32).value == pytest.approx(math.exp(nll.mean()), rel=1e-5)


def test_progress_tells_the_estimate_of_each_chunk(tiny: Model) -> None:
    seen: list[tuple[Perplexity, int]] = []
    found = perplexity(tiny, TEXT, 16, 3, lambda p, chunks: seen.append((p, chunks)))
    nll = expected_nll(tiny, 16)
    assert [(p.chunks, chunks) for p, chunks in seen] == [(1, 3), (2, 3), (3, 3)]
    assert [p.value for p, _ in seen] == pytest.approx([math.exp(nll[:n].mean()) for n in (7, 14, 21)], rel=1e-5)
    assert found.value == seen[-1][0].value


def test_likelihoods_survive_large_logits() -> None:
    logits = np.array([[1e4, 1e4, -1e30], [-3e38, 3.0, 3.0]], np.float32)
    found = negative_log_likelihood(logits, np.array([0, 2], np.int32))
    assert found == pytest.approx([math.log(2), math.log(2)])


def test_slices_join_to_the_logits(tiny: Model) -> None:
    ids = tiny.tokenize(TEXT)[:150]
    whole = tiny.logits(ids)
    slices = [piece.copy() for piece in tiny.logits_slices(ids)]
    assert [len(s) for s in slices] == [64, 64, 22]
    np.testing.assert_array_equal(np.concatenate(slices), whole)
    tail = np.concatenate([piece.copy() for piece in tiny.logits_slices(ids, 70)])
    np.testing.assert_allclose(tail, whole[70:], atol=1e-4)
    assert list(tiny.logits_slices(ids[:5], 5)) == []


def test_slices_end_when_another_call_begins(tiny: Model) -> None:
    slices = tiny.logits_slices(tiny.tokenize(TEXT)[:150])
    next(slices)
    tiny.generate("hello", max_tokens=1)
    with pytest.raises(RequestError, match="another call"):
        next(slices)


def test_short_text_says_how_many_tokens_are_needed(tiny: Model) -> None:
    count = len(tiny.tokenize("hello world and hello"))
    with pytest.raises(ConfigError, match=rf"{count} tokens and at least 256 .* longer text") as e:
        perplexity(tiny, "hello world and hello", 128)
    assert "-c" not in str(e.value) if count < 8 else f"-c {count // 2} or less" in str(e.value)
    with pytest.raises(ConfigError, match=r"400 .* -c 191 or less"):
        perplexity(tiny, "x" * 382, 200)
    with pytest.raises(ConfigError, match="at least 512"):  # the default of 512 meets a context of 256
        perplexity(tiny, "hello")


def test_chunks_must_fit(tiny: Model) -> None:
    with pytest.raises(ConfigError, match=r"257 tokens do not fit .* 256"):
        perplexity(tiny, TEXT, 257)
    with pytest.raises(ConfigError, match="at least 4"):
        perplexity(tiny, TEXT, 3)
    with pytest.raises(ConfigError, match="--chunks"):
        perplexity(tiny, TEXT, 16, 0)


def test_values_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "nan.gguf", overrides={"output_norm.weight": math.nan})
    with (
        qwen35rt.load(path, device="cpu", n_ctx=32, threads=1) as model,
        pytest.raises(GenerationFailed, match="chunk 1 of "),
    ):
        perplexity(model, TEXT, 16)


def test_texts_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ConfigError, match=r"latin.txt: not a UTF-8 text, byte 3 is 0xe9"):
        read_text(str(tmp_path / "latin.txt"))
    with pytest.raises(ConfigError, match="No such file"):
        read_text(str(tmp_path / "none.txt"))
    with pytest.raises(ConfigError, match="directory"):
        read_text(str(tmp_path))
    (tmp_path / "lines.txt").write_bytes(b"a\r\nb\n")
    assert read_text(str(tmp_path / "lines.txt")) == "a\r\nb\n"


# ---------------------------------------------------------------------------------------------- command


def test_command_writes_the_result_alone_to_standard_output(tiny_dense: Path, tiny: Model) -> None:
    args = ["perplexity", "-m", str(tiny_dense), "-f", "-", "-c", "32", "--device", "cpu", "-t", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "qwen35rt", *args], input=TEXT.encode(), capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    out, err = done.stdout.decode(), done.stderr.decode()
    found = perplexity(tiny, TEXT, 32)
    assert out.startswith(f"PPL = {found.value:.4f} ± {found.error:.4f}  ({found.chunks} chunks of 32 tokens, ")
    assert out.count("\n") == 1
    assert err.count("\n") == 1  # what was loaded, and no progress where nobody watches
    assert "\r" not in err


def test_command_json_and_flags(tiny_dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    args = ["perplexity", "-m", str(tiny_dense), "-f", str(tmp_path / "text.txt"), "-c", "16", "--chunks", "2"]
    values = []
    for kind in ("f16", "f32"):
        assert main([*args, "--device", "reference", "--json", "--kv-dtype", kind]) == 0
        values.append(json.loads(capsys.readouterr().out))
        assert (values[-1]["chunks"], values[-1]["scored"], values[-1]["device"]) == (2, 14, "reference")
    assert values[0]["value"] != values[1]["value"]
    assert values[0]["value"] == pytest.approx(values[1]["value"], rel=1e-2)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], "-f FILE"),
        (["-f", "/nonexistent/x"], "-f /nonexistent/x: No such file"),
        (["-f", "TEXT"], "at least 1024 are needed for chunks of 512; use -c"),
        (["-f", "TEXT", "-c", "16", "--kl-divergence"], "needs --kl-base"),
    ],
)
def test_command_errors(
    tiny_dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], text: str
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    flags = [str(tmp_path / "text.txt") if f == "TEXT" else f for f in flags]
    assert main(["perplexity", "-m", str(tiny_dense), "--device", "reference", *flags]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err.splitlines()[-1]


def test_estimate_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with command.Estimate() as estimate:
        estimate(Perplexity(12.5, 0.25, Mean(2.5, 0.02), 2, 512, 510, 1022, 20.0, "cpu"), 8)
        assert "chunk 2/8: PPL 12.5000 ± 0.2500, 51.1 tokens/s, 1m00s left" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")
    assert [command.duration(s) for s in (7.2, 185, 3720)] == ["7s", "3m05s", "1h02m"]
