"""Quantised files: what is in them, and that they run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType

import qwen35rt
from qwen35rt import _native
from qwen35rt.backends.cpu.structs import FORMAT
from qwen35rt.convert import quantize as driver
from qwen35rt.convert.imatrix_file import Entry, Imatrix, write_imatrix
from qwen35rt.convert.mixes import MIXES
from qwen35rt.convert.quantize import WRITABLE
from qwen35rt.formats import BY_NAME, FORMATS
from qwen35rt.model.gguf_file import TensorInfo, open_gguf

from ..fixtures import Float, write_tiny
from .command import WIDE, run

PROMPT = list(range(40, 88))
# Mean squared difference of the logits as a share of their variance, two and a half times what was measured. Random
# weights have no slack: with three bits and less the logits say little, so those mixes are held to WEIGHTS alone.
LOGITS = {
    **dict.fromkeys(("F32", "F16", "BF16"), 0.0),
    **dict.fromkeys(("Q8_0", "MXFP4_MOE"), 5e-3),
    "Q6_K": 6e-2,
    **dict.fromkeys(("Q5_K_M", "Q5_K_S", "Q5_1"), 0.25),
    "Q5_0": 0.35,
}
# Mean squared error of a tensor as a share of its mean square, for numbers of a normal distribution.
WEIGHTS = {
    **dict.fromkeys(("F32", "F16", "BF16"), 0.0),  # the models' numbers are exact in all three
    "Q8_0": 3e-5,
    "Q6_K": 4e-4,
    **dict.fromkeys(("Q5_K", "Q5_1", "Q5_0"), 2.5e-3),
    **dict.fromkeys(("Q4_K", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS"), 1e-2),
    "MXFP4": 2e-2,
    "Q3_K": 4e-2,
    "Q2_K": 0.12,
}


# A process of its own: its server never ends, and prints. Probabilities are told of tokens that are text, so the token
# is chosen; they are those before the choice.
LLAMA_CPP = """
import http.client, json, os, socket, sys
import xllamacpp

out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx, params.n_parallel, params.port, params.warmup = 128, 1, port, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=100)
asked = {"prompt": json.loads(sys.argv[2]), "n_predict": 1, "logit_bias": [[70, 1000]], "n_probs": 20}
connection.request("POST", "/completion", json.dumps(asked))
answer = json.loads(connection.getresponse().read())
top = answer["completion_probabilities"][0]["top_logprobs"]
out.write(json.dumps({t["id"]: t["logprob"] for t in top}) + "\\n")
out.flush()
os._exit(0)
"""


def logits(path: Path) -> Float:
    """Logits of a fixed prompt on the reference backend: exact products with the stored weights."""
    with qwen35rt.load(path, device="reference", n_ctx=64) as model:
        found: Float = model.logits(PROMPT)
    return found


def values(tensor: TensorInfo) -> Float:
    """A tensor's numbers, [rows, cols]."""
    raw = tensor.data.reshape(-1, tensor.format.row_bytes(tensor.shape[0]))
    found: Float = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(tensor.format.id))
    return found


def test_writable_formats_are_those_of_the_native_quantisers() -> None:
    pool = _native.Pool(1)
    made = []
    for f in FORMATS:
        x, target = np.ones((1, 256), np.float32), np.zeros(f.row_bytes(256), np.uint8)
        try:
            assert not _native.quantize("scalar", pool, FORMAT[f.name], x, np.zeros(0, np.float32), target)
        except ValueError:
            continue
        made.append(f.name)
    pool.close()
    assert set(made) == set(WRITABLE)
    assert {m.base for m in MIXES.values()} <= set(WRITABLE)


@pytest.mark.parametrize("mix", MIXES)
def test_every_mix_makes_a_model_that_runs(mix: str, dense: Path, out: Path) -> None:
    assert run(dense, out, mix, "-t", 2) == 0
    with open_gguf(dense) as old, open_gguf(out) as new:
        assert list(new.tensors) == list(old.tensors)
        for name, tensor in new.tensors.items():
            assert tensor.shape == old.tensors[name].shape
            a, b = values(old.tensors[name]), values(tensor)
            assert np.mean((a - b) ** 2) <= WEIGHTS[tensor.format.name] * np.mean(a**2), name
        assert new.get_int("general.file_type") == MIXES[mix].file_type
        assert new.get_int("general.quantization_version") == 2
    want, got = logits(dense), logits(out)
    error = float(np.mean((got - want) ** 2) / np.var(want))
    assert error <= LOGITS.get(mix, 2.0), error


@pytest.mark.parametrize("mix", ["Q8_0", "Q4_K_M", "MXFP4_MOE"])
def test_a_quantised_mixture_of_experts_runs(mix: str, moe: Path, out: Path) -> None:
    assert run(moe, out, mix, "-t", 2) == 0
    with open_gguf(moe) as old, open_gguf(out) as new:
        for name, tensor in new.tensors.items():
            a, b = values(old.tensors[name]), values(tensor)
            assert np.mean((a - b) ** 2) <= WEIGHTS[tensor.format.name] * np.mean(a**2), name
    with qwen35rt.load(out, device="cpu", n_ctx=64) as model:
        assert np.isfinite(model.logits(PROMPT)).all()


def test_metadata_is_carried_over_with_its_types(tmp_path: Path, out: Path) -> None:
    odd: dict[str, Any] = {
        "t.u8": (200, GGUFValueType.UINT8),
        "t.i8": (-3, GGUFValueType.INT8),
        "t.u16": (65_000, GGUFValueType.UINT16),
        "t.i16": (-300, GGUFValueType.INT16),
        "t.u64": (2**63 + 1, GGUFValueType.UINT64),
        "t.i64": (-(2**60), GGUFValueType.INT64),
        "t.f64": (0.1, GGUFValueType.FLOAT64),
        "t.f32": 0.1,
        "t.yes": True,
        "t.text": "grüße",
        "t.bools": [True, False],
        "t.texts": ["a", "", "ß"],
        "t.floats": [0.5, 0.1],
        "general.file_type": 0,
        "split.no": (0, GGUFValueType.UINT16),
    }
    path = write_tiny(tmp_path / "m.gguf", metadata=odd)
    assert run(path, out, "Q8_0") == 0
    old, new = gguf.GGUFReader(path), gguf.GGUFReader(out)
    changed = {"general.file_type", "general.quantization_version"}
    carried = [k for k in old.fields if not k.startswith(("GGUF.", "split.")) and k not in changed]
    assert {k for k in new.fields if not k.startswith("GGUF.")} == {*carried, *changed}
    for key in carried:
        a, b = old.fields[key], new.fields[key]
        assert a.types == b.types, key
        assert [p.tobytes() for p in a.parts[3:]] == [p.tobytes() for p in b.parts[3:]], key
    assert new.fields["general.file_type"].types == [GGUFValueType.UINT32]
    assert new.fields["general.file_type"].contents() == 7


def test_a_split_input_gives_the_same_file(tmp_path: Path, dense: Path, out: Path) -> None:
    split = write_tiny(tmp_path / "s.gguf", mtp=True, parts=3, **WIDE)
    assert run(split, tmp_path / "a.gguf", "Q4_K_M") == 0
    assert run(dense, out, "Q4_K_M") == 0
    assert out.read_bytes() == (tmp_path / "a.gguf").read_bytes()


@pytest.mark.parametrize("threads", [1, 3])
def test_pieces_and_threads_do_not_show(
    threads: int, moe: Path, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(moe, tmp_path / "a.gguf", "Q4_K_M", "-t", 2) == 0
    monkeypatch.setattr(driver, "_PIECE_BYTES", 7 * 4 * 256)
    assert run(moe, out, "Q4_K_M", "-t", threads) == 0
    assert out.read_bytes() == (tmp_path / "a.gguf").read_bytes()


def test_tensors_of_the_same_type_are_copied(dense: Path, tmp_path: Path, out: Path) -> None:
    assert run(dense, tmp_path / "q8.gguf", "Q8_0") == 0
    assert run(tmp_path / "q8.gguf", out, "Q8_0") == 0
    assert out.read_bytes() == (tmp_path / "q8.gguf").read_bytes()


def test_requantising_has_to_be_allowed(
    dense: Path, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    q8 = tmp_path / "q8.gguf"
    assert run(dense, q8, "Q8_0") == 0
    assert run(q8, out, "Q4_0") == 1
    assert "already quantised (Q8_0); start from an F32" in capsys.readouterr().err
    assert not out.exists()
    assert run(q8, out, "Q4_0", "--allow-requantize") == 0
    with open_gguf(dense) as old, open_gguf(out) as new:
        name = "blk.0.ffn_up.weight"
        a, b = values(old.tensors[name]), values(new.tensors[name])
        assert 0 < np.mean((a - b) ** 2) < 0.01 * np.mean(a**2)


@pytest.mark.parametrize("form", ["F16", "BF16"])
def test_sources_of_16_bits_give_what_f32_gives(form: str, dense: Path, tmp_path: Path, out: Path) -> None:
    half = write_tiny(tmp_path / "h.gguf", mtp=True, formats={"*.weight": form}, **WIDE)
    assert run(half, out, "Q4_K_M") == 0
    assert run(dense, tmp_path / "a.gguf", "Q4_K_M") == 0
    with open_gguf(tmp_path / "a.gguf") as a, open_gguf(out) as b:
        same = [n for n in a.tensors if a.tensors[n].format.quantized]
        assert len(same) > 20
        for name in same:
            np.testing.assert_array_equal(a.tensors[name].data, b.tensors[name].data)


def importances(path: Path, but: str) -> Imatrix:
    """Random importance weights for all matrices of a model that ``but`` is not in."""
    rng = np.random.default_rng(3)
    found = {}
    with open_gguf(path) as f:
        for name, t in f.tensors.items():
            if name.startswith("blk.") and len(t.shape) > 1 and "conv1d" not in name and but not in name:
                experts = t.shape[2] if len(t.shape) > 2 else 1
                sums = rng.random((experts, t.shape[0]), np.float32) ** 4
                counts = np.full(experts, 8, np.float32)
                counts[1:2] = 0
                found[name] = Entry(sums, counts)
    return Imatrix(found, 12, 512, ("text.txt", "more.txt"))


def test_importance_weights_reach_their_experts(
    moe: Path, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix = importances(moe, but="ssm_beta")
    write_imatrix(tmp_path / "i.gguf", matrix)
    assert run(moe, out, "Q4_K_M", "--imatrix", tmp_path / "i.gguf") == 0
    assert "no entry for blk.0.ssm_beta.weight, blk.1.ssm_beta.weight" in capsys.readouterr().err
    pool = _native.Pool(1)
    with open_gguf(moe) as old, open_gguf(out) as new:
        assert new.get_str("quantize.imatrix.file") == str(tmp_path / "i.gguf")
        assert new.get_str("quantize.imatrix.dataset") == "text.txt, more.txt"
        assert new.get_int("quantize.imatrix.entries_count") == len(matrix.entries)
        assert new.get_int("quantize.imatrix.chunks_count") == 12
        for name in ("blk.0.ffn_up_exps.weight", "blk.1.ssm_beta.weight", "blk.3.attn_q.weight"):
            tensor = new.tensors[name]
            experts = tensor.shape[2] if len(tensor.shape) > 2 else 1
            source = values(old.tensors[name]).reshape(experts, tensor.shape[1], tensor.shape[0])
            stored = tensor.data.reshape(experts, -1)
            for e in range(experts):
                none = np.zeros(0, np.float32)
                weights = matrix.entries[name].importance[e] if name in matrix.entries else none
                want = np.zeros(stored.shape[1], np.uint8)
                _native.quantize(_native.best_isa(), pool, FORMAT[tensor.format.name], source[e], weights, want)
                np.testing.assert_array_equal(stored[e], want)
                plain = want.copy()
                _native.quantize(_native.best_isa(), pool, FORMAT[tensor.format.name], source[e], none, plain)
                # Expert 1 was never reached: its weights are equal, which is not what a plain call takes.
                assert (name not in matrix.entries) == np.array_equal(want, plain)
    pool.close()


def test_importance_weights_of_another_model_are_refused(
    moe: Path, dense: Path, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Imatrix({"blk.0.ffn_up_exps.weight": Entry(np.ones((5, 64), np.float32), np.ones(5, np.float32))}, 1, 512)
    write_imatrix(tmp_path / "i.gguf", other)
    assert run(moe, out, "Q4_0", "--imatrix", tmp_path / "i.gguf") == 1
    assert "the entry 'blk.0.ffn_up_exps.weight' is for 64 columns of 5 matrices" in capsys.readouterr().err
    assert run(dense, out, "Q4_0", "--imatrix", tmp_path / "i.gguf") == 0
    assert "entries of no tensor of the model: blk.0.ffn_up_exps.weight" in capsys.readouterr().err


def test_dry_run_shows_the_plan_and_writes_nothing(dense: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--tensor-type", "ffn_up=q8_0", "--output-tensor-type", "F16", "--token-embedding-type", "Q5_0")
    assert run(dense, out, "q4_k_m", *flags, "--dry-run") == 0
    shown = capsys.readouterr()
    assert not out.exists()
    rows = {line.split()[0]: line.split()[1:] for line in shown.out.splitlines()}
    assert rows["blk.0.ffn_up.weight"] == ["256", "x", "256", "F32", "Q8_0", str(256 * 272), "bytes"]
    assert rows["output.weight"][-4:-1] == ["F32", "F16", str(320 * 512)]
    assert rows["token_embd.weight"][-3] == "Q5_0"
    assert rows["blk.0.attn_norm.weight"][-4:-2] == ["F32", "F32"]
    assert "nothing was written" in shown.err
    assert run(dense, out, "q4_k_m", *flags) == 0
    done = capsys.readouterr()
    assert done.out == ""
    # The same table, and a file that holds what it says.
    assert done.err.splitlines()[:-1] == shown.err.splitlines()[:-1]
    with open_gguf(out) as f:
        assert {n: t.format.name for n, t in f.tensors.items()} == {n: r[-3] for n, r in rows.items()}
        assert sum(t.nbytes for t in f.tensors.values()) == sum(int(r[-2]) for r in rows.values())


def test_rows_that_do_not_fit_are_noted(tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(write_tiny(tmp_path / "m.gguf"), out, "Q4_K_M") == 0
    err = capsys.readouterr().err
    assert "blk.0.ffn_up.weight: rows of 64 are no multiple of 256: Q5_0 in place of Q4_K" in err
    with open_gguf(out) as f:
        assert f.tensors["blk.0.ffn_up.weight"].format is BY_NAME["Q5_0"]
        assert f.tensors["output.weight"].format is BY_NAME["Q8_0"]


@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")
@pytest.mark.parametrize("mix", ["Q4_K_M", "IQ4_XS"])
def test_llama_cpp_loads_the_file(mix: str, dense: Path, out: Path) -> None:
    assert run(dense, out, mix) == 0
    done = subprocess.run(
        [sys.executable, "-c", LLAMA_CPP, str(out), json.dumps(PROMPT)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = {int(k): v for k, v in json.loads(done.stdout.splitlines()[-1]).items()}
    assert len(theirs) == 20
    last = logits(out)[-1].astype(np.float64)
    ours = last - np.log(np.exp(last - last.max()).sum()) - last.max()
    pairs = np.array([(ours[token], logprob) for token, logprob in theirs.items()]).T
    # It rounds activations to 8 bits; random weights have no slack for that.
    assert np.corrcoef(pairs)[0, 1] > 0.9
    assert np.abs(pairs[0] - pairs[1]).mean() < 1.0
