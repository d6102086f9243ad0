"""Turns the nodes of a program into launches: kernels, their arguments, grids, blocks and shared memory.

Receives the launcher; imports no device library. The sizes of grids come from a Step, everything else is fixed here.
Kernels read counts on the device, so a Step may name more rows and sequences than there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...errors import BackendError
from ...model.program import Op, Value
from ...model.weights import QTensor
from .fusion import Node, Part
from .interface import NOTHING
from .lowering import Go, Lowered, Lowering, Step, count, i32, up
from .room import shared_room

# Sizes that kernels are written for; see the constants of the same names in cuda/.
WARPS, ROWS_OF_WARP, MAX_PARTS = 4, 2, 4
QUERIES, CHUNK, MAX_HEAD_DIM = 16, 32, 256
TILE_QUERIES, TILE_KEYS, TILE_DIMS = 32, 64, (64, 128, 256)
ATTENTION_TILES_FROM = 16  # rows of a sequence from which attention is on tensor cores
TILE_ROWS, TILE_X, TILES_BYTES = 64, 64, 24_576
TILES_FROM = 16  # rows of x from which tiles on tensor cores take less time than passes over 8 rows
CONV_TILE, MAX_TAPS = 32, 8
DELTA_LANES, DELTA_ROWS, DELTA_COLUMNS = 8, 32, (4, 8, 16, 32)
DELTA_CHUNK, DELTA_VALUES, DELTA_SQUARE, DELTA_ROOM = 32, 16, 36, 64
CHUNKS_FROM = 64  # rows of a sequence from which the delta rule takes chunks
ALL_LENGTHS = 2**31 - 1


def lower(lo: Lowering) -> Lowered:
    """All launches of a program. Raises BackendError for sizes that no kernel is written for."""
    ops = tuple((node.op.kind, tuple(LOWER[node.op.kind](lo, node))) for node in lo.nodes)
    values = {v.name: lo.array(v) for v in lo.program.values if lo.has(v)}
    return Lowered(ops, values, lo.array(lo.program.logits), lo.nbytes)


# ------------------------------------------------------------------------------------------ ops
# Each takes the lowering and a node, and gives its launches.


def embed(lo: Lowering, node: Node) -> Iterator[Go]:
    op = node.op
    w = op.weights[0]
    data, scale = lo.weight(w)
    units = w.cols // 32 if w.format.quantized else w.cols
    args = data, scale, lo.array(op.outs[0]), lo.step, *i32(w.cols, w.row_bytes)
    yield lo.launch("embed", "embed", lambda s: (up(units, 128), s.rows, 1), 128, 0, *args, variant=w.format.name)


def _input(lo: Lowering, value: Value, w: QTensor) -> tuple[Any, list[Go]]:
    """The input of a product: as blocks of int8 where the weights are quantised."""
    return lo.quants(value) if w.format.quantized else (lo.array(value), [])


def linear(lo: Lowering, node: Node) -> Iterator[Go]:
    by_format: dict[str, list[Part]] = {}
    for part in node.parts:
        by_format.setdefault(part.w.format.name, []).append(part)
    for parts in by_format.values():
        for at in range(0, len(parts), MAX_PARTS):
            yield from _products(lo, node.op.ins[0].value, parts[at : at + MAX_PARTS])


def _products(lo: Lowering, value: Value, parts: list[Part]) -> Iterator[Go]:
    """One launch for matrices of one format."""
    w, gathered = parts[0].w, parts[0].out.gathered
    x, before = _input(lo, value, w)
    yield from before
    args: list[Any] = []
    for part in parts:
        residual = NOTHING if part.residual is None else lo.array(part.residual)
        args += [*lo.weight(part.w), residual, lo.array(part.out), np.int32(part.w.rows)]
    args += [NOTHING, NOTHING, NOTHING, NOTHING, np.int32(0)] * (MAX_PARTS - len(parts))
    args += [x, lo.step, *i32(count(gathered), w.cols, w.row_bytes)]
    kernels = {n: lo.launcher.kernel("linear", w.format.name, f"linear_{n}") for n in (1, 2, 4, 8)}
    blocks = sum(up(p.w.rows, WARPS * ROWS_OF_WARP) for p in parts)
    tile_blocks = sum(up(p.w.rows, TILE_ROWS) for p in parts)
    tiles = None
    if w.format.quantized and lo.tensor_cores:
        tiles = lo.launcher.kernel("linear_tiles", w.format.name, "linear_tiles")

    def go(step: Step) -> None:
        rows = step.of(gathered)
        if tiles is not None and rows >= TILES_FROM:
            tiles((tile_blocks, up(rows, TILE_X), 1), 128, TILES_BYTES, tuple(args))
        elif rows:
            n = 8 if rows > 4 else 4 if rows > 2 else rows
            kernels[n]((blocks, up(rows, n), 1), 32 * WARPS, 0, tuple(args))

    yield go


def moe_linear(lo: Lowering, node: Node) -> Iterator[Go]:
    op = node.op
    w, used, reduce = op.weights[0], op.attrs["used"], op.attrs["reduce"]
    data, scale = lo.weight(w)
    x, before = _input(lo, op.ins[0].value, w)
    yield from before
    scales = 0 if w.scale is None else w.scale.size
    sizes = i32(w.n_expert, scales, used, w.rows, w.cols, w.row_bytes)
    args = data, scale, x, lo.array(op.ins[1].value), lo.array(op.outs[0]), lo.step, *sizes
    name, depth = ("moe_linear_reduce", 1) if reduce else ("moe_linear", used)
    blocks = up(w.rows, WARPS)
    form = w.format.name
    yield lo.launch("moe_linear", name, lambda s: (blocks, s.rows, depth), 32 * WARPS, 0, *args, variant=form)


def _heads(lo: Lowering, op: Op | None) -> tuple[Any, ...]:
    """A view and its output; NOTHING without heads for none."""
    if op is None:
        return NOTHING, *i32(0, 0, 0, 0), NOTHING
    x = op.ins[0]
    return *lo.view(x), np.int32(x.heads), lo.array(op.outs[0])


def _norm(lo: Lowering, node: Node, *args: Any) -> Iterator[Go]:
    """A launch with a block for each head."""
    x, gathered = node.op.ins[0], node.op.outs[0].gathered
    heads = x.heads + (node.second.ins[0].heads if node.second else 0)
    block = 32 * min(8, up(x.dim, 128))
    yield lo.launch("norms", node.op.kind, lambda s: (heads, s.of(gathered), 1), block, 32, *args)


def _rows_of(lo: Lowering, node: Node) -> tuple[Any, ...]:
    """The step and where it has the number of rows of a node."""
    return lo.step, np.int32(count(node.op.outs[0].gathered))


def rms_norm(lo: Lowering, node: Node) -> Iterator[Go]:
    op, second = node.op, node.second
    w = [lo.vector(op.vectors[0]), lo.vector(second.vectors[0]) if second else NOTHING]
    dim, eps = np.int32(op.ins[0].dim), np.float32(op.attrs["eps"])
    args = *_heads(lo, op), w[0], *_heads(lo, second), w[1], dim, lo.own_quants(node), *_rows_of(lo, node), eps
    return _norm(lo, node, *args)


def gated_rms_norm(lo: Lowering, node: Node) -> Iterator[Go]:
    op = node.op
    dim, eps = np.int32(op.ins[0].dim), np.float32(op.attrs["eps"])
    z, w = lo.view(op.ins[1]), lo.vector(op.vectors[0])
    return _norm(lo, node, *_heads(lo, op), *z, w, dim, lo.own_quants(node), *_rows_of(lo, node), eps)


def l2_norm(lo: Lowering, node: Node) -> Iterator[Go]:
    op, second = node.op, node.second
    scales = [np.float32(o.attrs["scale"] if o else 0) for o in (op, second)]
    first, other = (*_heads(lo, op), scales[0]), (*_heads(lo, second), scales[1])
    return _norm(lo, node, *first, *other, np.int32(op.ins[0].dim), *_rows_of(lo, node))


def combine(lo: Lowering, node: Node) -> Iterator[Go]:
    """silu_mul, sigmoid_mul, add."""
    op = node.op
    out = op.outs[0]
    a, b = (
        (lo.array(v.value), *i32(v.value.width, v.offset, v.dim, v.stride)) for v in op.ins
    )  # width, offset, dim, stride
    args = (
        *a,
        *b,
        np.int32(op.ins[1].width),
        lo.array(out),
        lo.own_quants(node),
        lo.step,
        *i32(count(out.gathered), out.width),
    )
    yield lo.launch("elementwise", op.kind, lambda s: (up(out.width, 128), s.of(out.gathered), 1), 128, 0, *args)


def delta_gates(lo: Lowering, node: Node) -> Iterator[Go]:
    op = node.op
    out, heads = op.outs[0], op.ins[0].width
    a, b = (lo.view(v)[:3] for v in op.ins)
    vectors = (lo.vector(v) for v in op.vectors)
    args = *a, *b, *vectors, lo.array(out), lo.step, *i32(count(out.gathered), heads)
    yield lo.launch("elementwise", "delta_gates", lambda s: (up(heads, 128), s.of(out.gathered), 1), 128, 0, *args)


def gather_rows(lo: Lowering, node: Node) -> Iterator[Go]:
    op = node.op
    x, out = op.ins[0].value, op.outs[0]
    args = lo.array(x), np.int32(x.width), lo.array(out), lo.step, np.int32(out.width)
    yield lo.launch("elementwise", "gather_rows", lambda s: (up(out.width, 128), s.outs, 1), 128, 0, *args)


def rope(lo: Lowering, node: Node) -> Iterator[Go]:
    op, rot, sections = node.op, node.op.attrs["rot"], node.op.attrs["sections"]
    turns = lo.vector(op.attrs["theta"] ** (-2.0 * np.arange(rot // 2) / rot), np.float64)
    width = op.ins[0].width + (node.second.ins[0].width if node.second else 0)
    sizes = i32(rot, 3 * sections[1], 3 * sections[2])
    args = *_heads(lo, op), *_heads(lo, node.second), np.int32(op.ins[0].dim), turns, *sizes, lo.step
    yield lo.launch("rope", "rope", lambda s: (up(width, 128), s.rows, 1), 128, 0, *args)


def _pool(lo: Lowering, op: Op) -> tuple[np.int32, ...]:
    shape = lo.program.state
    if shape.head_dim > MAX_HEAD_DIM:
        raise BackendError(f"heads of {shape.head_dim} columns; the CUDA kernels take up to {MAX_HEAD_DIM}")
    return i32(op.layer, lo.limits.pages, shape.kv_heads, lo.limits.page_tokens, shape.head_dim)


def kv_append(lo: Lowering, node: Node) -> Iterator[Go]:
    op = node.op
    k, v = op.ins
    args = *lo.view(k), *lo.view(v), lo.pools.keys, lo.pools.values, lo.step, *_pool(lo, op)
    grid = up(k.width, 128)
    yield lo.launch("kv_append", "kv_append", lambda s: (grid, s.rows, 1), 128, 0, *args, variant=lo.limits.kv_dtype)


def attention(lo: Lowering, node: Node) -> Iterator[Go]:
    op = node.op
    q, kv_heads = op.ins[0], op.attrs["kv_heads"]
    heads, dim, group = q.heads, q.dim, q.heads // kv_heads
    out, parts = lo.array(op.outs[0]), lo.parts(heads, dim)
    pool = _pool(lo, op)
    shared = 4 * (QUERIES * dim + CHUNK * (dim + 1) + QUERIES * CHUNK)
    on_tiles = lo.tensor_cores and lo.limits.kv_dtype == "f16" and dim in TILE_DIMS
    below = ATTENTION_TILES_FROM if on_tiles else ALL_LENGTHS
    args = *lo.view(q), lo.pools.keys, lo.pools.values, out, parts, lo.step, *pool, *i32(heads, below)
    attend = lo.launcher.kernel("attention", lo.limits.kv_dtype, "attention")
    merge = lo.launcher.kernel("attention", lo.limits.kv_dtype, "attention_merge")

    def go(step: Step) -> None:
        tiles = sum(up(n * group, QUERIES) for n in step.counts if n < below)
        if tiles:
            attend((tiles, kv_heads, max(step.pieces, 1)), 128, shared, (*args, np.int32(step.pieces > 0)))
        if step.pieces:
            merge((up(heads, 4), step.rows, 1), 128, 0, (parts, out, lo.step, *i32(heads, dim, step.pieces)))

    yield go
    if on_tiles:
        tile_bytes = 2 * ((2 * TILE_QUERIES + TILE_KEYS) * (dim + 8) + 2 * TILE_QUERIES * (TILE_KEYS + 8))
        in_tiles = lo.launcher.kernel("attention_tiles", "", f"attention_tiles_{dim}")
        tile_args = *lo.view(q), lo.pools.keys, lo.pools.values, out, lo.step, *pool[:-1], *i32(heads, below)

        def go_in_tiles(step: Step) -> None:
            tiles = sum(up(n * group, TILE_QUERIES) for n in step.counts if n >= below)
            if tiles:
                in_tiles((tiles, kv_heads, 1), 128, tile_bytes, tile_args)

        yield go_in_tiles


def conv1d_silu(lo: Lowering, node: Node) -> Iterator[Go]:
    op = node.op
    shape, x = lo.program.state, lo.array(op.ins[0].value)
    if shape.conv_kernel > MAX_TAPS:
        raise BackendError(f"a convolution over {shape.conv_kernel} rows; the CUDA kernels take up to {MAX_TAPS}")
    sizes = i32(shape.delta_layers, op.layer, shape.channels, shape.conv_kernel)
    args = x, lo.vector(op.vectors[0]), lo.pools.conv, lo.array(op.outs[0]), lo.step, *sizes
    conv = lo.launcher.kernel("conv1d_silu", "", "conv1d_silu")
    keep = lo.launcher.kernel("conv1d_silu", "", "conv1d_keep")
    blocks = up(shape.channels, 128)

    def go(step: Step) -> None:
        tiles, seqs = up(max(step.counts), CONV_TILE), len(step.counts)
        conv((blocks, seqs, tiles), 128, 0, (*args, np.int32(tiles == 1)))
        if tiles > 1:
            keep((blocks, seqs, 1), 128, 0, (x, lo.pools.conv, lo.step, *sizes))

    yield go


def delta_net(lo: Lowering, node: Node) -> Iterator[Go]:
    op = node.op
    q, k, v, gates = op.ins
    d, heads = v.dim, v.heads
    columns = next((c for c in DELTA_COLUMNS if c * DELTA_LANES >= d), None)
    if columns is None:
        raise BackendError(f"delta-rule heads of {d}; the CUDA kernels take up to {DELTA_LANES * DELTA_COLUMNS[-1]}")
    name, blocks, out = f"delta_net_{columns}", up(d, DELTA_ROWS), lo.array(op.outs[0])
    keys, g, sizes = (
        (*lo.view(q), *lo.view(k), np.int32(k.heads)),
        lo.array(gates.value),
        i32(lo.program.state.delta_layers, op.layer, d),
    )
    in_chunks = lo.tensor_cores and lo.limits.rows >= CHUNKS_FROM
    below = np.int32(CHUNKS_FROM if in_chunks else ALL_LENGTHS)
    row_after_row = lo.launcher.kernel("delta_net", "", name)
    args = *keys, *lo.view(v), g, lo.pools.delta, out, lo.step, below, *sizes

    def go(step: Step) -> None:
        if min(step.counts) < below:
            row_after_row((blocks, heads, len(step.counts)), 256, 0, args)

    yield go
    if in_chunks:
        room = shared_room(lo, heads * DELTA_ROOM)
        ld = 4 * up(d, 4) + 4
        squares = 2 * DELTA_CHUNK * DELTA_SQUARE
        prepare_bytes = 4 * (2 * DELTA_CHUNK * ld + squares + DELTA_CHUNK)
        walk_bytes = 4 * ((2 * DELTA_CHUNK + DELTA_VALUES) * ld + squares + DELTA_CHUNK * (2 * DELTA_VALUES + 3))
        prepare, walk = (lo.launcher.kernel("delta_chunks", "", n) for n in ("delta_prepare", "delta_walk"))
        prepare_args = *keys, g, room, lo.step, below, np.int32(d)
        walk_args = *keys, *lo.view(v), g, room, lo.pools.delta, out, lo.step, below, *sizes

        def go_in_chunks(step: Step) -> None:
            longest, seqs = max(step.counts), len(step.counts)
            if longest >= CHUNKS_FROM:
                prepare((up(longest, DELTA_CHUNK), heads, seqs), 128, prepare_bytes, prepare_args)
                walk((up(d, DELTA_VALUES), heads, seqs), 128, walk_bytes, walk_args)

        yield go_in_chunks


def moe_route(lo: Lowering, node: Node) -> Iterator[Go]:
    op = node.op
    x, out = op.ins[0], op.outs[0]
    args = *lo.view(x)[:3], *i32(x.width, op.attrs["used"]), lo.array(out), lo.step, np.int32(count(out.gathered))
    yield lo.launch("moe_route", "moe_route", lambda s: (s.of(out.gathered), 1, 1), 32, 0, *args)


LOWER: dict[str, Callable[[Lowering, Node], Iterator[Go]]] = {
    "embed": embed,
    "rms_norm": rms_norm,
    "linear": linear,
    "rope": rope,
    "kv_append": kv_append,
    "attention": attention,
    "sigmoid_mul": combine,
    "conv1d_silu": conv1d_silu,
    "delta_gates": delta_gates,
    "l2_norm": l2_norm,
    "delta_net": delta_net,
    "gated_rms_norm": gated_rms_norm,
    "silu_mul": combine,
    "add": combine,
    "moe_route": moe_route,
    "moe_linear": moe_linear,
    "gather_rows": gather_rows,
}
