"""Hugging Face checkpoint folders for tests: made back from a GGUF file, tensor by tensor, without transformers."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quants

from qwen35rt.model.gguf_file import GgufFile, open_gguf
from qwen35rt.model.hparams import HParams, read_hparams

Float = npt.NDArray[np.float32]
Stored = tuple[str, npt.NDArray[Any]]  # safetensors' name of a type, numbers as they are stored

REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def stored(values: Float, dtype: str) -> Stored:
    """Numbers in a type that holds them exactly."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        assert not (bits & 0xFFFF).any()
        return dtype, (bits >> 16).astype(np.uint16)
    return dtype, values.astype({"F32": np.float32, "F16": np.float16}[dtype])


def write_safetensors(path: Path, tensors: Mapping[str, Stored]) -> Path:
    """Write a safetensors file from its definition: the library's NumPy side has no BF16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, values in tensors.values():
            file.write(np.ascontiguousarray(values).tobytes())
    return path


def values_of(f: GgufFile) -> dict[str, Float]:
    """All tensors of a file as float32, in numpy's order of dimensions."""
    return {
        name: quants.dequantize(t.data.reshape(-1, t.format.row_bytes(t.shape[0])), GGMLQuantizationType(t.format.id))
        .astype(np.float32)
        .reshape(t.shape[::-1])
        for name, t in f.tensors.items()
    }


def hf_tensors(f: GgufFile, *, prefix: str = "model.", fused: bool = True) -> dict[str, Float]:
    """The checkpoint's tensors; ``fused``: experts in two tensors, else each in three of its own."""
    hp, t = read_hparams(f), values_of(f)
    out: dict[str, Float] = {
        prefix + "embed_tokens.weight": t["token_embd.weight"],
        prefix + "norm.weight": t["output_norm.weight"] - 1,
    }
    if not hp.tied:
        out["lm_head.weight"] = t["output.weight"]
    for i, full in enumerate([*hp.full_attention, *[True] * hp.n_mtp]):
        p = f"{prefix}layers.{i}." if i < hp.n_layer else f"mtp.layers.{i - hp.n_layer}."
        out |= _layer(hp, t, f"blk.{i}.", p, full, fused)
    if hp.n_mtp:
        b = f"blk.{hp.n_layer}.nextn."
        out["mtp.fc.weight"] = t[b + "eh_proj.weight"]
        for hf, ours in (
            ("pre_fc_norm_embedding", "enorm"),
            ("pre_fc_norm_hidden", "hnorm"),
            ("norm", "shared_head_norm"),
        ):
            out[f"mtp.{hf}.weight"] = t[f"{b}{ours}.weight"] - 1
    return out


def _layer(hp: HParams, t: Mapping[str, Float], b: str, p: str, full: bool, fused: bool) -> dict[str, Float]:
    out = {
        p + "input_layernorm.weight": t[b + "attn_norm.weight"] - 1,
        p + "post_attention_layernorm.weight": t[b + "post_attention_norm.weight"] - 1,
    }
    nk, nv, d = hp.ssm_k_heads, hp.ssm_v_heads, hp.ssm_state

    def grouped(x: Float, rows: int) -> Float:
        """Blocks of rows, one per value head: of each key head together, where the file has them in turn."""
        order = [j * nk + k for k in range(nk) for j in range(nv // nk)]
        return x.reshape(nv, rows, -1)[order].reshape(x.shape)

    if full:
        for hf, ours in (("q_proj", "attn_q"), ("k_proj", "attn_k"), ("v_proj", "attn_v"), ("o_proj", "attn_output")):
            out[f"{p}self_attn.{hf}.weight"] = t[f"{b}{ours}.weight"]
        for name in ("q_norm", "k_norm"):
            out[f"{p}self_attn.{name}.weight"] = t[f"{b}attn_{name}.weight"] - 1
    else:
        a, n = p + "linear_attn.", 2 * nk * d
        qkv, conv = t[b + "attn_qkv.weight"], t[b + "ssm_conv1d.weight"]
        out[a + "in_proj_qkv.weight"] = np.concatenate([qkv[:n], grouped(qkv[n:], d)])
        out[a + "conv1d.weight"] = np.concatenate([conv[:n], grouped(conv[n:], d)])[:, None]
        out[a + "in_proj_z.weight"] = grouped(t[b + "attn_gate.weight"], d)
        out[a + "in_proj_b.weight"] = grouped(t[b + "ssm_beta.weight"], 1)
        out[a + "in_proj_a.weight"] = grouped(t[b + "ssm_alpha.weight"], 1)
        out[a + "A_log"] = np.log(-grouped(t[b + "ssm_a"], 1))
        out[a + "dt_bias"] = grouped(t[b + "ssm_dt.bias"], 1)
        out[a + "norm.weight"] = t[b + "ssm_norm.weight"]
        out[a + "out_proj.weight"] = np.ascontiguousarray(grouped(np.ascontiguousarray(t[b + "ssm_out.weight"].T), d).T)
    m = p + "mlp."
    if not hp.moe:
        return out | {f"{m}{n}_proj.weight": t[f"{b}ffn_{n}.weight"] for n in ("gate", "up", "down")}
    gate, up, down = (t[f"{b}ffn_{n}_exps.weight"] for n in ("gate", "up", "down"))
    if fused:
        out[m + "experts.gate_up_proj"] = np.concatenate([gate, up], 1)
        out[m + "experts.down_proj"] = down
    else:
        for e in range(hp.n_expert):
            for kind, x in (("gate", gate), ("up", up), ("down", down)):
                out[f"{m}experts.{e}.{kind}_proj.weight"] = x[e]
    out[m + "gate.weight"] = t[b + "ffn_gate_inp.weight"]
    out[m + "shared_expert_gate.weight"] = t[b + "ffn_gate_inp_shexp.weight"].reshape(1, -1)
    return out | {f"{m}shared_expert.{n}_proj.weight": t[f"{b}ffn_{n}_shexp.weight"] for n in ("gate", "up", "down")}


def hf_config(hp: HParams) -> dict[str, Any]:
    """config.json of a text model."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3_5MoeForCausalLM" if hp.moe else "Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_moe_text" if hp.moe else "qwen3_5_text",
        "attention_bias": False,
        "hidden_act": "silu",
        "head_dim": hp.head_dim,
        "hidden_size": hp.n_embd,
        "layer_types": ["full_attention" if full else "linear_attention" for full in hp.full_attention],
        "linear_conv_kernel_dim": hp.conv_kernel,
        "linear_key_head_dim": hp.ssm_state,
        "linear_num_key_heads": hp.ssm_k_heads,
        "linear_num_value_heads": hp.ssm_v_heads,
        "linear_value_head_dim": hp.ssm_state,
        "max_position_embeddings": hp.n_ctx_train,
        "num_attention_heads": hp.n_head,
        "num_hidden_layers": hp.n_layer,
        "num_key_value_heads": hp.n_head_kv,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": list(hp.rope_sections[:3]),
            "partial_rotary_factor": hp.rope_dim / hp.head_dim,
            "rope_theta": hp.rope_theta,
            "rope_type": "default",
        },
        "tie_word_embeddings": hp.tied,
        "vocab_size": hp.n_vocab,
    }
    if hp.moe:
        return config | {
            "moe_intermediate_size": hp.n_ff_expert,
            "num_experts": hp.n_expert,
            "num_experts_per_tok": hp.n_expert_used,
            "shared_expert_intermediate_size": hp.n_ff_shared,
        }
    return config | {"intermediate_size": hp.n_ff}


def tokenizer_files(f: GgufFile, pairs: bool = True) -> dict[str, Any]:
    """tokenizer.json and tokenizer_config.json; ``pairs``: merges as lists of two, else as older files have them."""
    tokens, types = f.metadata["tokenizer.ggml.tokens"], f.metadata["tokenizer.ggml.token_type"]
    merges = f.metadata["tokenizer.ggml.merges"]
    added = [
        {"id": i, "content": t, "special": k == 3}
        for i, (t, k) in enumerate(zip(tokens, types, strict=True))
        if k in (3, 4)
    ]
    split = {"type": "Split", "pattern": {"Regex": REGEX}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "tokenizer.json": {
            "added_tokens": added,
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
            "model": {
                "type": "BPE",
                "vocab": {t: i for i, (t, k) in enumerate(zip(tokens, types, strict=True)) if k == 1},
                "merges": [m.split(" ") for m in merges] if pairs else list(merges),
            },
        },
        "tokenizer_config.json": {
            "bos_token": None,
            "eos_token": tokens[f.metadata["tokenizer.ggml.eos_token_id"]],
            "pad_token": {"content": tokens[f.metadata["tokenizer.ggml.padding_token_id"]]},
            "chat_template": f.metadata["tokenizer.chat_template"],
        },
    }


VISION_NAMES = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ffn_up": "mlp.linear_fc1",
    "ffn_down": "mlp.linear_fc2",
}


def vision_tensors(f: GgufFile, prefix: str = "model.visual.") -> dict[str, Float]:
    """The checkpoint's tensors of an mmproj file's tower."""
    t = values_of(f)
    names = {"v.post_ln": "merger.norm", "mm.0": "merger.linear_fc1", "mm.2": "merger.linear_fc2"}
    for i in range(f.metadata["clip.vision.block_count"]):
        names |= {f"v.blk.{i}.{ours}": f"blocks.{i}.{hf}" for ours, hf in VISION_NAMES.items()}
    out = {f"{prefix}{hf}.{part}": t[f"{ours}.{part}"] for ours, hf in names.items() for part in ("weight", "bias")}
    frames = [t["v.patch_embd.weight"], t["v.patch_embd.weight.1"]]
    return out | {
        prefix + "patch_embed.proj.weight": np.stack(frames, 2),
        prefix + "patch_embed.proj.bias": t["v.patch_embd.bias"],
        prefix + "pos_embed.weight": t["v.position_embd.weight"],
    }


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def write_checkpoint(
    folder: Path,
    gguf: Path,
    *,
    dtype: str = "BF16",
    prefix: str = "model.",
    nested: bool = False,
    fused: bool = True,
    pairs: bool = True,
    shards: int = 1,
) -> Path:
    """Make the checkpoint that ``gguf`` could have come from. Matrices are stored as ``dtype``, the rest as F32."""
    folder.mkdir(parents=True, exist_ok=True)
    with open_gguf(gguf) as f:
        hp = read_hparams(f)
        tensors = hf_tensors(f, prefix=prefix, fused=fused)
        files = tokenizer_files(f, pairs)
        bos = f.metadata["tokenizer.ggml.bos_token_id"]
    config = hf_config(hp) | {"bos_token_id": bos}
    if nested:
        outer = ("architectures", "tie_word_embeddings", "model_type")
        config = {
            "architectures": [config["architectures"][0].replace("CausalLM", "ConditionalGeneration")],
            "tie_word_embeddings": config["tie_word_embeddings"],
            "text_config": {k: v for k, v in config.items() if k not in outer},
        }
    for name, value in {**files, "config.json": config}.items():
        write_json(folder / name, value)
    small = ("norm.weight", "A_log", "dt_bias", "conv1d.weight", "mlp.gate.weight", "shared_expert_gate.weight")
    ready = {
        name: stored(x, "F32" if name.endswith(small) or "pre_fc_norm" in name else dtype)
        for name, x in tensors.items()
    }
    write_shards(folder, ready, shards)
    return folder


def write_shards(folder: Path, tensors: Mapping[str, Stored], shards: int = 1) -> None:
    """model.safetensors, or as many shards and their index."""
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return
    names = list(tensors)
    where: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i::shards]
        write_safetensors(folder / file, {n: tensors[n] for n in part})
        where |= dict.fromkeys(part, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
