"""Checkpoints that cannot be converted: each is refused with file, thing and remedy, and nothing is written."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen35rt.cli import main
from qwen35rt.convert.hf import convert
from qwen35rt.errors import ConfigError, ModelFileError, UnsupportedModel
from qwen35rt.model.gguf_file import open_gguf

from .checkpoints import Stored, hf_tensors, stored, write_checkpoint, write_json, write_safetensors, write_shards

pytest.importorskip("safetensors", reason="the extra 'convert' is not installed")

NORM = "model.layers.1.input_layernorm.weight"
DOWN = "model.layers.2.mlp.down_proj.weight"
A_LOG = "model.layers.0.linear_attn.A_log"
EMBD = "model.embed_tokens.weight"


@pytest.fixture
def hf(tmp_path: Path, tiny_dense: Path) -> Path:
    """A sound checkpoint folder that a test may damage."""
    return write_checkpoint(tmp_path / "hf", tiny_dense, dtype="F32")


def tensors_of(tiny: Path) -> dict[str, Stored]:
    with open_gguf(tiny) as f:
        return {n: stored(x, "F32") for n, x in hf_tensors(f).items()}


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    write_json(path, value)


def refused(folder: Path, kind: type[Exception], *texts: str, **options: Any) -> None:
    """Converting fails with an error of exactly this kind that holds the texts, and writes nothing."""
    out = folder.parent / "out"
    out.mkdir()
    with pytest.raises(kind) as e:
        convert(folder, out / "out.gguf", **{"outtype": "f32", **options})
    assert type(e.value) is kind
    for text in texts:
        assert text in str(e.value)
    assert list(out.iterdir()) == []


def test_a_sound_one_is_converted(hf: Path) -> None:
    assert len(convert(hf, hf.parent / "out.gguf")) == 1


def test_folders_that_are_none(tmp_path: Path, hf: Path) -> None:
    refused(tmp_path / "none", ModelFileError, "none", "does not exist")
    with pytest.raises(ModelFileError, match="is a file; name the folder"):
        convert(hf / "config.json", tmp_path / "o.gguf")


CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], object], type[Exception], tuple[str, ...]]] = {
    "other architecture": (
        lambda c: c.update(architectures=["LlamaForCausalLM"]),
        UnsupportedModel,
        ("config.json", "LlamaForCausalLM", "known: Qwen3_5ForCausalLM, "),
    ),
    "no architecture": (lambda c: c.pop("architectures"), UnsupportedModel, ("'architectures' is missing",)),
    "missing number": (lambda c: c.pop("hidden_size"), ModelFileError, ("'hidden_size' is missing", "whole number")),
    "wrong kind": (lambda c: c.update(hidden_size="64"), ModelFileError, ("'hidden_size' is '64'",)),
    "boolean": (lambda c: c.update(rms_norm_eps=True), ModelFileError, ("'rms_norm_eps' is True",)),
    "odd heads": (lambda c: c.update(linear_num_value_heads=3), ModelFileError, ("a multiple of the 2 key heads",)),
    "no rope base": (lambda c: c["rope_parameters"].pop("rope_theta"), ModelFileError, ("'rope_theta' is missing",)),
    "yarn": (
        lambda c: c["rope_parameters"].update(rope_type="yarn", factor=4.0),
        UnsupportedModel,
        ("'rope_parameters.rope_type' is 'yarn'", "only 'default'"),
    ),
    "older yarn": (
        lambda c: c.update(rope_scaling={"type": "yarn"}, rope_parameters=None),
        UnsupportedModel,
        ("yarn",),
    ),
    "sections": (
        lambda c: c["rope_parameters"].update(mrope_section=[11, 11, 10]),
        ModelFileError,
        ("mrope_section' is [11, 11, 10]", "must be 4"),
    ),
    "layer types": (lambda c: c.update(layer_types=["full_attention"]), ModelFileError, ("'layer_types'", "4 entries")),
    "bias": (lambda c: c.update(attention_bias=True), UnsupportedModel, ("'attention_bias' is True",)),
    "fp8": (
        lambda c: c.update(quantization_config={"quant_method": "fp8"}),
        UnsupportedModel,
        ("quantised ('fp8')", "take the one that is not"),
    ),
    "other shape": (
        lambda c: c.update(intermediate_size=128),
        ModelFileError,
        ("model.safetensors", "mlp.gate_proj.weight", "[96, 64]", "[128, 64]"),
    ),
    "fewer layers": (
        lambda c: c.update(num_hidden_layers=3, layer_types=None),
        UnsupportedModel,
        ("tensors of no known use", "model.layers.3.input_layernorm.weight"),
    ),
    "small vocabulary": (
        lambda c: c.update(vocab_size=200, tie_word_embeddings=False),
        ModelFileError,
        ("has the id", "vocab_size is 200"),
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_config(hf: Path, case: str) -> None:
    change, kind, texts = CONFIGS[case]
    edit(hf / "config.json", change)
    refused(hf, kind, str(hf), *texts)


def test_no_config(hf: Path) -> None:
    (hf / "config.json").unlink()
    refused(hf, ModelFileError, str(hf), "no config.json")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("damage", ["cut", "list", "bytes", "double"])
def test_damaged_json(hf: Path, name: str, damage: str) -> None:
    raw = (hf / name).read_bytes()
    double = b'{"architectures": [], ' + raw.lstrip()[1:] if name == "config.json" else b'{"a": 1, "a": 2}'
    damaged = {"cut": raw[: len(raw) // 2], "list": b"[]", "bytes": b"\xff\xfe" + raw, "double": double}[damage]
    (hf / name).write_bytes(damaged)
    refused(hf, ModelFileError, str(hf / name), "there twice" if damage == "double" else "JSON")


TENSORS: dict[str, tuple[Callable[[dict[str, Stored]], object], type[Exception], tuple[str, ...]]] = {
    "missing": (lambda t: t.pop(NORM), ModelFileError, (f"'{NORM}' is missing", "'blk.1.attn_norm.weight'", "[64]")),
    "no text": (lambda t: t.pop(EMBD), ModelFileError, ("no text model",)),
    "shape": (
        lambda t: t.update({DOWN: ("F32", np.zeros((96, 64), np.float32))}),
        ModelFileError,
        (f"'{DOWN}'", "[96, 64]", "[64, 96]"),
    ),
    "extra": (
        lambda t: t.update({"model.layers.0.extra.weight": ("F32", np.zeros(3, np.float32))}),
        UnsupportedModel,
        ("tensors of no known use: model.layers.0.extra.weight",),
    ),
    "fp8": (
        lambda t: t.update({DOWN: ("F8_E4M3", np.zeros((64, 96), np.uint8))}),
        UnsupportedModel,
        (f"'{DOWN}' is F8_E4M3", "F32, F16, BF16"),
    ),
    "integers": (
        lambda t: t.update({NORM: ("I64", np.zeros(64, np.int64))}), UnsupportedModel, (f"'{NORM}' is I64",)
    ),
    "nan": (
        lambda t: t.update({DOWN: ("F32", np.full((64, 96), np.nan, np.float32))}),
        ModelFileError,
        (f"'{DOWN}' holds numbers that are not finite",),
    ),
    "infinite decay": (
        lambda t: t.update({A_LOG: ("F32", np.full(4, 100, np.float32))}),
        ModelFileError,
        (f"'{A_LOG}' makes 'blk.0.ssm_a' infinite",),
    ),
    "bf16 nan": (
        lambda t: t.update({DOWN: ("BF16", np.full((64, 96), 0xFFC0, np.uint16))}),
        ModelFileError,
        (f"'{DOWN}' holds numbers that are not finite",),
    ),
    "two mtp blocks": (
        lambda t: t.update({f"mtp.layers.{i}.x": ("F32", np.zeros(1, np.float32)) for i in range(2)}),
        UnsupportedModel,
        ("2 MTP blocks", "--no-mtp"),
    ),
    "part of an mtp block": (
        lambda t: t.update({"mtp.layers.0.input_layernorm.weight": ("F32", np.zeros(64, np.float32))}),
        ModelFileError,
        ("'mtp.layers.0.self_attn.q_proj.weight' is missing",),
    ),
    "tower without numbers": (
        lambda t: t.update({"model.visual.x": ("F32", np.zeros(64, np.float32))}),
        ModelFileError,
        ("'vision_config' is missing",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors(hf: Path, tiny_dense: Path, case: str) -> None:
    change, kind, texts = TENSORS[case]
    tensors = tensors_of(tiny_dense)
    change(tensors)
    write_safetensors(hf / "model.safetensors", tensors)
    options = {"mmproj": hf.parent / "out" / "mmproj.gguf"} if "tower" in case else {}
    refused(hf, kind, str(hf), *texts, **options)


def test_numbers_beyond_f16(hf: Path, tiny_dense: Path) -> None:
    tensors = tensors_of(tiny_dense)
    tensors[DOWN][1][5, 5] = 7e4
    write_safetensors(hf / "model.safetensors", tensors)
    refused(hf, ModelFileError, f"'{DOWN}' holds 70000, which is beyond F16; use --outtype bf16 or f32", outtype="f16")
    assert convert(hf, hf.parent / "o.gguf", outtype="bf16")


@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
def test_truncated_weights(hf: Path, keep: int) -> None:
    path = hf / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(hf, ModelFileError, str(path), "no whole, valid safetensors file", "download it again")


def test_weights_with_a_damaged_header(hf: Path) -> None:
    path = hf / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[200:220] = b"\x00" * 20
    path.write_bytes(raw)
    refused(hf, ModelFileError, str(path), "no whole, valid safetensors file")


def test_weights_cut_while_they_are_read(hf: Path) -> None:
    path = hf / "model.safetensors"
    size = path.stat().st_size

    def cut(stage: str, done: int, total: int) -> None:
        with path.open("r+b") as file:
            file.truncate(size // 2)

    refused(hf, ModelFileError, str(path), "ends inside tensor", progress=cut)


def test_no_weights(hf: Path) -> None:
    (hf / "model.safetensors").unlink()
    refused(hf, ModelFileError, str(hf), "neither model.safetensors nor model.safetensors.index.json")
    (hf / "pytorch_model.bin").touch()
    with pytest.raises(ModelFileError, match="PyTorch files are not read; save the checkpoint as safetensors"):
        convert(hf, hf.parent / "o.gguf")


def test_shards(hf: Path, tiny_dense: Path) -> None:
    (hf / "model.safetensors").unlink()
    write_shards(hf, tensors_of(tiny_dense), 3)
    second = hf / "model-00002-of-00003.safetensors"
    kept = second.read_bytes()
    second.unlink()
    refused(hf, ModelFileError, str(second), "no such file", "one of 3")
    out = hf.parent / "o.gguf"
    names = list(tensors_of(tiny_dense))
    second.write_bytes(kept)
    edit(hf / "model.safetensors.index.json", lambda i: i["weight_map"].update({names[0]: second.name}))
    with pytest.raises(ModelFileError, match=f"{second.name}: tensor '{names[0]}' is missing"):
        convert(hf, out)
    tensors = tensors_of(tiny_dense)
    write_safetensors(second, {n: tensors[n] for n in names[1::3] + names[:1]})
    with pytest.raises(ModelFileError, match=f"tensor '{names[0]}' is also in model-00001-of-00003"):
        convert(hf, out)
    edit(hf / "model.safetensors.index.json", lambda i: i["weight_map"].update({names[0]: "../elsewhere"}))
    with pytest.raises(ModelFileError, match="elsewhere: no such file"):
        convert(hf, out)
    assert not out.exists()


TOKENIZERS: dict[str, tuple[Callable[[dict[str, Any]], object], type[Exception], tuple[str, ...]]] = {
    "pattern": (
        lambda t: t["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\w+"),
        UnsupportedModel,
        ("pre-tokenizer", r"\\w+", "qwen35 or qwen2"),
    ),
    "no pattern": (lambda t: t.pop("pre_tokenizer"), UnsupportedModel, ("pre-tokenizer cuts text by None",)),
    "unigram": (lambda t: t["model"].update(type="Unigram"), UnsupportedModel, ("'model.type' is 'Unigram'",)),
    "normaliser": (lambda t: t.update(normalizer={"type": "NFKC"}), UnsupportedModel, ("NFC is needed",)),
    "merge": (lambda t: t["model"]["merges"].append("a b c"), ModelFileError, ("'a b c' is not of the form",)),
    "no merges": (lambda t: t["model"].pop("merges"), ModelFileError, ("'model.merges' is not a list",)),
    "no vocabulary": (lambda t: t["model"].pop("vocab"), ModelFileError, ("'model.vocab' is not there",)),
    "id": (lambda t: t["model"]["vocab"].update(zzz=-1), ModelFileError, ("'zzz' has the id -1",)),
    "clash": (lambda t: t["model"]["vocab"].update(zzz=5), ModelFileError, ("id 5 is that of",)),
    "added": (lambda t: t["added_tokens"].append({"id": "x"}), ModelFileError, ("'added_tokens' holds",)),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizer(hf: Path, case: str) -> None:
    change, kind, texts = TOKENIZERS[case]
    edit(hf / "tokenizer.json", change)
    refused(hf, kind, str(hf / "tokenizer.json"), *texts)


def test_no_tokenizer_and_unknown_special_tokens(hf: Path) -> None:
    edit(hf / "tokenizer_config.json", lambda c: c.update(eos_token="<|nothing|>"))
    refused(hf, ModelFileError, "'eos_token' is '<|nothing|>', which is no token")
    (hf / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"no tokenizer: neither tokenizer\.json nor vocab\.json with"):
        convert(hf, hf.parent / "o.gguf")


def test_arguments(hf: Path) -> None:
    refused(hf, ConfigError, "output type is 'q4_k'", outtype="q4_k")
    out = hf.parent / "o.gguf"
    with pytest.raises(ConfigError, match="two files"):
        convert(hf, out, mmproj=out)
    with pytest.raises(ConfigError, match="no vision tower; leave --mmproj out"):
        convert(hf, out, mmproj=hf.parent / "mm.gguf")
    with pytest.raises(ConfigError, match="also an input"):
        convert(hf, hf / "model.safetensors")


def test_without_the_library(hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    refused(hf, ConfigError, "pip install 'qwen35rt[convert]'")


def test_command_line(hf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = hf.parent / "o.gguf"
    assert main(["convert", str(hf), "-o", str(out), "--outtype", "q8_0", "--split-max-size", "1M", "--no-mtp"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert str(out) in said.err
    (hf / "config.json").unlink()
    assert main(["convert", str(hf), "-o", str(out)]) == 1
    assert capsys.readouterr().err == f"qwen35rt: error: {hf}: no config.json; name the folder of a whole checkpoint\n"
    for wrong in (["--split-max-size", "4"], ["--split-max-size", "0G"], ["--outtype", "q4_k"], []):
        assert main(["convert", str(hf), *(wrong and ["-o", "x"]), *wrong]) == 2
    assert "'0' is not a whole number from 1" in capsys.readouterr().err
