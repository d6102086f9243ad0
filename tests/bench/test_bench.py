"""The benchmark command: lists of values, columns, what is timed, and the shares of what the machine can do."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from qwen35rt.backends.base import Batch, Float, Limits, StepReport
from qwen35rt.bench import command
from qwen35rt.bench.measure import Bench, Case, bandwidth_share, deviation, int8_share, mean
from qwen35rt.bench.table import Table
from qwen35rt.cli import main
from qwen35rt.config import ENGINE
from qwen35rt.formats import FILE_TYPES
from qwen35rt.model import source
from qwen35rt.model.source import kv_bytes_per_token, open_source, products_per_token, weight_bytes_per_token

from ..fixtures import write_tiny


class Fake:
    """An executable that notes what it is asked to do."""

    limits = Limits(rows=64, out_rows=1, slots=2, pages=100)
    state_bytes = page_bytes = 0

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.log: list[tuple[Any, ...]] = []
        self.tops: set[int] = set()

    def run(self, batch: Batch, keep: Sequence[str] = (), top: int = 0) -> tuple[Float, StepReport]:
        self.log.append(("run", int(batch.starts[0]), len(batch.tokens)))
        self.tops.add(top)
        assert batch.pages.shape[1] * self.limits.page_tokens >= batch.starts[0] + len(batch.tokens)
        return np.zeros((1, 8), np.float32), StepReport({self.device: 3}, 0.0, len(batch.tokens), {"linear": 0.5})

    def full_logits(self, row: int) -> Float:
        raise NotImplementedError

    def copy_slot(self, source: int, target: int) -> None:
        self.log.append(("copy", source, target))

    def read_slot(self, slot: int) -> tuple[Float, Float]:
        raise NotImplementedError

    def write_slot(self, slot: int, delta: Float, conv: Float) -> None:
        raise NotImplementedError

    def copy_page(self, source: int, target: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.log.append(("close",))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("5", [5]),
        ("1,2,8", [1, 2, 8]),
        ("1-4", [1, 2, 3, 4]),
        ("0-1024+512", [0, 512, 1024]),
        ("1-9*2,7", [1, 2, 4, 8, 7]),
    ],
)
def test_lists_and_ranges(text: str, values: list[int]) -> None:
    assert command.numbers(0)(text) == values


@pytest.mark.parametrize("text", ["", "a", "1,", "-1", "1-9*1", "0-9*2", "1-9+0", "1-99999999", "1.5"])
def test_lists_that_make_no_sense(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "-p", text]) == 2
    assert capsys.readouterr().err.startswith("qwen35rt: error: argument -p")


def test_prefill_is_timed_behind_its_depth_in_slices() -> None:
    fake = Fake()
    result = Bench(fake, 8).run(Case(prompt=100, generate=0, depth=70, batch=64), repetitions=2)
    fill = [("run", 0, 64), ("run", 64, 6), ("copy", 0, 1)]
    warmup = [("run", 70, 64)]
    timed = [("copy", 1, 0), ("run", 70, 64), ("run", 134, 36)]
    assert fake.log == fill + warmup + timed * 2
    assert len(result.seconds) == 2
    assert result.case.name == "pp100 @ d70"
    assert result.on_gpu is False
    assert result.op_seconds == {"linear": 2.0}


def test_decode_is_single_steps() -> None:
    fake = Fake("cuda")
    result = Bench(fake, 8).run(Case(prompt=0, generate=3, depth=0, batch=64), repetitions=1, warmup=False)
    assert fake.log == [("copy", 0, 1), ("copy", 1, 0), ("run", 0, 1), ("run", 1, 1), ("run", 2, 1)]
    assert result.case.name == "tg3"
    assert result.on_gpu is True
    assert result.rates == [3 / result.seconds[0]]
    assert fake.tops == {ENGINE.top_k_on_device}  # as the engine asks, so that no row of all logits leaves a GPU


def test_mean_and_deviation() -> None:
    assert mean([1, 2, 3]) == 2
    assert deviation([1, 2, 3]) == 1
    assert deviation([4]) == 0


def test_shares_of_dense_and_moe(tiny_dense: Path, tiny_moe: Path) -> None:
    dense = open_source(tiny_dense)
    tensors = dense.file.tensors
    head = tensors["output.weight"] if "output.weight" in tensors else tensors["token_embd.weight"]
    body = sum(t.nbytes for n, t in tensors.items() if n not in ("token_embd.weight", "output.weight"))
    # Everything is F32 here: each matrix once, one row of the embedding, the head.
    assert weight_bytes_per_token(dense.program) == body + head.nbytes + 64 * 4
    s = dense.program.state
    assert kv_bytes_per_token(dense.program, 10) == 10 * s.attention_layers * s.kv_heads * s.head_dim * 4
    rows, wanted = products_per_token(dense.program)
    assert wanted == head.nbytes // 4
    matrices = [t for n, t in tensors.items() if len(t.shape) == 2 and "conv1d" not in n and n.startswith("blk")]
    assert rows == sum(t.nbytes // 4 for t in matrices)
    moe = open_source(tiny_moe)
    hp = moe.hparams
    whole = sum(w.rows * w.cols * w.n_expert for op in moe.program.ops if op.kind == "moe_linear" for w in op.weights)
    used = sum(
        w.rows * w.cols * hp.n_expert_used for op in moe.program.ops if op.kind == "moe_linear" for w in op.weights
    )
    assert used * hp.n_expert == whole * hp.n_expert_used
    plain = sum(
        w.rows * w.cols
        for op in moe.program.ops
        if op.kind == "linear" and not op.ins[0].value.gathered
        for w in op.weights
    )
    assert products_per_token(moe.program)[0] == used + plain

    decode, prefill = Case(0, 4, 8, 16), Case(32, 0, 0, 16)
    read = weight_bytes_per_token(dense.program) + kv_bytes_per_token(dense.program, 10)
    assert bandwidth_share(dense, decode, 1e9 / read, 2.0) == pytest.approx(0.5)
    assert int8_share(dense, prefill, 1e9 / (2 * (rows + wanted / 16)), 4.0) == pytest.approx(0.25)
    assert bandwidth_share(dense, prefill, 1.0, 1.0) is None
    assert int8_share(dense, decode, 1.0, 1.0) is None
    assert bandwidth_share(dense, decode, 1.0, 0.0) is None


def test_names_of_recipes(tiny_dense: Path, tmp_path: Path) -> None:
    for number, name in FILE_TYPES.items():
        assert gguf.LlamaFileType(number).name.split("_", 1)[1] == name
    assert source.recipe(open_source(tiny_dense).file) == "F32"
    stated = write_tiny(tmp_path / "m.gguf", metadata={"general.file_type": 15})
    assert open_source(stated).description.endswith(" Q4_K_M")


def bench(*args: str) -> list[str]:
    return ["bench", "--device", "reference", "-p", "4", "-n", "2", "-r", "2", *args]


def test_markdown(tiny_dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(bench("-m", str(tiny_dense), "-d", "0,3", "--profile")) == 0
    out, err = capsys.readouterr()
    lines = [[c.strip() for c in line.strip("|").split("|")] for line in out.splitlines()]
    assert lines[0] == [
        "model", "size", "params", "backend", "isa", "threads", "test", "t/s", "bandwidth", "int8 peak", "on_gpu"
    ]  # fmt: skip
    assert [row[6] for row in lines[2:]] == ["pp4", "tg2", "pp4 @ d3", "tg2 @ d3"]
    assert {row[3] for row in lines[2:]} == {"reference"}
    assert {row[-1] for row in lines[2:]} == {"false"}
    assert "±" in lines[2][7]
    assert "pp4: " in err


@pytest.mark.parametrize("form", ["csv", "json", "jsonl"])
def test_forms_for_programs(tiny_dense: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(bench("-m", str(tiny_dense), "-o", form, "--no-warmup")) == 0
    out = capsys.readouterr().out
    rows: list[dict[str, Any]]
    if form == "csv":
        rows = list(csv.DictReader(io.StringIO(out)))
    elif form == "json":
        rows = json.loads(out)
    else:
        rows = [json.loads(line) for line in out.splitlines()]
    assert [(int(r["n_prompt"]), int(r["n_gen"])) for r in rows] == [(4, 0), (0, 2)]
    for row in rows:
        assert row["model_filename"] == str(tiny_dense)
        assert float(row["avg_ts"]) > 0
        assert str(row["on_gpu"]).lower() == "false"
        if form != "csv":
            assert len(row["samples_ns"]) == len(row["samples_ts"]) == 2
            tokens = row["n_prompt"] + row["n_gen"]
            assert row["samples_ts"][0] == pytest.approx(tokens * 1e9 / row["samples_ns"][0], rel=1e-3)


def test_rows_are_written_when_they_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    table = Table("json", out)
    table.close()
    assert json.loads(out.getvalue()) == []


def test_nothing_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "-p", "0", "-n", "0"]) == 2
    assert "nothing to measure" in capsys.readouterr().err
