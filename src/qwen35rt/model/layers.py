"""The layers of the family, written once against a Builder. Formulas: see docs/architecture.md.

Value names are those of the traces that tests compare: q_rope, k_rope, v, conv, q, k, delta_out, normed, out.
"""

from __future__ import annotations

import math

from .hparams import HParams
from .program import Builder, Value
from .weights import AttentionWeights, DeltaWeights, DenseFfn, MoeFfn


def attention_layer(b: Builder, hp: HParams, x: Value, w: AttentionWeights, layer: int) -> Value:
    """Gated full attention. x [T, n_embd] is normed already; -> [T, n_embd]."""
    heads, kv_heads, dim = hp.n_head, hp.n_head_kv, hp.head_dim
    # Per head: dim query columns, then dim gate columns.
    qg = b.linear(x, w.q, "qg")
    k = b.linear(x, w.k, "k_proj")
    v = b.linear(x, w.v, "v")
    q_normed = b.rms_norm(qg.view(heads, dim, 0, 2 * dim), w.q_norm, hp.rms_eps, "q_norm")
    k_normed = b.rms_norm(k.view(kv_heads, dim), w.k_norm, hp.rms_eps, "k_norm")
    q = b.rope(q_normed.view(heads, dim), hp.rope_theta, hp.rope_dim, hp.rope_sections, "q_rope")
    k = b.rope(k_normed.view(kv_heads, dim), hp.rope_theta, hp.rope_dim, hp.rope_sections, "k_rope")
    b.kv_append(k.view(kv_heads, dim), v.view(kv_heads, dim), layer)
    o = b.attention(q.view(heads, dim), kv_heads, layer, "attn_pregate")
    gated = b.sigmoid_mul(o.view(heads, dim), qg.view(heads, dim, dim, 2 * dim), "attn_gated")
    return b.linear(gated, w.output, "attn_out")


def delta_layer(b: Builder, hp: HParams, x: Value, w: DeltaWeights, layer: int) -> Value:
    """Gated DeltaNet. x [T, n_embd] is normed already; -> [T, n_embd]."""
    nk, nv, d = hp.ssm_k_heads, hp.ssm_v_heads, hp.ssm_state
    qkv = b.linear(x, w.qkv, "qkv")
    z = b.linear(x, w.gate, "z")
    beta = b.linear(x, w.beta, "b")
    alpha = b.linear(x, w.alpha, "a")
    c = b.conv1d_silu(qkv, w.conv1d, layer, "conv")
    q = b.l2_norm(c.view(nk, d, 0), 1 / math.sqrt(d), "q")
    k = b.l2_norm(c.view(nk, d, nk * d), 1.0, "k")
    gates = b.delta_gates(alpha, beta, w.dt_bias, w.a, "gates")
    o = b.delta_net(q.view(nk, d), k.view(nk, d), c.view(nv, d, 2 * nk * d), gates, layer, "delta_out")
    n = b.gated_rms_norm(o.view(nv, d), z.view(nv, d), w.norm, hp.rms_eps, "normed")
    return b.linear(n, w.out, "delta_proj")


def dense_ffn(b: Builder, x: Value, w: DenseFfn) -> Value:
    """SwiGLU. x [T, n_embd] -> [T, n_embd]."""
    gate = b.linear(x, w.gate, "ffn_gate")
    up = b.linear(x, w.up, "ffn_up")
    return b.linear(b.silu_mul(gate, up, "ffn_act"), w.down, "ffn_down")


def moe_ffn(b: Builder, hp: HParams, x: Value, w: MoeFfn) -> Value:
    """Routed experts plus the gated shared expert. x [T, n_embd] -> [T, n_embd]."""
    used = hp.n_expert_used
    route = b.moe_route(b.linear(x, w.router, "moe_scores"), used, "moe_route")
    gate = b.moe_linear(x, w.gate_exps, route, used, False, "moe_gate")
    up = b.moe_linear(x, w.up_exps, route, used, False, "moe_up")
    routed = b.moe_linear(b.silu_mul(gate, up, "moe_act"), w.down_exps, route, used, True, "moe_down")
    shared_gate = b.linear(x, w.shared_gate, "shexp_scalar")
    s_gate = b.linear(x, w.gate_shexp, "shexp_gate")
    s_up = b.linear(x, w.up_shexp, "shexp_up")
    shared = b.linear(b.silu_mul(s_gate, s_up, "shexp_act"), w.down_shexp, "shexp_down")
    return b.add(routed, b.sigmoid_mul(shared, shared_gate, "shexp_gated"), "ffn_out")
