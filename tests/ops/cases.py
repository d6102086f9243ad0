"""The one list of op cases, for every implementation: odd sizes, several sequences, splits, realistic ranges."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from qwen35rt.formats import FORMATS
from qwen35rt.model.program import StateShape, Value

from .case import INT8, Case, Inputs, cut
from .tensors import random_tensor

EPS = 1e-6
STEPS = ((1, 2, 3, 8, 9),)  # B30's batches, one after the other: 23 rows in all
EXPERTS = 5


def _norm_weight(i: Inputs, *shape: int) -> npt.NDArray[np.float32]:
    return i.rng.normal(1, 0.3, shape).astype(np.float32)


# ------------------------------------------------------------------------------------------ embed, linear, experts


def _embed(i: Inputs, fmt: str, cols: int) -> Value:
    return i.b.embed(random_tensor(i.rng, "table", fmt, i.rows, cols))


def _linear(i: Inputs, fmt: str, rows: int, cols: int, exact: bool) -> Value:
    x = i.int8(cols) if exact else i.normal(cols)
    return i.b.linear(x, random_tensor(i.rng, "w", fmt, rows, cols), "y")


def _moe(i: Inputs, fmt: str, rows: int, cols: int, used: int, reduce: bool, exact: bool) -> Value:
    route = i.b.moe_route(i.normal(EXPERTS, 2), used, "route")
    width = used * cols if reduce else cols
    x = i.int8(width) if exact else i.normal(width)
    return i.b.moe_linear(x, random_tensor(i.rng, "w", fmt, rows, cols, EXPERTS), route, used, reduce, "y")


def weight_cases() -> Iterator[Case]:
    """B30: every format, columns of 1, 2, 3, 5 and 7 blocks, rows 1, 2, 3, 5, 17, steps of 1, 2, 3, 8 and 9 rows.

    ``exact`` inputs are held by int8 blocks without error, so every format has to meet the bound of float32.
    """
    for f in FORMATS:
        block = max(f.block, 32)
        for times in (1, 2, 3, 5, 7):
            cols = block * times
            if times < 4:
                yield Case("embed", f"{f.name}-{cols}", partial(_embed, fmt=f.name, cols=cols))
            for rows in (1, 2, 3, 5, 17):
                for exact in (True, False):
                    yield Case(
                        "linear",
                        f"{f.name}-{rows}x{cols}-{'exact' if exact else 'normal'}",
                        partial(_linear, fmt=f.name, rows=rows, cols=cols, exact=exact),
                        nmse=1e-10 if exact else INT8,
                        lengths=(23,),
                        chunks=STEPS,
                    )
        # More rows in a step than a tile of a device has, and weight rows and columns that fill none.
        tiled = partial(_linear, fmt=f.name, rows=70, cols=3 * block, exact=True)
        yield Case("linear", f"{f.name}-70x{3 * block}-tiles", tiled, lengths=(70,), chunks=((67, 3),))
        for reduce in (False, True):
            for rows, times, used in ((5, 1, 2), (17, 3, 3), (3, 2, 1)):
                for exact in (True, False):
                    yield Case(
                        "moe_linear",
                        f"{f.name}-{rows}x{block * times}-{used}of{EXPERTS}{'-reduce' if reduce else ''}"
                        f"-{'exact' if exact else 'normal'}",
                        partial(_moe, fmt=f.name, rows=rows, cols=block * times, used=used, reduce=reduce, exact=exact),
                        nmse=1e-10 if exact else INT8,
                        lengths=(23, 40),
                        chunks=((1, 2, 3, 8, 9), (1, 1, 38)),
                    )


def plain_weight_cases() -> Iterator[Case]:
    """F32, F16 and BF16 take any number of columns; and enough rows and columns for several tiles and threads."""
    for fmt in ("F32", "F16", "BF16"):
        for rows, cols in ((1, 1), (3, 5), (17, 33), (4, 100)):
            build = partial(_linear, fmt=fmt, rows=rows, cols=cols, exact=True)
            yield Case("linear", f"{fmt}-{rows}x{cols}-odd", build, lengths=(23,), chunks=STEPS)
    for fmt in ("F32", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"):
        build = partial(_linear, fmt=fmt, rows=513, cols=768, exact=True)
        yield Case("linear", f"{fmt}-513x768-exact", build, lengths=(1, 66), chunks=((1,), (1, 65)))


# ------------------------------------------------------------------------------------------ norms and elementwise ops


def _norm_whole(i: Inputs, width: int) -> Value:
    return i.b.rms_norm(i.normal(width, 3), _norm_weight(i, width), EPS, "y")


def _elementwise(i: Inputs, op: str, width: int, other: int) -> Value:
    x, y = i.normal(width), _spread(i, other)
    match op:
        case "add":
            return i.b.add(x, y, "y")
        case "silu_mul":
            return i.b.silu_mul(y, x, "y")
        case "sigmoid_mul":
            return i.b.sigmoid_mul(x, y, "y")
        case _:
            return x


def _head_norm(i: Inputs, scale: float) -> Value:
    x = i.normal(2 * 3 * 20 + 8, scale)  # 3 heads of 20 columns, 40 apart, behind 8 others
    return i.b.rms_norm(x.view(3, 20, 8, 40), _norm_weight(i, 20), EPS, "y")


def _l2(i: Inputs, scale: float) -> Value:
    return i.b.l2_norm(i.normal(100, scale).view(3, 24, 7), 1 / math.sqrt(24), "y")


def _gated(i: Inputs, d: int, n: int) -> Value:
    x, z = i.normal(n * d, 0.01), i.normal(n * d, 4)
    return i.b.gated_rms_norm(x.view(n, d), z.view(n, d), _norm_weight(i, d), EPS, "y")


def _gate_columns(i: Inputs) -> Value:
    x, qg = i.normal(3 * 20), i.normal(3 * 40, 5)
    return i.b.sigmoid_mul(x.view(3, 20), qg.view(3, 20, 20, 40), "y")


def _spread(i: Inputs, width: int) -> Value:
    """Numbers from tiny to +-100, where a careless sigmoid overflows."""
    x = i.rng.normal(0, 1, (i.rows, width)) * 10.0 ** i.rng.uniform(-4, 2, (i.rows, width))
    return i.value(np.clip(x, -100, 100))


def _gates(i: Inputs, bias: float, n: int) -> Value:
    a_log = i.rng.uniform(0, math.log(16), n)
    dt_bias = np.full(n, bias) + i.rng.normal(0, 0.1, n)
    b = i.b
    return b.delta_gates(
        i.normal(n), i.normal(n, 3), dt_bias.astype(np.float32), (-np.exp(a_log)).astype(np.float32), "y"
    )


def _route(i: Inputs, experts: int, used: int, ties: bool) -> Value:
    if ties:
        return i.b.moe_route(i.value(i.rng.integers(-2, 3, (i.rows, experts))), used, "y")
    return i.b.moe_route(i.normal(experts, 3), used, "y")


def _rope(i: Inputs, n: int, dim: int, rot: int, sections: tuple[int, ...]) -> Value:
    return i.b.rope(i.normal(n * dim).view(n, dim), 1e7, rot, sections, "y")


def _fused_silu_mul(i: Inputs) -> Value:
    """silu_mul of two parts of one value, as the gate and up rows of a fused matrix."""
    x = i.normal(2 * 37, 3)
    return i.b.silu_mul(x.view(1, 37), x.view(1, 37, 37), "y")


def _row_ops() -> Iterator[Case]:
    for width in (1, 7, 64, 1000):
        yield Case("rms_norm", str(width), partial(_norm_whole, width=width))
        for op in ("add", "silu_mul", "sigmoid_mul", "gather_rows"):
            chunks = ((3,), (1,), (5, 6)) if op == "gather_rows" else ((70,),)
            build = partial(_elementwise, op=op, width=width, other=width)
            yield Case(op, str(width), build, chunks=chunks, every=4 if op == "gather_rows" else 1)
        yield Case("sigmoid_mul", f"{width}-row-gate", partial(_elementwise, op="sigmoid_mul", width=width, other=1))
    for scale in (1e-4, 1.0, 1e3):
        yield Case("rms_norm", f"heads-{scale:g}", partial(_head_norm, scale=scale))
        yield Case("l2_norm", f"heads-{scale:g}", partial(_l2, scale=scale))
    yield Case("silu_mul", "views", _fused_silu_mul)
    yield Case("sigmoid_mul", "gate-columns", _gate_columns)
    for d, n in ((16, 4), (24, 3), (128, 6)):
        yield Case("gated_rms_norm", f"{n}x{d}", partial(_gated, d=d, n=n))
    for bias in (-10, 0, 10):
        yield Case("delta_gates", f"bias{bias}", partial(_gates, bias=bias, n=6), columns=(6,))
    for experts, used in ((5, 2), (12, 3), (8, 8), (256, 8)):
        for ties in (False, True):
            label = f"{used}of{experts}{'-ties' if ties else ''}"
            yield Case("moe_route", label, partial(_route, experts=experts, used=used, ties=ties), columns=(used,))
    for n, dim, rot, sections in ((2, 32, 8, (2, 1, 1, 0)), (3, 256, 64, (11, 11, 10, 0)), (1, 20, 20, (5, 3, 2, 0))):
        build = partial(_rope, n=n, dim=dim, rot=rot, sections=sections)
        # A float32 angle is as wrong as its last place: that bounds the error at far positions.
        yield Case("rope", f"{n}x{dim}", build, nmse=1e-9)
        yield Case("rope", f"{n}x{dim}-3d", build, nmse=1e-7, far=1000)
        yield Case("rope", f"{n}x{dim}-far", build, nmse=2e-3, far=262_144)


# ------------------------------------------------------------------------------------------ ops with state


def _attention(i: Inputs, n: int, kv: int, dim: int, sharp: float, kept: npt.DTypeLike = np.float16) -> Value:
    """Keys and values are numbers that ``kept`` holds exactly, so that pages of that type add no error."""
    q, *kvs = (i.rng.normal(0, s, (i.rows, h * dim)) for s, h in ((sharp, n), (1, kv), (1, kv)))
    k, v = (i.value(x.astype(kept)) for x in kvs)
    i.b.kv_append(k.view(kv, dim), v.view(kv, dim), 0)
    return i.b.attention(i.value(q).view(n, dim), kv, 0, "y")


def _conv(i: Inputs, channels: int, kernel: int) -> Value:
    return i.b.conv1d_silu(i.normal(channels, 2), i.rng.normal(0, 1, (channels, kernel)).astype(np.float32), 0, "y")


def _delta(i: Inputs, nk: int, nv: int, d: int, bias: float, repeat: bool, jumps: bool = False) -> Value:
    """``bias`` is that of dt: -10 gives a decay near 1, +10 near 0. ``repeat``: keys that hardly change. ``jumps``:
    every ninth row or so forgets nearly all."""
    q, k = (i.rng.normal(0, 1, (i.rows, nk, d)) for _ in range(2))
    if repeat:
        k = k[:1] + 0.05 * k
    q, k = (x / np.sqrt(np.sum(x**2, -1, keepdims=True) + 1e-6) for x in (q, k))
    dt = np.logaddexp(0, i.rng.normal(0, 1, (i.rows, nv)) + (bias if bias else i.rng.uniform(-10, 10, nv)))
    g = -dt * np.exp(i.rng.uniform(0, math.log(16), nv))
    if jumps:
        g -= 5000 * (i.rng.random(g.shape) < 0.1)
    beta = 1 / (1 + np.exp(-i.rng.normal(1 if repeat else 0, 2, (i.rows, nv))))
    qk = i.value(np.concatenate([q.reshape(i.rows, -1) / math.sqrt(d), k.reshape(i.rows, -1)], 1))
    v, gates = i.normal(nv * d), i.value(np.concatenate([g, beta], 1))
    return i.b.delta_net(qk.view(nk, d), qk.view(nk, d, nk * d), v.view(nv, d), gates, 0, "y")


def _cuts(case: Case) -> Iterator[Case]:
    """Whole prompts; one row a step; prefill of some beside decode of others."""
    yield case
    yield cut(case, "by1", (1,))
    yield cut(case, "mixed", (1,), (2, 1), (16, 1, 3), (1, 63, 5, 1, 7))


def state_cases() -> Iterator[Case]:
    """attention, conv1d_silu and delta_net over several sequences, in several splits, with dirty slots and pages."""
    for n, kv, dim in ((2, 1, 32), (4, 2, 64), (2, 1, 256), (6, 3, 48)):
        shape = StateShape(1, kv, dim, 0, 1, 16, 1, 4)
        for sharp in (1.0, 8.0):
            build = partial(_attention, n=n, kv=kv, dim=dim, sharp=sharp)
            yield from _cuts(Case("attention", f"{n}-{kv}-{dim}-sharp{sharp:g}", build, 1e-9, state=shape))
    for n, kv, dim in ((2, 1, 32), (4, 1, 256), (6, 3, 48), (3, 1, 20)):
        build = partial(_attention, n=n, kv=kv, dim=dim, sharp=3.0, kept=np.float32)
        shape = StateShape(1, kv, dim, 0, 1, 16, 1, 4)
        yield from _cuts(Case("attention", f"{n}-{kv}-{dim}-f32", build, 1e-11, state=shape, kv_dtype="f32"))
    long = partial(_attention, n=8, kv=2, dim=64, sharp=3.0)
    yield Case("attention", "long", long, 1e-9, (600, 5), ((257, 1, 342), (1,)), StateShape(1, 2, 64, 0, 1, 16, 1, 4))
    build = partial(_attention, n=2, kv=1, dim=32, sharp=3.0, kept=np.float32)
    shape = StateShape(1, 1, 32, 0, 1, 16, 1, 4)  # decode behind more keys than a piece has
    yield Case("attention", "long-f32", build, 1e-11, (140, 3), ((137, 1), (1,)), shape, kv_dtype="f32")
    # Steps of 16 rows and more, that begin and that go on; heads in threes, so that rows are cut between blocks.
    for n, kv, dim in ((3, 1, 64), (4, 2, 128)):
        shape = StateShape(1, kv, dim, 0, 1, 16, 1, 4)
        build = partial(_attention, n=n, kv=kv, dim=dim, sharp=3.0)
        chunks = (17, 73), (3, 2), (15, 1, 17)
        yield Case("attention", f"{n}-{kv}-{dim}-several", build, 1e-9, (90, 5, 33), chunks, shape)
    for channels, kernel in ((5, 4), (37, 4), (128, 4), (33, 2), (16, 5)):
        build = partial(_conv, channels=channels, kernel=kernel)
        yield from _cuts(
            Case("conv1d_silu", f"{channels}k{kernel}", build, state=StateShape(0, 1, 16, 1, 1, 16, channels, kernel))
        )
    for nk, nv, d in ((2, 4, 16), (1, 1, 32), (2, 4, 64), (2, 6, 128), (3, 3, 48)):
        shape = StateShape(0, 1, 16, 1, nv, d, 1, 4)
        for label, bias, repeat in (
            ("mixed-decay", 0, False),
            ("keep", -10, False),
            ("forget", 10, False),
            ("repeat", -10, True),
        ):
            build = partial(_delta, nk=nk, nv=nv, d=d, bias=bias, repeat=repeat)
            yield from _cuts(Case("delta_net", f"{nk}-{nv}-{d}-{label}", build, 1e-9, state=shape))
    wide = partial(_delta, nk=2, nv=2, d=160, bias=0, repeat=False)
    yield from _cuts(Case("delta_net", "2-2-160-wide", wide, 1e-9, state=StateShape(0, 1, 16, 1, 2, 160, 1, 4)))
    for n in (63, 64, 65, 127, 128, 129, 200):
        build = partial(_delta, nk=2, nv=4, d=32, bias=0, repeat=False)
        yield Case("delta_net", f"T{n}", build, 1e-9, (n, 1), ((n,), (1,)), StateShape(0, 1, 16, 1, 4, 32, 1, 4))
    # Long and short sequences in one step, that go on and that begin; a step that ends within what is taken at once.
    mixed = (134, 5, 66, 64), ((70, 64), (1,), (1, 65), (64,))
    for nv, d, repeat in ((4, 32, False), (3, 20, True), (2, 128, True)):
        build = partial(_delta, nk=nv // 2, nv=nv, d=d, bias=-6, repeat=repeat, jumps=True)
        yield Case("delta_net", f"jumps-{nv}x{d}", build, 1e-9, *mixed, StateShape(0, 1, 16, 1, nv, d, 1, 4))


# ------------------------------------------------------------------------------------------ what backends may fuse


def _ffn(i: Inputs, fmt: str, width: int, inner: int) -> Value:
    """norm, gate and up, silu_mul, down, residual: the pattern of a dense feed-forward layer."""
    b, x = i.b, i.normal(width)
    h = b.rms_norm(x, _norm_weight(i, width), EPS, "norm")
    gate, up = (b.linear(h, random_tensor(i.rng, n, fmt, inner, width), n) for n in ("gate", "up"))
    return b.add(x, b.linear(b.silu_mul(gate, up, "act"), random_tensor(i.rng, "w", fmt, width, inner), "down"), "y")


def chain_cases() -> Iterator[Case]:
    """Chains of ops. With int8 activations the errors of two products add up."""
    for fmt in ("F32", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"):
        width, inner = (256, 512) if fmt.endswith("K") else (96, 160)
        bound = 1e-10 if fmt == "F32" else 10 * INT8
        yield Case(
            "ffn", fmt, partial(_ffn, fmt=fmt, width=width, inner=inner), bound, chunks=((1,), (2,), (9,), (40,))
        )


def all_cases() -> list[Case]:
    """Every case; ids are unique."""
    parts = (weight_cases(), plain_weight_cases(), _row_ops(), state_cases(), chain_cases())
    return [case for part in parts for case in part]
