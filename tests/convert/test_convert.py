"""What checkpoints may look like, and what a conversion costs: memory, an interrupt, the pieces that it works in."""

from __future__ import annotations

import json
import logging
import math
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qwen35rt
from qwen35rt.config import CONVERT
from qwen35rt.convert import recipe
from qwen35rt.convert.encode import encode, to_bf16, to_float32
from qwen35rt.convert.hf import convert, model_name
from qwen35rt.convert.text_map import grouped_to_tiled
from qwen35rt.formats import BY_NAME
from qwen35rt.model.gguf_file import open_gguf
from qwen35rt.model.hparams import read_hparams
from tests.fixtures import write_tiny

from .checkpoints import REGEX, write_checkpoint, write_json, write_safetensors

pytest.importorskip("safetensors", reason="the extra 'convert' is not installed")


@pytest.fixture
def hf(tmp_path: Path, tiny_dense: Path) -> Path:
    """A checkpoint folder that a test may change."""
    return write_checkpoint(tmp_path / "hf", tiny_dense)


def keys(folder: Path, **options: Any) -> dict[str, Any]:
    """Metadata of the converted file."""
    (path,) = convert(folder, folder.parent / "keys.gguf", **options)
    with open_gguf(path) as f:
        return dict(f.metadata)


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("outtype", ["f16", "q8_0"])
def test_pieces_and_parts_do_not_change_the_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, outtype: str
) -> None:
    """Pieces of three rows, which cross heads and experts, and parts of 20 KB."""
    folder = write_checkpoint(tmp_path / "hf", write_tiny(tmp_path / "t.gguf", kind, mtp=True), fused=outtype == "f16")
    (whole,) = convert(folder, tmp_path / "whole.gguf", outtype=outtype)
    monkeypatch.setattr(recipe, "CONVERT", replace(CONVERT, piece_bytes=3 * 64 * 4))
    seen: list[tuple[str, int, int]] = []
    parts = convert(
        folder,
        tmp_path / "parts.gguf",
        outtype=outtype,
        split_max_bytes=20_000,
        progress=lambda *step: seen.append(step),
    )
    assert len(parts) > 5
    with open_gguf(whole) as a, open_gguf(parts[2]) as b:
        assert list(a.tensors) == list(b.tensors)
        for name, t in a.tensors.items():
            assert bytes(t.data) == bytes(b.tensors[name].data), name
        total = sum(t.nbytes for t in a.tensors.values())
    assert len(seen) > len(a.tensors)
    assert seen[-1][0] == "converting"
    assert total <= seen[-1][2] < total + 32 * 100
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] == total


def sparse_checkpoint(folder: Path, tiny: Path, n_ff: int) -> int:
    """A checkpoint whose FFN is ``n_ff`` wide, full of holes that read as zeros; -> its bytes."""
    write_checkpoint(folder, tiny)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"intermediate_size": n_ff})
    path = folder / "model.safetensors"
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    at = 0
    for name, entry in header.items():
        if name != "__metadata__":
            shape = [n_ff if n == 96 and ".mlp." in name else n for n in entry["shape"]]
            size = math.prod(shape) * {"F32": 4, "BF16": 2}[entry["dtype"]]
            entry |= {"shape": shape, "data_offsets": [at, at + size]}
            at += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return at


def test_memory_does_not_grow_with_the_model(tmp_path: Path, tiny_dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """50 MB in 12 matrices of 4 MB, 8 MB as float32, go through pieces of 1 MB."""
    size = sparse_checkpoint(tmp_path / "hf", tiny_dense, 1 << 15)
    monkeypatch.setattr(recipe, "CONVERT", replace(CONVERT, piece_bytes=1 << 20))
    tracemalloc.start()
    try:
        convert(tmp_path / "hf", tmp_path / "out.gguf", outtype="f16")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size > 50e6
    assert 1 << 20 < peak < 6 << 20


def test_an_interrupt_leaves_nothing(tmp_path: Path, tiny_dense: Path) -> None:
    sparse_checkpoint(tmp_path / "hf", tiny_dense, 1 << 16)
    out = tmp_path / "out"
    out.mkdir()
    (out / "o.gguf").write_bytes(b"before")
    command = [sys.executable, "-m", "qwen35rt", "convert", str(tmp_path / "hf"), "-o", str(out / "o.gguf")]
    run = subprocess.Popen([*command, "--outtype", "q8_0"], stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while time.monotonic() < end and not any(p.stat().st_size > 1e6 for p in out.glob(".*.partial")):
        assert run.poll() is None, run.stderr and run.stderr.read()
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "Traceback" not in said
    assert [p.name for p in out.iterdir()] == ["o.gguf"]
    assert (out / "o.gguf").read_bytes() == b"before"


def test_bf16_rounds_to_nearest_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000, 0x00000001, 0x80000000], np.uint32)
    assert [hex(x) for x in to_bf16(bits.view(np.float32))] == [
        "0x3f80", "0x3f82", "0x3f81", "0x3f80", "0xbf82", "0x0", "0x8000",
    ]  # fmt: skip
    every = np.arange(1 << 16, dtype=np.uint16)
    every = every[every & 0x7F80 != 0x7F80]
    assert np.array_equal(to_bf16(to_float32(every)), every)


def test_f16_holds_subnormals_and_refuses_too_large_numbers() -> None:
    form = BY_NAME["F16"]
    assert encode(np.array([[6e-8, 65504.0, -65519.0]], np.float32), form).view(np.uint16).tolist() == [
        [1, 0x7BFF, 0xFBFF]
    ]
    with pytest.raises(OverflowError, match="65520"):
        encode(np.array([[65520.0]], np.float32), form)


def test_head_order() -> None:
    """Two key heads with three value heads each: 0 3, 1 4, 2 5."""
    assert grouped_to_tiled(2, 6, 1).tolist() == [0, 3, 1, 4, 2, 5]
    assert grouped_to_tiled(2, 4, 2).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_rows_that_blocks_do_not_divide_become_f16(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "hf", write_tiny(tmp_path / "t.gguf", n_ff=80))
    (path,) = convert(folder, tmp_path / "o.gguf", outtype="q8_0")
    with open_gguf(path) as f:
        assert f.tensors["blk.0.ffn_down.weight"].format.name == "F16"
        assert f.tensors["blk.0.ffn_up.weight"].format.name == "Q8_0"


def test_an_architecture_without_list_of_layers_or_sections(hf: Path) -> None:
    config = json.loads((hf / "config.json").read_text())
    for name in ("layer_types", "rope_parameters"):
        config.pop(name)
    config |= {"full_attention_interval": 4, "rope_theta": 1e7, "rope_scaling": None, "partial_rotary_factor": 0.25}
    write_json(hf / "config.json", config)
    convert(hf, hf.parent / "o.gguf")
    with open_gguf(hf.parent / "o.gguf") as f:
        hp = read_hparams(f)
    assert hp.full_attention == (False, False, False, True)
    assert (hp.rope_dim, hp.rope_sections) == (8, (2, 1, 1, 0))


def test_sampling_of_generation_config(hf: Path) -> None:
    """Temperature, top-k and top-p reach the file with llama.cpp's names and types; an answer uses them (C10)."""
    write_json(hf / "generation_config.json", {"temperature": 1, "top_k": 20, "top_p": 0.95, "do_sample": True})
    found = {k: v for k, v in keys(hf).items() if ".sampling." in k}
    assert found == {
        "general.sampling.temp": 1.0,
        "general.sampling.top_k": 20,
        "general.sampling.top_p": float(np.float32(0.95)),
    }
    assert type(found["general.sampling.temp"]) is float


def test_special_ids_by_the_configs(hf: Path) -> None:
    """The tokenizer's own names first, then generation_config, then config.json."""
    settings = json.loads((hf / "tokenizer_config.json").read_text())
    named = keys(hf)
    write_json(hf / "tokenizer_config.json", settings | {"eos_token": None, "pad_token": None})
    write_json(hf / "generation_config.json", {"eos_token_id": [5, 6], "bos_token_id": 7})
    found = keys(hf)
    assert found["tokenizer.ggml.eos_token_id"] == 5
    assert found["tokenizer.ggml.bos_token_id"] == 7
    assert "tokenizer.ggml.padding_token_id" not in found
    assert named["tokenizer.ggml.eos_token_id"] == named["tokenizer.ggml.tokens"].index("<|im_end|>")


def test_token_types(hf: Path) -> None:
    """By the flag, but control tokens may lack it and the six markers of thoughts and tools may have it (B45)."""
    tokenizer = json.loads((hf / "tokenizer.json").read_text())
    for entry in tokenizer["added_tokens"]:
        entry["special"] = entry["content"] in ("<think>", "<tts_pad>")
    write_json(hf / "tokenizer.json", tokenizer)
    found = keys(hf)
    types = dict(zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"], strict=True))
    assert [types[t] for t in ("<think>", "</think>", "<tts_pad>", "<tts_text_bos>", "<|im_end|>", "a")] == [
        4,
        4,
        3,
        4,
        3,
        1,
    ]


def test_older_tokenizer_files(hf: Path) -> None:
    """vocab.json, merges.txt and the added tokens of tokenizer_config.json give the same keys."""
    want = keys(hf)
    tokenizer = json.loads((hf / "tokenizer.json").read_text())
    settings = json.loads((hf / "tokenizer_config.json").read_text())
    (hf / "tokenizer.json").unlink()
    write_json(hf / "vocab.json", tokenizer["model"]["vocab"])
    merges = "".join(f"{a} {b}\n" for a, b in tokenizer["model"]["merges"])
    (hf / "merges.txt").write_text("#version: 0.2\n" + merges, encoding="utf-8")
    settings["added_tokens_decoder"] = {str(t.pop("id")): t for t in tokenizer["added_tokens"]}
    for extra, pre in (
        ({"tokenizer_class": "Qwen2Tokenizer"}, "qwen2"),
        ({"tokenizer_class": "Qwen3_5Tokenizer"}, "qwen35"),
        ({"tokenizer_class": "Qwen2Tokenizer", "pretokenize_regex": REGEX}, "qwen35"),
    ):
        write_json(hf / "tokenizer_config.json", settings | extra)
        assert keys(hf) == want | {"tokenizer.ggml.pre": pre}


def test_chat_templates(hf: Path) -> None:
    """A file of its own comes first, then the JSON file, then the tokenizer's settings; of several the default."""
    settings = json.loads((hf / "tokenizer_config.json").read_text())
    several = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    write_json(hf / "tokenizer_config.json", settings | {"chat_template": several})
    assert keys(hf)["tokenizer.chat_template"] == "D"
    write_json(hf / "chat_template.json", {"chat_template": "J"})
    assert keys(hf)["tokenizer.chat_template"] == "J"
    (hf / "chat_template.jinja").write_text("{# ü #}F")
    assert keys(hf)["tokenizer.chat_template"] == "{# ü #}F"


def test_name_of_the_model(tmp_path: Path, hf: Path) -> None:
    assert keys(hf)["general.name"] == "hf"
    snapshot = tmp_path / "models--Qwen--Qwen3.5-9B" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    assert model_name(snapshot) == "Qwen3.5-9B"


def test_a_tower_that_is_left_out_is_said(hf: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its shard is read, its tensors are not."""
    extra = {"model.visual.pos_embed.weight": ("F32", np.zeros((4, 4), np.float32))}
    write_safetensors(hf / "tower.safetensors", extra)
    with (hf / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        names = [n for n in json.loads(file.read(length)) if n != "__metadata__"]
    where = dict.fromkeys(names, "model.safetensors") | dict.fromkeys(extra, "tower.safetensors")
    write_json(hf / "model.safetensors.index.json", {"weight_map": where})
    with caplog.at_level(logging.WARNING):
        convert(hf, hf.parent / "o.gguf")
    assert "the vision tower is left out; --mmproj PATH" in caplog.text


def test_the_converted_model_answers(hf: Path) -> None:
    (path,) = convert(hf, hf.parent / "o.gguf")
    with qwen35rt.load(path, device="cpu") as m:
        assert m.chat([{"role": "user", "content": "hello"}], max_tokens=4, seed=1).usage.completion_tokens <= 4
