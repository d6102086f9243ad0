"""Checkpoints made back from the oracle's files are converted to the same files, and compute the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize

from qwen35rt.backends.cpu.backend import CpuBackend
from qwen35rt.convert.hf import convert
from qwen35rt.model.gguf_file import open_gguf
from qwen35rt.model.graph import build_program
from qwen35rt.model.hparams import read_hparams
from qwen35rt.model.weights import load_weights
from tests.oracle import MODELS, compiled, golden, needs_oracle, prompt_logits

from .checkpoints import hf_tensors, stored, values_of, vision_tensors, write_checkpoint, write_json, write_shards

pytest.importorskip("safetensors", reason="the extra 'convert' is not installed")
pytestmark = needs_oracle

# Known differences: names are free, newer converters add two keys.
OURS = {"general.size_label", "qwen35.attention.recurrent_layers", "qwen35moe.attention.recurrent_layers"}
FILES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "nano.f32": ("f32", "F32", {}),
    "nano.f16": ("f16", "F16", {"nested": True, "prefix": "model.language_model.", "shards": 3}),
    "nano.bf16": ("bf16", "F32", {"pairs": False}),
    "moe.bf16": ("bf16", "BF16", {}),
    "mtp.bf16": ("bf16", "BF16", {"nested": True, "prefix": "model.language_model.", "shards": 2}),
}


def typed_keys(path: Path) -> dict[str, Any]:
    """Keys with their stored types and values."""
    fields = GGUFReader(path).fields.values()
    return {f.name: ([t.name for t in f.types], f.contents()) for f in fields if not f.name.startswith("GGUF.")}


@pytest.mark.parametrize("name", FILES)
def test_tensors_and_keys_equal_the_oracle_file(name: str, tmp_path: Path) -> None:
    outtype, dtype, form = FILES[name]
    want = MODELS / f"{name}.gguf"
    folder = write_checkpoint(tmp_path / "Tiny-1B", want, dtype=dtype, **form)
    assert convert(folder, tmp_path / "out.gguf", outtype=outtype) == [tmp_path / "out.gguf"]
    with open_gguf(want) as a, open_gguf(tmp_path / "out.gguf") as b:
        assert set(a.tensors) == set(b.tensors)
        for tensor, x in a.tensors.items():
            y = b.tensors[tensor]
            assert (x.format, [n for n in x.shape if n > 1]) == (y.format, [n for n in y.shape if n > 1]), tensor
            if tensor.endswith("ssm_a"):  # through a logarithm and back
                np.testing.assert_allclose(x.data.view("<f4"), y.data.view("<f4"), rtol=3e-7)
            else:
                assert bytes(x.data) == bytes(y.data), tensor
    theirs, ours = typed_keys(want), typed_keys(tmp_path / "out.gguf")
    assert ours.pop("general.name") == (["STRING"], "Tiny-1B")
    theirs.pop("general.name")
    assert {k: v for k, v in ours.items() if k in theirs} == theirs
    assert set(ours) - set(theirs) <= OURS


@pytest.mark.parametrize(
    ("name", "fused"), [("moe.bf16", False), ("moemtp.q8_0", True), ("moemtp.q8_0", False), ("wide.q4_k_m", True)]
)
def test_quantised_files_and_separate_experts_keep_their_numbers(name: str, fused: bool, tmp_path: Path) -> None:
    """wide has 3 value heads per key head, where a permutation and its inverse differ."""
    folder = write_checkpoint(tmp_path / "hf", MODELS / f"{name}.gguf", dtype="F32", fused=fused)
    convert(folder, tmp_path / "out.gguf", outtype="f32")
    with open_gguf(MODELS / f"{name}.gguf") as a, open_gguf(tmp_path / "out.gguf") as b:
        want, got = values_of(a), values_of(b)
    assert set(want) == set(got)
    for tensor, x in want.items():
        np.testing.assert_allclose(got[tensor].reshape(x.shape), x, rtol=3e-7, atol=0, err_msg=tensor)


@pytest.mark.parametrize(("name", "variant"), [("nano", "f32"), ("moe", "bf16")])
def test_logits_of_the_converted_file(name: str, variant: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "hf", MODELS / f"{name}.{variant}.gguf", dtype="F32")
    convert(folder, tmp_path / "out.gguf", outtype="f32")
    f = open_gguf(tmp_path / "out.gguf")
    hp = read_hparams(f)
    exe = compiled(CpuBackend(), build_program(hp, load_weights(f, hp)))
    for prompt in ("p9", "text", "p65"):
        assert np.abs(prompt_logits(exe, name, prompt) - golden(name)[f"hf.{variant}.{prompt}"]).max() < 1e-3, prompt
    exe.close()


def test_without_the_mtp_block(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "hf", MODELS / "mtp.bf16.gguf")
    convert(folder, tmp_path / "out.gguf", mtp=False)
    with open_gguf(tmp_path / "out.gguf") as f:
        hp = read_hparams(f)
        assert (hp.n_layer, hp.n_mtp) == (4, 0)
        assert not any(".nextn." in n or n.startswith("blk.4.") for n in f.tensors)
        assert "qwen35.nextn_predict_layers" not in f.metadata


def test_q8_0(tmp_path: Path) -> None:
    """Rows that blocks of 32 divide have no more squared error than ggml's Q8_0; taps and norms stay F32."""
    folder = write_checkpoint(tmp_path / "hf", MODELS / "moe.bf16.gguf")
    convert(folder, tmp_path / "out.gguf", outtype="q8_0")
    with open_gguf(MODELS / "moe.bf16.gguf") as a, open_gguf(tmp_path / "out.gguf") as b:
        assert b.metadata["general.file_type"] == 7
        want, got = values_of(a), values_of(b)
        for name, t in b.tensors.items():
            expected = a.tensors[name].format.name.replace("BF16", "Q8_0")
            assert t.format.name == expected, name
            if expected == "Q8_0":
                x = want[name].astype(np.float32)
                theirs = dequantize(quantize(x, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
                assert np.square(got[name] - x).sum() <= np.square(theirs - x).sum(), name


def test_vision_tower_equals_the_oracle_file(tmp_path: Path) -> None:
    """All tensors and keys that llama.cpp's converter wrote; only the name is ours."""
    want = MODELS.parent / "vision" / "mmproj.f16.gguf"
    folder = write_checkpoint(tmp_path / "hf", MODELS / "nano.f32.gguf", nested=True, prefix="model.language_model.")
    with open_gguf(want) as f, open_gguf(MODELS / "nano.f32.gguf") as text:
        tensors = hf_tensors(text, prefix="model.language_model.") | vision_tensors(f)
    write_shards(folder, {n: stored(x, "F32") for n, x in tensors.items()}, 2)
    config = json.loads((folder / "config.json").read_text())
    sizes = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64}
    config["vision_config"] = sizes | {"num_position_embeddings": 64, "patch_size": 16, "spatial_merge_size": 2}
    write_json(folder / "config.json", config)
    convert(folder, tmp_path / "out.gguf", mmproj=tmp_path / "mmproj.gguf")
    with open_gguf(want) as a, open_gguf(tmp_path / "mmproj.gguf") as b:
        assert set(a.tensors) == set(b.tensors)
        for name, x in a.tensors.items():
            y = b.tensors[name]
            assert (x.shape, x.format, bytes(x.data)) == (y.shape, y.format, bytes(y.data)), name
    theirs, ours = typed_keys(want), typed_keys(tmp_path / "mmproj.gguf")
    assert ours.pop("general.name") == (["STRING"], "hf")
    assert ours == theirs
