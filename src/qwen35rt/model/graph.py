"""Builds the Program of a model from its hyperparameters and weights. Knows no devices and no batches."""

from __future__ import annotations

from .hparams import HParams
from .layers import attention_layer, delta_layer, dense_ffn, moe_ffn
from .program import Builder, Program, StateShape
from .weights import AttentionWeights, MoeFfn, Weights


def build_program(hp: HParams, w: Weights) -> Program:
    """The trunk: embedding, hp.n_layer layers, output norm, head. The MTP block is not part of it."""
    b = Builder()
    x = b.embed(w.token_embd)
    n_attention = n_delta = 0
    residuals = []
    for i, layer in enumerate(w.layers):
        b.scope(f"l{i}.")
        h = b.rms_norm(x, layer.mixer.attn_norm, hp.rms_eps, "attn_norm")
        if isinstance(layer.mixer, AttentionWeights):
            mixed = attention_layer(b, hp, h, layer.mixer, n_attention)
            n_attention += 1
        else:
            mixed = delta_layer(b, hp, h, layer.mixer, n_delta)
            n_delta += 1
        x = b.add(x, mixed, "mixed")
        h = b.rms_norm(x, layer.post_attention_norm, hp.rms_eps, "ffn_norm")
        y = moe_ffn(b, hp, h, layer.ffn) if isinstance(layer.ffn, MoeFfn) else dense_ffn(b, h, layer.ffn)
        x = b.add(x, y, "out")
        residuals.append(x)
    b.scope("")
    hidden = x
    rows = b.gather_rows(x, "wanted")
    logits = b.linear(b.rms_norm(rows, w.output_norm, hp.rms_eps, "output_norm"), w.output, "logits")
    state = StateShape(
        attention_layers=n_attention,
        kv_heads=hp.n_head_kv,
        head_dim=hp.head_dim,
        delta_layers=n_delta,
        v_heads=hp.ssm_v_heads,
        d=hp.ssm_state,
        channels=(2 * hp.ssm_k_heads + hp.ssm_v_heads) * hp.ssm_state,
        conv_kernel=hp.conv_kernel,
    )
    return Program(tuple(b.ops), tuple(b.values), hidden, logits, state, w.output.rows, tuple(residuals))
