"""The text model's tensors: GGUF names and what each is made from. The only place with a checkpoint's names of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from ..errors import ModelFileError
from ..model.hparams import HParams
from .checkpoint import Checkpoint
from .encode import Float
from .recipe import Index, Recipe

_PREFIXES = ("model.language_model.", "model.")
_UNUSED = (".rotary_emb.inv_freq",)


def text_prefix(checkpoint: Checkpoint) -> str:
    """What stands before the text model's names."""
    for prefix in _PREFIXES:
        if prefix + "embed_tokens.weight" in checkpoint.tensors:
            return prefix
    names = " nor ".join(f"'{p}embed_tokens.weight'" for p in _PREFIXES)
    raise ModelFileError(f"{checkpoint.folder}: neither tensor {names} is there; the checkpoint has no text model")


def is_unused(name: str, hp: HParams, mtp: bool) -> bool:
    """Whether a tensor that no recipe takes may be left out silently."""
    return name.endswith(_UNUSED) or (hp.tied and name == "lm_head.weight") or (not mtp and name.startswith("mtp."))


def text_recipes(hp: HParams, prefix: str, names: Collection[str]) -> list[Recipe]:
    """The recipes of all tensors in the order of the file; ``names``: tensors of the checkpoint."""
    return list(_Text(hp, prefix, names).all())


def grouped_to_tiled(nk: int, nv: int, d: int) -> Index:
    """Checkpoint row of each GGUF row: value heads in blocks of ``d`` rows, there grouped by key head, here tiled."""
    order: Index = np.arange(nv * d, dtype=np.int64).reshape(nk, nv // nk, d).transpose(1, 0, 2).reshape(-1)
    return order


def _plus_one(x: Float) -> Float:
    return x + np.float32(1)  # checkpoints store norms around zero


def _decay(a_log: Float) -> Float:
    with np.errstate(over="ignore"):  # an infinite one is refused with its name
        return -np.exp(a_log)


class _Text:
    def __init__(self, hp: HParams, prefix: str, names: Collection[str]) -> None:
        self.hp, self.prefix, self.names = hp, prefix, names
        d, nk, nv = hp.ssm_state, hp.ssm_k_heads, hp.ssm_v_heads
        self.heads = grouped_to_tiled(nk, nv, 1) if nk != nv else None
        self.values = grouped_to_tiled(nk, nv, d) if nk != nv else None
        self.channels = None
        if self.values is not None:
            n_qk = 2 * nk * d
            self.channels = np.concatenate([np.arange(n_qk, dtype=np.int64), n_qk + self.values])

    def all(self) -> Iterator[Recipe]:
        hp, p = self.hp, self.prefix
        yield _matrix("token_embd.weight", p + "embed_tokens.weight", hp.n_vocab, hp.n_embd)
        if not hp.tied:
            yield _matrix("output.weight", "lm_head.weight", hp.n_vocab, hp.n_embd)
        yield _norm("output_norm.weight", p + "norm.weight", hp.n_embd)
        for i, full in enumerate(hp.full_attention):
            yield from self.layer(f"blk.{i}.", f"{p}layers.{i}.", full)
        for i in range(hp.n_mtp):
            b = f"blk.{hp.n_layer + i}."
            yield from self.layer(b, f"mtp.layers.{i}.", True)
            yield _matrix(b + "nextn.eh_proj.weight", "mtp.fc.weight", hp.n_embd, 2 * hp.n_embd)
            yield _norm(b + "nextn.enorm.weight", "mtp.pre_fc_norm_embedding.weight", hp.n_embd)
            yield _norm(b + "nextn.hnorm.weight", "mtp.pre_fc_norm_hidden.weight", hp.n_embd)
            yield _norm(b + "nextn.shared_head_norm.weight", "mtp.norm.weight", hp.n_embd)

    def layer(self, b: str, p: str, full: bool) -> Iterator[Recipe]:
        hp = self.hp
        yield _norm(b + "attn_norm.weight", p + "input_layernorm.weight", hp.n_embd)
        yield from self.attention(b, p + "self_attn.") if full else self.delta(b, p + "linear_attn.")
        yield _norm(b + "post_attention_norm.weight", p + "post_attention_layernorm.weight", hp.n_embd)
        yield from self.experts(b, p + "mlp.") if hp.moe else self.dense(b, p + "mlp.")

    def attention(self, b: str, p: str) -> Iterator[Recipe]:
        hp = self.hp
        n_q, n_kv = hp.n_head * hp.head_dim, hp.n_head_kv * hp.head_dim
        yield _matrix(b + "attn_q.weight", p + "q_proj.weight", 2 * n_q, hp.n_embd)
        yield _matrix(b + "attn_k.weight", p + "k_proj.weight", n_kv, hp.n_embd)
        yield _matrix(b + "attn_v.weight", p + "v_proj.weight", n_kv, hp.n_embd)
        yield _matrix(b + "attn_output.weight", p + "o_proj.weight", hp.n_embd, n_q)
        yield _norm(b + "attn_q_norm.weight", p + "q_norm.weight", hp.head_dim)
        yield _norm(b + "attn_k_norm.weight", p + "k_norm.weight", hp.head_dim)

    def delta(self, b: str, p: str) -> Iterator[Recipe]:
        hp = self.hp
        nv, inner, channels, k = hp.ssm_v_heads, hp.ssm_v_heads * hp.ssm_state, hp.conv_channels, hp.conv_kernel
        yield _matrix(b + "attn_qkv.weight", p + "in_proj_qkv.weight", channels, hp.n_embd, rows=self.channels)
        yield _matrix(b + "attn_gate.weight", p + "in_proj_z.weight", inner, hp.n_embd, rows=self.values)
        yield _matrix(b + "ssm_beta.weight", p + "in_proj_b.weight", nv, hp.n_embd, rows=self.heads)
        yield _matrix(b + "ssm_alpha.weight", p + "in_proj_a.weight", nv, hp.n_embd, rows=self.heads)
        yield Recipe(
            b + "ssm_conv1d.weight",
            (channels, k),
            (p + "conv1d.weight",),
            (channels, 1, k),
            matrix=False,
            rows=self.channels,
        )
        yield Recipe(b + "ssm_a", (nv,), (p + "A_log",), (nv,), matrix=False, rows=self.heads, change=_decay)
        yield Recipe(b + "ssm_dt.bias", (nv,), (p + "dt_bias",), (nv,), matrix=False, rows=self.heads)
        yield Recipe(b + "ssm_norm.weight", (hp.ssm_state,), (p + "norm.weight",), (hp.ssm_state,), matrix=False)
        yield _matrix(b + "ssm_out.weight", p + "out_proj.weight", hp.n_embd, inner, cols=self.values)

    def dense(self, b: str, p: str) -> Iterator[Recipe]:
        hp = self.hp
        yield _matrix(b + "ffn_gate.weight", p + "gate_proj.weight", hp.n_ff, hp.n_embd)
        yield _matrix(b + "ffn_up.weight", p + "up_proj.weight", hp.n_ff, hp.n_embd)
        yield _matrix(b + "ffn_down.weight", p + "down_proj.weight", hp.n_embd, hp.n_ff)

    def experts(self, b: str, p: str) -> Iterator[Recipe]:
        hp = self.hp
        n, size, shared, h = hp.n_expert, hp.n_ff_expert, hp.n_ff_shared, hp.n_embd
        yield Recipe(b + "ffn_gate_inp.weight", (n, h), (p + "gate.weight",), (n, h), matrix=False)
        if p + "experts.gate_up_proj" in self.names or p + "experts.0.gate_proj.weight" not in self.names:
            fused = np.arange(n * 2 * size, dtype=np.int64).reshape(n, 2, size)  # of an expert gate rows, then up rows
            for half, name in enumerate(("gate", "up")):
                yield Recipe(
                    f"{b}ffn_{name}_exps.weight",
                    (n, size, h),
                    (p + "experts.gate_up_proj",),
                    (n, 2 * size, h),
                    rows=fused[:, half].reshape(-1),
                )
            down, down_shape = (p + "experts.down_proj",), (n, h, size)
            yield Recipe(b + "ffn_down_exps.weight", (n, h, size), down, down_shape)
        else:
            for name, rows, cols in (("gate", size, h), ("up", size, h), ("down", h, size)):
                each = tuple(f"{p}experts.{e}.{name}_proj.weight" for e in range(n))
                yield Recipe(f"{b}ffn_{name}_exps.weight", (n, rows, cols), each, (rows, cols))
        gate = p + "shared_expert_gate.weight"
        yield Recipe(b + "ffn_gate_inp_shexp.weight", (1, h), (gate,), (1, h), matrix=False)
        yield _matrix(b + "ffn_gate_shexp.weight", p + "shared_expert.gate_proj.weight", shared, h)
        yield _matrix(b + "ffn_up_shexp.weight", p + "shared_expert.up_proj.weight", shared, h)
        yield _matrix(b + "ffn_down_shexp.weight", p + "shared_expert.down_proj.weight", h, shared)


def _matrix(
    name: str, source: str, rows_n: int, cols_n: int, rows: Index | None = None, cols: Index | None = None
) -> Recipe:
    return Recipe(name, (rows_n, cols_n), (source,), (rows_n, cols_n), rows=rows, cols=cols)


def _norm(name: str, source: str, width: int) -> Recipe:
    return Recipe(name, (width,), (source,), (width,), matrix=False, change=_plus_one)
