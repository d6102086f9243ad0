"""Checkpoints saved by transformers itself: converted, they compute what transformers computes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import qwen35rt
from qwen35rt.convert.hf import convert
from qwen35rt.model.gguf_file import open_gguf
from tests.tiny_vocab import CHATML, MERGES, tiny_vocab

from .checkpoints import VISION_NAMES, values_of

torch = pytest.importorskip("torch", reason="the extra 'train' is not installed")
transformers = pytest.importorskip("transformers", reason="the extra 'train' is not installed")
pytest.importorskip("safetensors", reason="the extra 'convert' is not installed")

Array = npt.NDArray[Any]
TEXT = "Hello, wörld! 12 apples\n  and <think>more</think> cafe\u0301"
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": ROPE,
}
DENSE = {**SIZES, "intermediate_size": 96}
MOE = {
    **SIZES,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}


def filled(model: Any, seed: int) -> Any:
    """Random weights that spread the logits; every number exact in BF16."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            shape = tuple(p.shape)
            std = 0.3 if p.ndim == 1 or "conv1d" in name else 1 / np.sqrt(shape[-1])
            x = torch.from_numpy((std * rng.standard_normal(shape)).astype(np.float32))
            p.copy_(x.to(torch.bfloat16).float())
    return model.float().eval()


def tokenizer() -> Any:
    """The tiny vocabulary as transformers' own tokenizer of the family."""
    vocab = tiny_vocab(320)
    plain = {t: i for i, (t, k) in enumerate(zip(vocab.tokens, vocab.types, strict=True)) if k == 1}
    made = transformers.Qwen3_5Tokenizer(
        vocab=plain,
        merges=[tuple(m.split(" ")) for m in MERGES],
        unk_token=None,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
    )
    for token, kind in zip(vocab.tokens, vocab.types, strict=True):
        if kind in (3, 4):
            made.add_tokens([transformers.AddedToken(token, special=kind == 3, normalized=False)])
    return made


def hf_logits(model: Any, ids: list[int]) -> Array:
    """float32 [tokens, vocabulary]."""
    with torch.no_grad():
        logits: Array = model(input_ids=torch.tensor([ids])).logits[0].float().numpy()
    return logits


@pytest.fixture(scope="module", params=["dense", "moe", "tied"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A converted checkpoint, its model and its tokenizer."""
    folder = tmp_path_factory.mktemp("hf") / request.param
    if request.param == "moe":
        config = transformers.Qwen3_5MoeTextConfig(**MOE)
        model = transformers.Qwen3_5MoeForCausalLM(config)
    else:
        config = transformers.Qwen3_5TextConfig(**DENSE, tie_word_embeddings=request.param == "tied")
        model = transformers.Qwen3_5ForCausalLM(config)
    config._attn_implementation = "eager"
    filled(model, len(request.param)).save_pretrained(folder)
    tok = tokenizer()
    tok.save_pretrained(folder)
    out = folder.with_suffix(".gguf")
    convert(folder, out, outtype="f32")
    return out, model, tok


def test_tokens_and_logits_equal_those_of_transformers(saved: tuple[Path, Any, Any]) -> None:
    out, model, tok = saved
    with qwen35rt.load(out, device="cpu", kv_dtype="f32") as m:
        ids = m.tokenize(TEXT, special=True)
        assert ids == tok(TEXT)["input_ids"]
        assert len(ids) > 16
        want = hf_logits(model, ids)
        assert want.std() > 0.3
        assert np.abs(m.logits(ids) - want).max() < 1e-3
        assert m.has_chat_template
        assert m.metadata["tokenizer.ggml.eos_token_id"] == tok.eos_token_id


_PEER = """
import http.client, json, socket, sys
import xllamacpp
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx, params.n_parallel, params.port, params.warmup = 256, 1, port, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
body = {"prompt": json.loads(sys.argv[2]), "n_predict": 1, "n_probs": 10, "temperature": 0, "cache_prompt": False}
connection.request("POST", "/completion", json.dumps(body))
print("ANSWER " + connection.getresponse().read().decode(), flush=True)
import os
os._exit(0)
"""


def test_llama_cpp_reads_the_same_file(saved: tuple[Path, Any, Any]) -> None:
    """Its ten likeliest next tokens have the log-probabilities that transformers gives them."""
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    out, model, tok = saved
    ids = tok("Hello, apples and more")["input_ids"]
    run = subprocess.run(
        [sys.executable, "-c", _PEER, str(out), json.dumps(ids)], capture_output=True, text=True, timeout=120
    )
    line = next((x for x in run.stdout.splitlines() if x.startswith("ANSWER ")), None)
    assert line is not None, run.stderr[-2000:]
    top = json.loads(line.removeprefix("ANSWER "))["completion_probabilities"][0]["top_logprobs"]
    logits = hf_logits(model, ids)[-1].astype(np.float64)
    want = logits - np.log(np.exp(logits).sum())
    assert len(top) == 10
    assert {t["id"] for t in top} == set(np.argsort(-want)[:10].tolist())
    assert max(abs(t["logprob"] - want[t["id"]]) for t in top) < 2e-3


def test_vision_tower_goes_to_a_file_of_its_own(tmp_path: Path) -> None:
    vision = {
        "depth": 2,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_heads": 4,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
    }
    config = transformers.Qwen3_5Config(text_config=DENSE, vision_config=vision)
    model = filled(transformers.Qwen3_5ForConditionalGeneration(config), 3)
    model.save_pretrained(tmp_path / "hf")
    tokenizer().save_pretrained(tmp_path / "hf")
    text, tower = tmp_path / "out.gguf", tmp_path / "mmproj-out.gguf"
    assert convert(tmp_path / "hf", text, outtype="f16", mmproj=tower) == [text, tower]
    sd = {k.removeprefix("model.visual."): v.numpy() for k, v in model.state_dict().items()}
    with open_gguf(tower) as f:
        got = values_of(f)
        assert {t.format.name for n, t in f.tensors.items() if n.endswith("bias") or "position" in n} == {"F32"}
        assert f.tensors["v.blk.0.ffn_down.weight"].format.name == "F16"
        assert f.metadata["clip.vision.image_size"] == 128
        assert f.metadata["clip.vision.projection_dim"] == 64
    want = {
        "v.patch_embd.weight": sd["patch_embed.proj.weight"][:, :, 0],
        "v.patch_embd.weight.1": sd["patch_embed.proj.weight"][:, :, 1],
        "v.patch_embd.bias": sd["patch_embed.proj.bias"],
        "v.position_embd.weight": sd["pos_embed.weight"],
    }
    names = {"v.post_ln": "merger.norm", "mm.0": "merger.linear_fc1", "mm.2": "merger.linear_fc2"}
    for i in range(2):
        names |= {f"v.blk.{i}.{ours}": f"blocks.{i}.{theirs}" for ours, theirs in VISION_NAMES.items()}
    for ours, theirs in names.items():
        for part in ("weight", "bias"):
            want[f"{ours}.{part}"] = sd[f"{theirs}.{part}"]
    assert set(got) == set(want)
    for name, x in want.items():
        half = x.astype(np.float16).astype(np.float32) if x.ndim > 1 and "position" not in name else x
        np.testing.assert_array_equal(got[name].reshape(x.shape), half, err_msg=name)
    with qwen35rt.load(text, device="cpu", kv_dtype="f32") as m:
        ids = m.tokenize("Hello, apples")
        assert np.abs(m.logits(ids) - hf_logits(model, ids)).max() < 1e-2
