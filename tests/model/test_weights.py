"""Weights: every tensor reaches its place, as a view; wrong, missing and unknown tensors."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from qwen35rt.errors import ModelFileError
from qwen35rt.formats import BY_NAME, FORMATS
from qwen35rt.model.gguf_file import GgufFile, open_gguf
from qwen35rt.model.graph import build_program
from qwen35rt.model.hparams import read_hparams
from qwen35rt.model.weights import AttentionWeights, DeltaWeights, DenseFfn, MoeFfn, QTensor, Weights, load_weights
from tests.fixtures import Float, TinySpec, tiny_metadata, tiny_tensors, write_gguf, write_script, write_tiny
from tests.gguf_raw import quantize

NAMES: dict[type, dict[str, str]] = {
    AttentionWeights: {
        "attn_norm": "attn_norm.weight",
        "q": "attn_q.weight",
        "k": "attn_k.weight",
        "v": "attn_v.weight",
        "output": "attn_output.weight",
        "q_norm": "attn_q_norm.weight",
        "k_norm": "attn_k_norm.weight",
    },
    DeltaWeights: {
        "attn_norm": "attn_norm.weight",
        "qkv": "attn_qkv.weight",
        "gate": "attn_gate.weight",
        "beta": "ssm_beta.weight",
        "alpha": "ssm_alpha.weight",
        "conv1d": "ssm_conv1d.weight",
        "a": "ssm_a",
        "dt_bias": "ssm_dt.bias",
        "norm": "ssm_norm.weight",
        "out": "ssm_out.weight",
    },
    DenseFfn: {"gate": "ffn_gate.weight", "up": "ffn_up.weight", "down": "ffn_down.weight"},
    MoeFfn: {
        "router": "ffn_gate_inp.weight",
        "gate_exps": "ffn_gate_exps.weight",
        "up_exps": "ffn_up_exps.weight",
        "down_exps": "ffn_down_exps.weight",
        "shared_gate": "ffn_gate_inp_shexp.weight",
        "gate_shexp": "ffn_gate_shexp.weight",
        "up_shexp": "ffn_up_shexp.weight",
        "down_shexp": "ffn_down_shexp.weight",
    },
}


def load(path: Path) -> Weights:
    f = open_gguf(path)
    return load_weights(f, read_hparams(f))


def values(w: QTensor | Float) -> Float:
    return w.dequantize() if isinstance(w, QTensor) else w


def named(w: Weights) -> dict[str, QTensor | Float]:
    """All weights of the trunk by the name that they have in a file."""
    out: dict[str, QTensor | Float] = {"token_embd.weight": w.token_embd, "output_norm.weight": w.output_norm}
    if w.output is not w.token_embd:
        out["output.weight"] = w.output
    for i, layer in enumerate(w.layers):
        out[f"blk.{i}.post_attention_norm.weight"] = layer.post_attention_norm
        for group in (layer.mixer, layer.ffn):
            assert set(NAMES[type(group)]) == {x.name for x in fields(group)}
            out |= {f"blk.{i}.{name}": getattr(group, x) for x, name in NAMES[type(group)].items()}
    return out


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_b25_every_tensor_reaches_its_place(
    tmp_path: Path, kind: str, tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """B25: all tensors are random and different, so that any mix-up shows."""
    w = load(write_tiny(tmp_path / "t.gguf", kind, tied=tied, n_layer=8))
    expected = tiny_tensors(TinySpec(moe=kind == "moe", tied=tied, n_layer=8))
    found = named(w)
    assert set(found) == set(expected)
    for name, x in expected.items():
        np.testing.assert_array_equal(values(found[name]), x if "gate_inp_shexp" not in name else x[None])
    assert [type(layer.mixer) is AttentionWeights for layer in w.layers] == [False, False, False, True] * 2
    assert w.ignored == ()
    assert not w.mtp_present
    assert not caplog.records


def test_oracle_models_build_programs(oracle: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path in sorted((oracle / "models").glob("*.gguf")):
        f = open_gguf(path)
        hp = read_hparams(f)
        w = load_weights(f, hp)
        assert w.mtp_present == ("mtp" in path.name)
        assert build_program(hp, w).n_vocab == 1024
        for name, x in named(w).items():
            t = f.tensors[name]
            expected = quants.dequantize(t.data.reshape(-1, t.nbytes), GGMLQuantizationType(t.format.id))
            np.testing.assert_array_equal(values(x).reshape(-1), expected.reshape(-1))
    assert not caplog.records


def test_matrices_are_views_and_vectors_are_copies(tiny_moe: Path) -> None:
    f = open_gguf(tiny_moe)
    for name, x in named(load_weights(f, read_hparams(f))).items():
        if isinstance(x, QTensor):
            assert np.shares_memory(x.data, f.tensors[name].data)
            assert x.nbytes == f.tensors[name].nbytes
            assert x.name == name
        else:
            assert x.flags.c_contiguous
            assert x.flags.aligned
            assert x.dtype == np.float32
            assert not np.shares_memory(x, f.tensors[name].data)


@pytest.mark.parametrize("form", ["F32", "Q6_K"])
def test_b43_tied_embeddings_are_one_object(tmp_path: Path, form: str) -> None:
    w = load(write_tiny(tmp_path / "t.gguf", tied=True, n_embd=256, formats={"token_embd*": form}))
    assert w.output is w.token_embd
    assert w.output.format.name == form


@pytest.mark.parametrize("form", [f.name for f in FORMATS])
def test_dequantize_every_format(tmp_path: Path, form: str) -> None:
    """Each format in a matrix and in experts, halves of a fused tensor included."""
    spec = TinySpec(moe=True, n_embd=512, n_expert=3, n_ff_expert=256, n_layer=1)
    tensors: dict[str, Any] = dict(tiny_tensors(spec))
    rng = np.random.default_rng(3)
    raw = {n: quantize(tensors[n], form, rng) for n in ("blk.0.attn_qkv.weight", "blk.0.ffn_down_exps.weight")}
    gate, up = (tensors.pop(f"blk.0.ffn_{n}_exps.weight") for n in ("gate", "up"))
    fused = "blk.0.ffn_gate_up_exps.weight"
    raw[fused] = quantize(np.concatenate([gate, up], 1), form, rng)
    tensors |= {n: (r, form) for n, r in raw.items()}
    w = load(write_gguf(tmp_path / "t.gguf", tiny_metadata(spec, None, None), tensors))
    expected = {n: quants.dequantize(r, GGMLQuantizationType[form]) for n, r in raw.items()}
    mixer, ffn = w.layers[0].mixer, w.layers[0].ffn
    assert isinstance(mixer, DeltaWeights)
    assert isinstance(ffn, MoeFfn)
    np.testing.assert_array_equal(mixer.qkv.dequantize(), expected["blk.0.attn_qkv.weight"])
    np.testing.assert_array_equal(ffn.down_exps.dequantize(), expected["blk.0.ffn_down_exps.weight"])
    np.testing.assert_array_equal(ffn.gate_exps.dequantize(), expected[fused][:, :256])
    np.testing.assert_array_equal(ffn.up_exps.dequantize(), expected[fused][:, 256:])
    row = BY_NAME[form].row_bytes(512)
    for half, first in ((ffn.gate_exps, 0), (ffn.up_exps, 256)):
        assert (half.rows, half.cols, half.n_expert, half.row_bytes, half.expert_stride) == (
            256,
            512,
            3,
            row,
            512 * row,
        )
        for e in range(3):
            at = e * half.expert_stride + 5 * half.row_bytes
            assert half.data[at : at + row].tobytes() == raw[fused][e, first + 5].tobytes()
        assert half.raw_rows()[2, 5].tobytes() == raw[fused][2, first + 5].tobytes()


def test_fused_attention_is_split_by_rows(tmp_path: Path) -> None:
    spec = TinySpec()
    tensors: dict[str, Any] = dict(tiny_tensors(spec))
    q, k, v = (tensors.pop(f"blk.3.attn_{n}.weight") for n in "qkv")
    tensors["blk.3.attn_qkv.weight"] = np.concatenate([q, k, v])
    w = load(write_gguf(tmp_path / "t.gguf", tiny_metadata(spec, None, None), tensors))
    mixer = w.layers[3].mixer
    assert isinstance(mixer, AttentionWeights)
    for found, expected in ((mixer.q, q), (mixer.k, k), (mixer.v, v)):
        np.testing.assert_array_equal(found.dequantize(), expected)
    assert w.ignored == ()


def test_row_view_checks_its_range(tiny_dense: Path) -> None:
    w = load(tiny_dense).token_embd
    view = w.row_view("part", 5, 7)
    np.testing.assert_array_equal(view.dequantize(), w.dequantize()[5:12])
    for start, rows in ((-1, 2), (315, 6), (0, 321), (3, -1)):
        with pytest.raises(ValueError, match="token_embd"):
            w.row_view("part", start, rows)


@pytest.mark.parametrize("suffix", [".scale", ".weight.scale"])
def test_scales_multiply_the_product(tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture) -> None:
    """NVFP4 files state a factor per matrix or per expert; input scales are of no use here."""
    base = {n: f"blk.0.{n}" for n in ("ffn_up_shexp", "ffn_up_exps", "ffn_down_exps", "ffn_gate_exps")}
    each = np.linspace(0.5, 2, 8, dtype=np.float32)
    extra: dict[str, Any] = {
        base["ffn_up_shexp"] + suffix: np.array([0.25], np.float32),
        base["ffn_up_exps"] + suffix: each,
        base["ffn_down_exps"] + suffix: np.array([3.0], np.float32),
        base["ffn_up_exps"] + ".input_scale": each,
    }
    plain = load(write_tiny(tmp_path / "p.gguf", "moe", formats={"*ffn_up*": "NVFP4"})).layers[0].ffn
    w = load(write_tiny(tmp_path / "s.gguf", "moe", formats={"*ffn_up*": "NVFP4"}, extra=extra))
    scaled = w.layers[0].ffn
    assert isinstance(plain, MoeFfn)
    assert isinstance(scaled, MoeFfn)
    assert scaled.gate_exps.scale is None
    for name, factor in (("up_shexp", 0.25), ("up_exps", each[:, None, None]), ("down_exps", 3.0)):
        np.testing.assert_allclose(getattr(scaled, name).dequantize(), getattr(plain, name).dequantize() * factor)
    assert w.ignored == ()
    assert not caplog.records
    with pytest.raises(ModelFileError, match=r"ffn_up_exps.*scale' has the shape \[7\]"):
        load(write_tiny(tmp_path / "s.gguf", "moe", extra={base["ffn_up_exps"] + suffix: each[:7]}))


@pytest.mark.parametrize("form", ["F16", "BF16"])
def test_vectors_in_half_precision(tmp_path: Path, form: str) -> None:
    formats = dict.fromkeys(("*norm.weight", "*conv1d*", "*ssm_a", "*dt.bias", "*inp*"), form)
    w = load(write_tiny(tmp_path / "t.gguf", "moe", formats=formats))
    expected = tiny_tensors(TinySpec(moe=True))
    for name, x in named(w).items():
        np.testing.assert_array_equal(values(x).reshape(-1), expected[name].reshape(-1))


def test_vectors_in_a_block_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tensor 'output_norm.weight' is Q8_0; F32, F16 or BF16 is needed"):
        load(write_tiny(tmp_path / "t.gguf", formats={"output_norm*": "Q8_0"}))


@pytest.mark.parametrize("shape", [(64,), (1, 64), (1, 1, 64)])
def test_shared_gate_in_one_or_two_dimensions(tmp_path: Path, shape: tuple[int, ...]) -> None:
    gate = np.arange(64, dtype=np.float32).reshape(shape)
    name = "blk.1.ffn_gate_inp_shexp.weight"
    ffn = load(write_tiny(tmp_path / "t.gguf", "moe", drop=[name], extra={name: gate})).layers[1].ffn
    assert isinstance(ffn, MoeFfn)
    assert (ffn.shared_gate.rows, ffn.shared_gate.cols) == (1, 64)
    np.testing.assert_array_equal(ffn.shared_gate.dequantize(), gate.reshape(1, 64))


def test_b31_types_mix_per_tensor(tmp_path: Path) -> None:
    kinds = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_NL")
    sizes: dict[str, Any] = {"n_embd": 256, "n_ff": 256, "head_dim": 128, "ssm_state": 64}
    matrices = [n for n, t in tiny_tensors(TinySpec(**sizes)).items() if t.ndim == 2 and "conv1d" not in n]
    formats = {n: kinds[i % len(kinds)] for i, n in enumerate(matrices)}
    formats |= {n: "Q8_0" for n in matrices if "ssm_alpha" in n or "ssm_beta" in n}
    found = named(load(write_tiny(tmp_path / "t.gguf", formats=formats, **sizes)))
    for name, form in formats.items():
        matrix = found[name]
        assert isinstance(matrix, QTensor)
        assert matrix.format.name == form


def missing(path: Path, word: str, arch: str) -> None:
    with pytest.raises(ModelFileError, match=f"tensor '{word}' is missing; architecture {arch} needs it") as e:
        load(path)
    assert "truncated" not in str(e.value)


def test_b38_a_renamed_expert_tensor_is_missing_not_truncated(tmp_path: Path) -> None:
    name = "blk.2.ffn_down_exps.weight"
    missing(write_tiny(tmp_path / "t.gguf", "moe", rename={name: "blk.2.ffn_down_expert.weight"}), name, "qwen35moe")


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_b38_each_missing_tensor_is_named(tmp_path: Path, kind: str) -> None:
    spec = TinySpec(moe=kind == "moe")
    tensors = tiny_tensors(spec)
    optional = {"output.weight", "token_embd.weight"}
    for name in [n for n in tensors if n not in optional and not n.startswith(("blk.1.", "blk.2."))]:
        rest = {n: t for n, t in tensors.items() if n != name}
        path = write_gguf(tmp_path / "t.gguf", tiny_metadata(spec, None, None), rest)
        missing(path, name, spec.arch)
    with pytest.raises(ModelFileError, match="token embedding is missing"):
        load(write_tiny(tmp_path / "t.gguf", kind, drop=["token_embd*"]))


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_each_wrong_shape_is_named(tmp_path: Path, kind: str) -> None:
    """Each tensor with one more row, and with its dimensions turned round."""
    spec = TinySpec(moe=kind == "moe", n_vocab=352)
    tensors = tiny_tensors(spec)
    for name in [n for n in tensors if not n.startswith(("blk.1.", "blk.2."))]:
        old = tensors[name]
        for new in (np.concatenate([old, old[:1]]), old.T.copy()):
            if new.shape == old.shape or (name == "token_embd.weight" and new.shape[1] == old.shape[1]):
                continue
            path = write_gguf(tmp_path / "t.gguf", tiny_metadata(spec, None, None), tensors | {name: new})
            with pytest.raises(ModelFileError) as e:
                load(path)
            named_other = name == "token_embd.weight"  # its rows are taken as the vocabulary, then others disagree
            assert named_other or f"tensor '{name}' has the shape {list(new.shape[::-1])}" in str(e.value)
            assert "needs [" in str(e.value)


def test_b25_unknown_tensors_warn_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = np.ones(4, np.float32)
    w = load(write_tiny(tmp_path / "t.gguf", extra={"blk.0.mystery.weight": one}))
    assert w.ignored == ("blk.0.mystery.weight",)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "blk.0.mystery.weight" in caplog.text
    caplog.clear()
    w = load(write_tiny(tmp_path / "t.gguf", extra={f"x.{i}": one for i in range(20)}))
    assert len(w.ignored) == 20
    assert "x.7 and 12 more" in caplog.text
    assert "x.8" not in caplog.text


def test_b42_mtp_block(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """B42: the trunk of TINY-MTP is TINY-D; the block is known and not loaded."""
    w, plain = load(write_tiny(tmp_path / "m.gguf", mtp=True)), load(write_tiny(tmp_path / "d.gguf"))
    assert w.mtp_present
    assert w.ignored == ()
    assert not caplog.records
    for (name, x), (other, y) in zip(named(w).items(), named(plain).items(), strict=True):
        assert name == other
        np.testing.assert_array_equal(values(x), values(y))


def test_b42_mtp_stated_but_absent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    meta = {"qwen35.nextn_predict_layers": 1, "qwen35.block_count": 5}
    w = load(write_tiny(tmp_path / "t.gguf", metadata=meta))
    assert len(w.layers) == 4
    assert not w.mtp_present
    assert "MTP is off" in caplog.text


def test_b42_mtp_block_that_no_key_states_is_unknown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    meta = {"qwen35.nextn_predict_layers": None, "qwen35.block_count": 4}
    w = load(write_tiny(tmp_path / "t.gguf", mtp=True, metadata=meta))
    assert len(w.layers) == 4
    assert not w.mtp_present
    assert "blk.4.nextn.eh_proj.weight" in w.ignored
    assert "unknown tensors" in caplog.text


@pytest.mark.parametrize("mtp", [None, "right", "wrong"])
def test_a_script_file_loads(tmp_path: Path, mtp: str | None) -> None:
    f: GgufFile = open_gguf(write_script(tmp_path / "s.gguf", [b"a", "</think>", b"\xf0\x9f"], mtp=mtp))
    hp = read_hparams(f)
    w = load_weights(f, hp)
    assert w.mtp_present == (mtp is not None)
    # With all layers' outputs zero the residual is the embedding, so successors can be read off the head.
    x = w.token_embd.dequantize()
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + hp.rms_eps)
    after = (x @ w.output.dequantize().T).argmax(-1)
    think, end = (f.metadata["tokenizer.ggml.tokens"].index(t) for t in ("</think>", "<|im_end|>"))
    assert [int(after[t]) for t in (0, 100, end, 320, think, 321)] == [320, 320, 320, think, 321, end]
