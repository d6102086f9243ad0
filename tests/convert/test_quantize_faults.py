"""What quantize refuses, and that nothing half-made is left after an error."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen35rt import _native
from qwen35rt.convert import quantize as driver

from ..fixtures import Float, write_tiny
from .command import EXPERTS, WIDE, run


@pytest.mark.parametrize(("bad", "row"), [(np.nan, 17), (np.inf, 255)])
@pytest.mark.parametrize("mix", ["Q4_K_M", "Q8_0", "F16"])
def test_numbers_that_are_none_are_refused(
    mix: str,
    bad: float,
    row: int,
    tmp_path: Path,
    out: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "_PIECE_BYTES", 5 * 4 * 256)  # the row is not in the first piece

    def spoil(x: Float) -> Float:
        x[row, 3] = bad
        return x

    path = write_tiny(tmp_path / "m.gguf", overrides={"blk.2.ffn_up.weight": spoil}, **WIDE)
    out.write_bytes(b"as it was")
    assert run(path, out, mix) == 1
    assert f"m.gguf: tensor 'blk.2.ffn_up.weight', row {row} holds NaN or infinity" in capsys.readouterr().err
    assert out.read_bytes() == b"as it was"


def test_the_row_of_an_expert_is_named(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def spoil(x: Float) -> Float:
        x[3, 9, 0] = np.nan
        return x

    path = write_tiny(tmp_path / "m.gguf", "moe", overrides={"blk.1.ffn_up_exps.weight": spoil}, **EXPERTS)
    assert run(path, out, "Q8_0") == 1
    assert "tensor 'blk.1.ffn_up_exps.weight', row 9 of matrix 3 holds NaN" in capsys.readouterr().err
    assert not out.exists()


def test_numbers_too_large_for_a_format(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny(tmp_path / "m.gguf", overrides={"blk.2.ffn_up.weight": 1e30}, **WIDE)
    assert run(path, out, "F16") == 1
    assert "'blk.2.ffn_up.weight', row 0 holds 1e+30, too large for F16; keep it in BF16" in capsys.readouterr().err
    assert run(path, out, "F16", "--tensor-type", "blk.2.ffn_up.weight=BF16") == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("IN", "OUT", "Q4_KM"), "unknown type 'Q4_KM' (did you mean Q4_K_M?); there are"),
        (("IN", "OUT", "IQ2_XS"), "unknown type 'IQ2_XS'"),
        (("IN", "OUT", "Q4_0", "--tensor-type", "ffn_up=IQ2_XS"), "--tensor-type ffn_up=IQ2_XS: unknown type 'IQ2_XS'"),
        (("IN", "OUT", "Q4_0", "--tensor-type", "ffn_ab=Q8_0"), "the pattern 'ffn_ab' decides no tensor"),
        (("IN", "IN", "Q4_0"), "the output is also an input"),
        (("none.gguf", "OUT", "Q4_0"), "none.gguf: no such file"),
        (("IN", "OUT", "Q4_0", "--imatrix", "none.gguf"), "none.gguf: no such file"),
    ],
)
def test_faults_are_named(
    args: tuple[str, ...], message: str, dense: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = dense.read_bytes()
    assert run(*[{"IN": dense, "OUT": out}.get(a, a) for a in args]) == 1
    assert message in capsys.readouterr().err
    assert not out.exists()
    assert dense.read_bytes() == before


def test_the_importance_matrix_is_an_input_too(dense: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out.write_bytes(b"an hour of work")
    assert run(dense, out, "Q4_0", "--imatrix", out) == 1
    assert "the output is also an input" in capsys.readouterr().err


def test_a_damaged_input_is_refused(dense: Path, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cut.gguf").write_bytes(dense.read_bytes()[:-1000])
    assert run(tmp_path / "cut.gguf", out, "Q4_0") == 1
    assert "truncated or damaged" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device"), MemoryError()])
def test_nothing_half_made_is_left(
    error: BaseException, dense: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out.write_bytes(b"as it was")
    whole, calls = _native.quantize, []

    def failing(*args: Any) -> int:
        calls.append(1)
        if len(calls) > 9:
            assert len(list(out.parent.iterdir())) == 2
            raise error
        return whole(*args)

    monkeypatch.setattr(_native, "quantize", failing)
    assert run(dense, out, "Q4_0") == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert out.read_bytes() == b"as it was"  # the fixture sees to what else is there
    if isinstance(error, OSError):
        assert "No space left on device" in capsys.readouterr().err


def test_a_full_disk_is_seen_before_the_work(
    dense: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = shutil.disk_usage(out.parent)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    assert run(dense, out, "Q4_0") == 1
    assert "1000 are free" in capsys.readouterr().err
    assert not out.exists()
