"""Importance matrices against sums made by hand from the reference's values, in float64."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qwen35rt.backends.base import Batch, Limits
from qwen35rt.backends.cpu.backend import CpuBackend
from qwen35rt.backends.reference import ReferenceBackend
from qwen35rt.cli import main
from qwen35rt.config import EvaluationDefaults
from qwen35rt.convert import imatrix
from qwen35rt.convert.imatrix import collect, step_limits
from qwen35rt.convert.imatrix_file import Imatrix, read_imatrix
from qwen35rt.errors import GenerationFailed
from qwen35rt.model.source import Source, open_source

from ..fixtures import TinySpec, tiny_tensors, write_tiny

Double = npt.NDArray[np.float64]
TEXT = "the hen in the other world is on the land and at rest; hello world, said the user. " * 4

# Matrix -> the value that it reads, as layers.py names them.
DELTA = {"attn_qkv": "attn_norm", "attn_gate": "attn_norm", "ssm_beta": "attn_norm", "ssm_alpha": "attn_norm"}
DELTA |= {"ssm_out": "normed"}
ATTENTION = {"attn_q": "attn_norm", "attn_k": "attn_norm", "attn_v": "attn_norm", "attn_output": "attn_gated"}
DENSE = {"ffn_gate": "ffn_norm", "ffn_up": "ffn_norm", "ffn_down": "ffn_act"}
MOE = {"ffn_gate_inp": "ffn_norm", "ffn_gate_inp_shexp": "ffn_norm", "ffn_gate_shexp": "ffn_norm"}
MOE |= {"ffn_up_shexp": "ffn_norm", "ffn_down_shexp": "shexp_act"}
EXPERTS = {"ffn_gate_exps": "ffn_norm", "ffn_up_exps": "ffn_norm", "ffn_down_exps": "moe_act"}


def chunks(source: Source, count: int = 3, n_ctx: int = 20) -> npt.NDArray[np.int32]:
    return np.random.default_rng(3).integers(0, source.program.n_vocab, (count, n_ctx), np.int32)


def by_hand(source: Source, ids: npt.NDArray[np.int32]) -> dict[str, tuple[Double, Double]]:
    """-> sums [experts, cols] and rows [experts] of each matrix; one row of one expert at a time."""
    program, n_ctx = source.program, ids.shape[1]
    executable = ReferenceBackend(np.float64).compile(program, Limits(n_ctx, n_ctx, 1, 1, kv_dtype="f32"))
    names = [v.name for v in program.values]
    columns = {n.removesuffix(".weight"): t.shape[0] for n, t in source.file.tensors.items()}
    sums: dict[str, Any] = {}
    rows: dict[str, Any] = defaultdict(lambda: defaultdict(int))

    def add(name: str, expert: int, row: Double) -> None:
        experts = source.hparams.n_expert if name.endswith("_exps") else 1
        total = sums.setdefault(name, np.zeros((experts, columns[name])))
        total[expert] += row * row
        rows[name][expert] += 1

    for chunk in ids:
        values = executable.run(Batch.single(chunk, 0, np.arange(1, dtype=np.int32), 0, range(n_ctx)), names)[1].values
        for row in values["output_norm"]:
            add("token_embd" if source.hparams.tied else "output", 0, row)
        for layer, full in enumerate(source.hparams.full_attention):
            moe = source.hparams.n_expert > 0
            for matrix, value in ((ATTENTION if full else DELTA) | (MOE if moe else DENSE)).items():
                for row in values[f"l{layer}.{value}"]:
                    add(f"blk.{layer}.{matrix}", 0, row)
            for matrix, value in (EXPERTS if moe else {}).items():
                for t, route in enumerate(values[f"l{layer}.moe_route"]):
                    for place in range(2):
                        row = values[f"l{layer}.{value}"][t]
                        if matrix == "ffn_down_exps":
                            row = row.reshape(2, -1)[place]
                        add(f"blk.{layer}.{matrix}", int(route[place]), row)
    return {
        name + ".weight": (total, np.array([rows[name][e] for e in range(len(total))], np.float64))
        for name, total in sums.items()
    }


def run(source: Source, ids: npt.NDArray[np.int32], device: str = "cpu", **options: Any) -> Imatrix:
    output = options.pop("process_output", False)
    limits = step_limits(source.program, ids.shape[1], options.pop("n_batch", None), output)
    backend = CpuBackend(threads=1) if device == "cpu" else ReferenceBackend(np.float64)
    executable = backend.compile(source.program, limits)
    try:
        return collect(source.program, executable, ids, process_output=output, **options)
    finally:
        executable.close()


def compare(found: Imatrix, wanted: dict[str, tuple[Double, Double]], rtol: float) -> None:
    assert set(found.entries) == set(wanted)
    for name, (sums, counts) in wanted.items():
        np.testing.assert_array_equal(found.entries[name].counts, counts, name)
        np.testing.assert_allclose(found.entries[name].in_sum2, sums, rtol, 1e-3 * rtol * sums.max(), err_msg=name)


# bfloat16 and int8 activations never occur: the tiny models' weights are float32. Pages of keys and values are float16.
@pytest.mark.parametrize(("device", "rtol"), [("reference", 1e-3), ("cpu", 5e-3)])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_equals_sums_by_hand(tiny_dense: Path, tiny_moe: Path, kind: str, device: str, rtol: float) -> None:
    source = open_source(tiny_moe if kind == "moe" else tiny_dense)
    ids = chunks(source)
    found = run(source, ids, device, process_output=True, dataset="text.txt")
    compare(found, by_hand(source, ids), rtol)
    assert (found.chunk_count, found.chunk_size, found.datasets) == (3, 20, ("text.txt",))
    counts = found.entries["blk.0.attn_qkv.weight"].counts
    assert counts.tolist() == [60]
    if kind == "moe":
        experts = found.entries["blk.2.ffn_down_exps.weight"].counts
        assert experts.shape == (8,)
        assert experts.sum() == 2 * 60
        assert len(set(experts.tolist())) > 1


@pytest.mark.parametrize("n_batch", [1, 7])
def test_does_not_depend_on_the_step_size(tiny_moe: Path, n_batch: int) -> None:
    source = open_source(tiny_moe)
    ids = chunks(source)
    whole, steps = run(source, ids), run(source, ids, n_batch=n_batch)
    compare(steps, {n: (e.in_sum2.astype(float), e.counts.astype(float)) for n, e in whole.entries.items()}, 1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_output_matrix_only_if_asked(tmp_path: Path, tied: bool) -> None:
    source = open_source(write_tiny(tmp_path / "m.gguf", tied=tied))
    ids = chunks(source)
    name = "token_embd.weight" if tied else "output.weight"
    assert not {"token_embd.weight", "output.weight"} & set(run(source, ids).entries)
    found = run(source, ids, process_output=True)
    assert {"token_embd.weight", "output.weight"} & set(found.entries) == {name}
    compare(found, by_hand(source, ids), 5e-3)


def test_fused_tensors_have_one_entry_under_their_own_name(tmp_path: Path) -> None:
    plain = tiny_tensors(TinySpec(moe=True))
    b = "blk.3."
    fused = {
        b + "attn_qkv.weight": np.concatenate([plain[f"{b}attn_{x}.weight"] for x in "qkv"]),
        b + "ffn_gate_up_exps.weight": np.concatenate(
            [plain[b + "ffn_gate_exps.weight"], plain[b + "ffn_up_exps.weight"]], 1
        ),
    }
    gone = [f"{b}attn_{x}.weight" for x in "qkv"] + [b + "ffn_gate_exps.weight", b + "ffn_up_exps.weight"]
    source = open_source(write_tiny(tmp_path / "fused.gguf", "moe", drop=gone, extra=fused))
    other = open_source(write_tiny(tmp_path / "plain.gguf", "moe"))
    ids = chunks(source)
    found, split = run(source, ids), run(other, ids)
    assert set(found.entries) == set(split.entries) - set(gone) | set(fused)
    assert set(found.entries) <= set(source.file.tensors)
    for name, same in ((b + "attn_qkv.weight", gone[0]), (b + "ffn_gate_up_exps.weight", gone[3])):
        np.testing.assert_array_equal(found.entries[name].counts, split.entries[same].counts)
        np.testing.assert_allclose(found.entries[name].in_sum2, split.entries[same].in_sum2, 1e-4)


def test_values_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    source = open_source(write_tiny(tmp_path / "nan.gguf", overrides={"blk.1.attn_norm.weight": math.nan}))
    with pytest.raises(GenerationFailed, match=r"chunk 1 of 3: inputs of blk\.1\.attn_qkv\.weight"):
        run(source, chunks(source))


def test_steps_are_as_large_as_the_workspace_allows(tiny_dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = open_source(tiny_dense).program
    assert step_limits(program, 4096).rows == 512
    assert step_limits(program, 20, 64).rows == 20
    assert step_limits(program, 300, 64, True).out_rows == 64
    row_bytes = 4 * sum(v.width for v in program.values if not v.gathered)
    for room, rows in ((100.5, 86), (256, 256), (0.5, 1)):  # 512 tokens in 6, 2 and 512 steps
        monkeypatch.setattr(imatrix, "EVALUATION", EvaluationDefaults(workspace_bytes=int(room * row_bytes)))
        assert step_limits(program, 512).rows == rows


# ---------------------------------------------------------------------------------------------- command


def test_command(tiny_moe: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "im.gguf"
    args = ["-m", str(tiny_moe), "-f", str(tmp_path / "text.txt"), "-o", str(out), "-c", "32", "--chunks", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "qwen35rt", "imatrix", *args, "--device", "cpu", "-t", "1"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found = read_imatrix(out)
    assert done.stdout.startswith(f"{out}: {len(found.entries)} matrices, 2 chunks of 32 tokens, ")
    assert "\r" not in done.stderr
    assert (found.chunk_count, found.chunk_size, found.datasets) == (2, 32, (str(tmp_path / "text.txt"),))
    assert found.entries["blk.0.ssm_out.weight"].counts.tolist() == [64]
    assert "output.weight" not in found.entries


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["-f", "none.txt"], "-f none.txt: No such file"),
        (["-f", "TEXT"], "at least 1024 are needed for chunks of 512; use -c"),
        (["-f", "TEXT", "-c", "5000"], "-c 5000: the model's context holds 4096"),
        (["-f", "TEXT", "-c", "16", "-o", "/nonexistent/x.gguf"], "folder /nonexistent does not exist"),
        (["-f", "TEXT", "-c", "16", "-o", "MODEL"], "also an input"),
    ],
)
def test_command_errors(
    tiny_dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], text: str
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    put = {"TEXT": str(tmp_path / "text.txt"), "MODEL": str(tiny_dense)}
    flags = [put.get(f, f) for f in flags]
    if "-o" not in flags:
        flags += ["-o", str(tmp_path / "im.gguf")]
    assert main(["imatrix", "-m", str(tiny_dense), "--device", "reference", *flags]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err.splitlines()[-1]
    assert not (tmp_path / "im.gguf").exists()
