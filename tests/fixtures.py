"""Seeded tiny models as GGUF files: TINY-D, -MOE, -MTP, -TIED (``write_tiny``) and SCRIPT-GGUF (``write_script``).

Each tensor has its own random stream, named by seed and tensor, so that variants of a model share the weights they
have in common.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType

from qwen35rt.formats import BY_NAME

from .gguf_raw import quantize
from .tiny_vocab import CHATML, MERGES, Vocab, spell, tiny_vocab

Float = npt.NDArray[np.float32]
Override = float | Float | Callable[[Float], Float]
Stored = Float | tuple[npt.NDArray[np.uint8], str]  # plain values, or bytes [..., row bytes] and their format


@dataclass(frozen=True)
class TinySpec:
    """Sizes of a tiny model, named as in HParams."""

    moe: bool = False
    n_layer: int = 4
    interval: int = 4
    mtp: bool = False
    tied: bool = False
    n_vocab: int = 320
    n_embd: int = 64
    n_ff: int = 96
    n_head: int = 2
    n_head_kv: int = 1
    head_dim: int = 32
    rope_dim: int = 8
    rope_sections: tuple[int, ...] = (2, 1, 1, 0)
    ssm_state: int = 16
    ssm_k_heads: int = 2
    ssm_v_heads: int = 4
    conv_kernel: int = 4
    n_expert: int = 8
    n_expert_used: int = 2
    n_ff_expert: int = 32
    n_ff_shared: int = 64
    n_ctx: int = 4096

    @property
    def arch(self) -> str:
        """The file's architecture."""
        return "qwen35moe" if self.moe else "qwen35"


def tiny_metadata(s: TinySpec, vocab: Vocab | None, chat_template: str | None) -> dict[str, Any]:
    """Keys of a tiny model; with ``vocab`` also those of its tokenizer."""
    a = s.arch
    meta: dict[str, Any] = {
        "general.architecture": a,
        "general.type": "model",
        "general.name": "tiny",
        f"{a}.block_count": s.n_layer + s.mtp,
        f"{a}.context_length": s.n_ctx,
        f"{a}.embedding_length": s.n_embd,
        f"{a}.attention.head_count": s.n_head,
        f"{a}.attention.head_count_kv": s.n_head_kv,
        f"{a}.attention.key_length": s.head_dim,
        f"{a}.attention.value_length": s.head_dim,
        f"{a}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{a}.full_attention_interval": s.interval,
        f"{a}.rope.freq_base": 1e7,
        f"{a}.rope.dimension_count": s.rope_dim,
        f"{a}.rope.dimension_sections": list(s.rope_sections),
        f"{a}.ssm.conv_kernel": s.conv_kernel,
        f"{a}.ssm.state_size": s.ssm_state,
        f"{a}.ssm.group_count": s.ssm_k_heads,
        f"{a}.ssm.time_step_rank": s.ssm_v_heads,
        f"{a}.ssm.inner_size": s.ssm_v_heads * s.ssm_state,
    }
    if s.mtp:
        meta[f"{a}.nextn_predict_layers"] = 1
    if s.moe:
        meta[f"{a}.expert_count"] = s.n_expert
        meta[f"{a}.expert_used_count"] = s.n_expert_used
        meta[f"{a}.expert_feed_forward_length"] = s.n_ff_expert
        meta[f"{a}.expert_shared_feed_forward_length"] = s.n_ff_shared
    else:
        meta[f"{a}.feed_forward_length"] = s.n_ff
    if vocab is not None:
        meta |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen35",
            "tokenizer.ggml.tokens": list(vocab.tokens),
            "tokenizer.ggml.token_type": list(vocab.types),
            "tokenizer.ggml.merges": list(MERGES),
            "tokenizer.ggml.bos_token_id": vocab.id("<|endoftext|>"),
            "tokenizer.ggml.eos_token_id": vocab.id("<|im_end|>"),
            "tokenizer.ggml.padding_token_id": vocab.id("<|endoftext|>"),
            "tokenizer.ggml.add_bos_token": False,
        }
    if chat_template is not None:
        meta["tokenizer.chat_template"] = chat_template
    return meta


def tiny_tensors(s: TinySpec, seed: int = 1) -> dict[str, Float]:
    """All tensors of a tiny model in numpy's order of dimensions. Values are exact in F16 and BF16."""
    out: dict[str, Float] = {}

    def draw(name: str, *shape: int, mean: float = 0.0, std: float | None = None) -> None:
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        spread = 1 / math.sqrt(shape[-1]) if std is None else std
        out[name] = exact(mean + spread * rng.standard_normal(shape, np.float32))

    def ffn(b: str) -> None:
        if not s.moe:
            draw(b + "ffn_gate.weight", s.n_ff, s.n_embd)
            draw(b + "ffn_up.weight", s.n_ff, s.n_embd)
            draw(b + "ffn_down.weight", s.n_embd, s.n_ff)
            return
        draw(b + "ffn_gate_inp.weight", s.n_expert, s.n_embd, std=2 / math.sqrt(s.n_embd))
        draw(b + "ffn_gate_exps.weight", s.n_expert, s.n_ff_expert, s.n_embd)
        draw(b + "ffn_up_exps.weight", s.n_expert, s.n_ff_expert, s.n_embd)
        draw(b + "ffn_down_exps.weight", s.n_expert, s.n_embd, s.n_ff_expert)
        draw(b + "ffn_gate_inp_shexp.weight", s.n_embd)
        draw(b + "ffn_gate_shexp.weight", s.n_ff_shared, s.n_embd)
        draw(b + "ffn_up_shexp.weight", s.n_ff_shared, s.n_embd)
        draw(b + "ffn_down_shexp.weight", s.n_embd, s.n_ff_shared)

    def attention(b: str) -> None:
        draw(b + "attn_q.weight", 2 * s.n_head * s.head_dim, s.n_embd)
        draw(b + "attn_k.weight", s.n_head_kv * s.head_dim, s.n_embd)
        draw(b + "attn_v.weight", s.n_head_kv * s.head_dim, s.n_embd)
        draw(b + "attn_output.weight", s.n_embd, s.n_head * s.head_dim)
        draw(b + "attn_q_norm.weight", s.head_dim, mean=1.0, std=0.2)
        draw(b + "attn_k_norm.weight", s.head_dim, mean=1.0, std=0.2)

    def delta(b: str) -> None:
        inner, channels = s.ssm_v_heads * s.ssm_state, (2 * s.ssm_k_heads + s.ssm_v_heads) * s.ssm_state
        draw(b + "attn_qkv.weight", channels, s.n_embd)
        draw(b + "attn_gate.weight", inner, s.n_embd)
        draw(b + "ssm_beta.weight", s.ssm_v_heads, s.n_embd)
        draw(b + "ssm_alpha.weight", s.ssm_v_heads, s.n_embd)
        draw(b + "ssm_conv1d.weight", channels, s.conv_kernel, std=0.5)
        draw(b + "ssm_a", s.ssm_v_heads, mean=-1.0, std=1.0)
        out[b + "ssm_a"] = exact(-np.exp(out[b + "ssm_a"]))
        draw(b + "ssm_dt.bias", s.ssm_v_heads, mean=-1.0, std=1.0)
        draw(b + "ssm_norm.weight", s.ssm_state, mean=1.0, std=0.2)
        draw(b + "ssm_out.weight", s.n_embd, inner)

    draw("token_embd.weight", s.n_vocab, s.n_embd, std=3.5 / math.sqrt(s.n_embd))
    if not s.tied:
        draw("output.weight", s.n_vocab, s.n_embd, std=3.5 / math.sqrt(s.n_embd))
    draw("output_norm.weight", s.n_embd, mean=1.0, std=0.2)
    for i in range(s.n_layer + s.mtp):
        b = f"blk.{i}."
        draw(b + "attn_norm.weight", s.n_embd, mean=1.0, std=0.2)
        attention(b) if i >= s.n_layer or (i + 1) % s.interval == 0 else delta(b)
        draw(b + "post_attention_norm.weight", s.n_embd, mean=1.0, std=0.2)
        ffn(b)
    if s.mtp:
        b = f"blk.{s.n_layer}.nextn."
        draw(b + "eh_proj.weight", s.n_embd, 2 * s.n_embd)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            draw(b + name + ".weight", s.n_embd, mean=1.0, std=0.2)
    return out


def exact(x: Float) -> Float:
    """Round to numbers that F16 and BF16 hold exactly."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    values: Float = bits.view(np.float32)
    return np.where(np.abs(values) < 2.0**-13, np.float32(0), values)


def write_tiny(
    path: Path,
    kind: str = "dense",
    *,
    seed: int = 1,
    formats: Mapping[str, str] | None = None,
    overrides: Mapping[str, Override] | None = None,
    metadata: Mapping[str, Any] | None = None,
    drop: Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    extra: Mapping[str, Stored] | None = None,
    chat_template: str | None = CHATML,
    tokenizer: bool = True,
    parts: int = 1,
    **sizes: Any,
) -> Path:
    """Write a tiny model; ``kind`` is "dense" or "moe", ``sizes`` are fields of TinySpec (mtp, tied, n_embd...).

    ``formats`` and ``overrides`` map patterns of tensor names to a format or to new values (a number, an array or a
    function of the old ones); the first pattern that fits counts. ``metadata`` sets keys, or drops them where the value
    is None. ``drop`` (patterns) and ``rename`` change the list of tensors, ``extra`` adds to it. With ``parts`` > 1 the
    model is split and the path of part 1 is returned.
    """
    spec = TinySpec(moe={"dense": False, "moe": True}[kind], **sizes)
    tensors = tiny_tensors(spec, seed)
    for name in tensors:
        change = _first(overrides, name)
        if callable(change):
            tensors[name] = np.asarray(change(tensors[name]), np.float32)
        elif change is not None:
            tensors[name] = np.broadcast_to(np.asarray(change, np.float32), tensors[name].shape).copy()
    stored: dict[str, Stored] = {}
    for name, values in tensors.items():
        if any(fnmatchcase(name, p) for p in drop):
            continue
        form = _first(formats, name)
        rng = np.random.default_rng([seed, 1, zlib.crc32(name.encode())])
        stored[(rename or {}).get(name, name)] = (quantize(values, form, rng), form) if form else values
    meta = tiny_metadata(spec, tiny_vocab(spec.n_vocab) if tokenizer else None, chat_template)
    return write_gguf(path, _changed(meta, metadata), stored | dict(extra or {}), parts=parts)


def write_script(
    path: Path,
    chain: Sequence[bytes | str],
    *,
    end: str | None = "<|im_end|>",
    mtp: str | None = None,
    seed: int = 1,
    metadata: Mapping[str, Any] | None = None,
    chat_template: str | None = CHATML,
    markers_as_normal: Collection[str] = (),
) -> Path:
    """Write SCRIPT-GGUF: greedy output after any prompt is ``chain`` token by token, then ``end`` (None: over again).

    A ``bytes`` step gets a token of its own with that byte string, behind the 320 tokens of the vocabulary even where
    one of them has the same bytes, so that no prompt contains a step by accident; a ``str`` step is a marker. A token
    outside the chain is followed by the first step. ``mtp`` "right" or "wrong" adds a nextn block whose first draft
    always or never agrees. The layers' outputs are zero, their inner weights random: states change, logits do not
    depend on them.
    """
    plain = [s for s in chain if isinstance(s, bytes)]
    vocab = tiny_vocab(None, [spell(s) for s in plain], markers_as_normal)
    own = iter(range(len(vocab.tokens) - len(plain), len(vocab.tokens)))
    ids = [next(own) if isinstance(s, bytes) else vocab.id(s) for s in chain]
    if not ids or len(set(ids)) != len(ids) or (end is not None and vocab.id(end) in ids):
        raise ValueError("a chain needs a step, and each marker at most once")
    spec = TinySpec(n_vocab=len(vocab.tokens), n_embd=-(-(len(ids) + 1) // 64) * 64, mtp=mtp is not None)
    n = spec.n_embd
    tensors = tiny_tensors(spec, seed)
    for name, values in tensors.items():
        if name.endswith(("attn_output.weight", "ssm_out.weight", "ffn_down.weight")):
            values[...] = 0
        elif name.endswith("norm.weight") and values.shape == (n,):
            values[...] = 1
    # Column 0 stands for every token outside the chain, column i + 1 for step i. A little noise keeps tokens apart.
    rng = np.random.default_rng([seed, 2])
    embd = exact((0.1 / n * rng.standard_normal((spec.n_vocab, n))).astype(np.float32))
    embd[:, 0] += 1
    for i, token in enumerate(ids):
        embd[token, 0] -= 1
        embd[token, i + 1] += 1
    head = exact((0.01 * rng.standard_normal((spec.n_vocab, n))).astype(np.float32))
    for column, token in enumerate([*ids, ids[0] if end is None else vocab.id(end)]):
        head[token, column] += 20 / math.sqrt(n)  # the next token's logit is 20, the others are near 0
    tensors["token_embd.weight"], tensors["output.weight"] = exact(embd), exact(head)
    if mtp is not None:
        shift = {"right": 0, "wrong": 1}[mtp]
        proj = np.zeros((n, 2 * n), np.float32)  # the embedding half alone, in place or one column on
        used = len(ids) + 1
        for column in range(used):
            proj[(column + shift) % used, column] = 1
        tensors[f"blk.{spec.n_layer}.nextn.eh_proj.weight"] = proj
    return write_gguf(path, _changed(tiny_metadata(spec, vocab, chat_template), metadata), tensors)


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored], *, parts: int = 1, empty_first: bool = False
) -> Path:
    """Write a file with the gguf package. Values of ``metadata``: int (u32, or i32 in lists and below 0), float (f32),
    bool, str, lists of these, or (value, GGUFValueType). ``empty_first``: part 1 of a split model holds no tensors."""
    names = list(tensors)
    if parts == 1:
        return _write_part(path, metadata, tensors)
    holders = parts - empty_first
    cuts = [0] * empty_first + [len(names) * i // holders for i in range(holders + 1)]
    files = [path.with_name(f"{path.stem}-{i + 1:05d}-of-{parts:05d}.gguf") for i in range(parts)]
    for i, file in enumerate(files):
        keys = dict(metadata) if i == 0 else {}
        keys |= {
            "split.no": (i, GGUFValueType.UINT16),
            "split.count": (parts, GGUFValueType.UINT16),
            "split.tensors.count": (len(names), GGUFValueType.INT32),
        }
        _write_part(file, keys, {n: tensors[n] for n in names[cuts[i] : cuts[i + 1]]})
    return files[0]


def _write_part(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Path:
    writer = gguf.GGUFWriter(path, "")
    writer.kv_data[0].clear()  # the constructor adds an architecture; the keys are ours alone
    for key, value in metadata.items():
        if isinstance(value, tuple):
            writer.add_key_value(key, *value)
        elif isinstance(value, list):
            kind = _value_type(value[0])
            if kind == GGUFValueType.UINT32:
                kind = GGUFValueType.INT32
            writer.add_key_value(key, value, GGUFValueType.ARRAY, kind)
        else:
            writer.add_key_value(key, value, _value_type(value))
    for name, values in tensors.items():
        if isinstance(values, tuple):
            raw, form = values
            writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType(BY_NAME[form].id))
        else:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return path


def _value_type(value: Any) -> GGUFValueType:
    if isinstance(value, bool):
        return GGUFValueType.BOOL
    if isinstance(value, int):
        return GGUFValueType.INT32 if value < 0 else GGUFValueType.UINT32
    return GGUFValueType.FLOAT32 if isinstance(value, float) else GGUFValueType.STRING


def _changed(metadata: dict[str, Any], changes: Mapping[str, Any] | None) -> dict[str, Any]:
    merged = metadata | dict(changes or {})
    return {k: v for k, v in merged.items() if v is not None}


def _first(patterns: Mapping[str, Any] | None, name: str) -> Any:
    return next((v for p, v in (patterns or {}).items() if fnmatchcase(name, p)), None)
