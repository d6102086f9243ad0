"""Turns a Program into the array of C structs that one call of csrc/run.c walks.

Three rules fuse ops; each leaves every result bit for bit as it was: those of backends/fusion.py, and
``quantize_with_producer``: a value that meets quantised weights is quantised where it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ...model.program import Op, Program, Value, View
from ...model.weights import QTensor
from .. import fusion
from ..base import Limits
from ..fusion import PRODUCTS, QUANTIZING, Part, join_linears, residual_into_linear
from .structs import FORMAT, KIND, OP, PART, QUANT, TENSOR, VIEW

Bytes = npt.NDArray[np.uint8]


@dataclass
class Node(fusion.Node):
    """An op of the lowered list."""

    quantizes: bool = False  # writes the quantised form of its output too


@dataclass(frozen=True)
class Lowered:
    """The C op array, what it points to, and where to find values. ``keep_alive`` must outlive every run."""

    ops: Bytes
    op_kinds: list[str]
    values: dict[str, npt.NDArray[np.float32]]  # those whose memory is not reused
    logits: npt.NDArray[np.float32]
    nbytes: int  # of the workspace
    keep_alive: list[object]


def to_nodes(program: Program) -> list[Node]:
    """One node per op; the reduction of routed experts becomes a product and a sum of its own."""
    nodes: list[Node] = []
    n = len(program.values)
    for op in program.ops:
        if op.kind == "attention":  # long sequences are split over threads; the second op joins the pieces
            nodes += [Node(op), Node(replace(op, kind="attention_merge"), ops=0)]
            continue
        if op.kind == "moe_linear" and op.attrs["reduce"]:
            out, w = op.outs[0], op.weights[0]
            per_expert = Value(n, out.name + ".experts", op.attrs["used"] * w.rows, out.gathered)
            n += 1
            nodes.append(Node(op, [Part(w, per_expert)]))
            merged = replace(op, kind="moe_sum", ins=(per_expert.view(), op.ins[1]), weights=())
            nodes.append(Node(merged, ops=0))
        elif op.kind in PRODUCTS or op.kind == "embed":
            nodes.append(Node(op, [Part(op.weights[0], op.outs[0])]))
        else:
            nodes.append(Node(op))
    return nodes


def quantize_with_producer(nodes: list[Node], fuse: bool) -> list[Node]:
    """Marks who quantises each value that meets quantised weights; adds a ``quantize`` node where nobody can."""
    needed = {
        node.op.ins[0].value.id
        for node in nodes
        if node.op.kind in PRODUCTS and any(p.w.format.quantized for p in node.parts)
    }
    out: list[Node] = []
    for node in nodes:
        out.append(node)
        for value in node.outs:
            if value.id not in needed:
                continue
            if fuse and node.op.kind in QUANTIZING:
                node.quantizes = True
            else:
                op = Op("quantize", (), (value.view(),))
                out.append(Node(op, ops=0, quantizes=True))
    return out


class Arena:
    """Hands out byte ranges of one allocation; a range is free again after ``release``."""

    def __init__(self) -> None:
        self.size = 0
        self.free: list[tuple[int, int]] = []  # (offset, bytes), by offset

    def take(self, nbytes: int) -> int:
        nbytes = (nbytes + 127) // 64 * 64  # at least 64 spare bytes: vector loads may run past a row's end
        best = min((f for f in self.free if f[1] >= nbytes), key=lambda f: f[1], default=None)
        if best is None:
            self.size += nbytes
            return self.size - nbytes
        self.free.remove(best)
        if best[1] > nbytes:
            self.free.append((best[0] + nbytes, best[1] - nbytes))
        return best[0]

    def release(self, offset: int, nbytes: int) -> None:
        nbytes = (nbytes + 127) // 64 * 64
        self.free.append((offset, nbytes))
        self.free.sort()
        merged: list[tuple[int, int]] = []
        for start, length in self.free:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self.free = merged


def quant_bytes(rows: int, width: int) -> int:
    """Bytes of a quantised value: int8, then scale and sum per 32, sums per 16, and both kinds of sums as integers."""
    return rows * (width + 28 * (width // 32))


def lower(program: Program, limits: Limits, fuse: bool = True) -> Lowered:
    """Lay out values and build the op array. ``fuse`` false keeps every named value readable after a run."""
    nodes = to_nodes(program)
    if fuse:
        nodes = residual_into_linear(join_linears(nodes), (program.hidden, program.logits))
    nodes = quantize_with_producer(nodes, fuse)

    def rows_of(value: Value) -> int:
        return limits.out_rows if value.gathered else limits.rows

    last_use: dict[int, int] = {}
    for i, node in enumerate(nodes):
        for value in (*node.outs, *node.reads):
            last_use[value.id] = i
    last_use[program.logits.id] = len(nodes)
    if not fuse:
        last_use = dict.fromkeys(last_use, len(nodes))

    arena = Arena()
    place: dict[int, int] = {}
    quant_place: dict[int, int] = {}
    live: list[Value] = []
    for i, node in enumerate(nodes):
        for value in node.outs:
            if value.id not in place:  # both halves of attention write the same value
                place[value.id] = arena.take(4 * rows_of(value) * value.width)
                live.append(value)
        if node.quantizes:
            value = node.op.ins[0].value if node.op.kind == "quantize" else node.outs[0]
            quant_place[value.id] = arena.take(quant_bytes(rows_of(value), value.width))
        for value in [v for v in live if last_use[v.id] <= i]:
            live.remove(value)
            arena.release(place[value.id], 4 * rows_of(value) * value.width)
            if value.id in quant_place:
                arena.release(quant_place[value.id], quant_bytes(rows_of(value), value.width))

    memory = np.empty(arena.size + 64, np.uint8)
    base = (memory.ctypes.data + 63) // 64 * 64
    ops = np.zeros(len(nodes), OP)
    parts = np.zeros(sum(len(n.parts) for n in nodes), PART)
    keep: list[object] = [memory, parts, program]

    def view(v: View) -> npt.NDArray[np.void]:
        out = np.zeros((), VIEW)
        out["ptr"] = base + place[v.value.id] + 4 * v.offset
        out["ld"], out["heads"], out["dim"], out["stride"] = v.value.width, v.heads, v.dim, v.stride
        return out

    def quant(value: Value, cols: int) -> npt.NDArray[np.void]:
        out = np.zeros((), QUANT)
        n, at = rows_of(value) * value.width, base + quant_place[value.id]
        out["q"], out["d"], out["s32"], out["s16"] = at, at + n, at + n + n // 8, at + n + n // 4
        out["n32"], out["n16"] = at + n + n // 2, at + n + n // 2 + n // 8
        out["cols"] = cols
        return out

    p = 0
    for i, node in enumerate(nodes):
        row, op = ops[i], node.op
        row["kind"], row["layer"] = KIND[op.kind], op.layer
        row["gathered"] = any(v.value.gathered for v in op.ins[:1]) or any(v.gathered for v in node.outs)
        if node.outs:
            row["out"] = view(_out_view(op, node.outs[0]))
        for j, v in enumerate(op.ins):
            row["ins"][j] = view(v)
        for j, vector in enumerate(op.vectors):
            vector = np.ascontiguousarray(vector, np.float32)
            keep.append(vector)
            row["vec"][j] = vector.ctypes.data
        _attributes(row, op)
        row["parts"], row["n_parts"] = parts.ctypes.data + p * PART.itemsize, len(node.parts)
        for part in node.parts:
            parts[p]["w"] = _tensor(part.w, keep)
            parts[p]["out"] = view(part.out.view())
            if part.residual is not None:
                parts[p]["residual"] = base + place[part.residual.id]
            p += 1
        if op.kind in PRODUCTS and op.ins[0].value.id in quant_place:
            row["quant"] = quant(op.ins[0].value, node.parts[0].w.cols)
        elif node.quantizes:
            value = op.ins[0].value if op.kind == "quantize" else node.outs[0]
            row["quant"] = quant(value, value.width)

    def array(value: Value) -> npt.NDArray[np.float32]:
        start = base - memory.ctypes.data + place[value.id]
        n = rows_of(value) * value.width
        return memory[start : start + 4 * n].view(np.float32).reshape(rows_of(value), value.width)

    values = {} if fuse else {v.name: array(v) for v in program.values if v.id in place}
    return Lowered(
        ops.view(np.uint8).reshape(-1), [n.op.kind for n in nodes], values, array(program.logits), memory.nbytes, keep
    )


def _out_view(op: Op, out: Value) -> View:
    """Outputs have the heads of the first input where the op works head by head."""
    if op.ins and op.ins[0].heads > 1 and op.ins[0].width == out.width:
        return out.view(op.ins[0].heads, op.ins[0].dim)
    if op.kind == "delta_net":
        return out.view(op.ins[2].heads, op.ins[2].dim)
    return out.view()


def _attributes(row: npt.NDArray[np.void], op: Op) -> None:
    a = op.attrs
    if op.kind in ("rms_norm", "gated_rms_norm"):
        row["f"][0] = a["eps"]
    elif op.kind == "l2_norm":
        row["f"][0] = a["scale"]
    elif op.kind == "rope":
        row["f"][0] = a["theta"]
        row["n"][0], row["n"][1], row["n"][2] = a["rot"], a["sections"][1], a["sections"][2]
    elif op.kind in ("attention", "attention_merge"):
        row["n"][0] = a["kv_heads"]
    elif op.kind in ("moe_route", "moe_sum"):
        row["n"][0] = a["used"]
    elif op.kind == "moe_linear":
        row["n"][0], row["n"][1] = a["used"], int(a["reduce"])


def _tensor(w: QTensor, keep: list[object]) -> npt.NDArray[np.void]:
    out = np.zeros((), TENSOR)
    keep.append(w)
    out["data"], out["format"], out["experts"] = w.data.ctypes.data, FORMAT[w.format.name], w.n_expert
    out["rows"], out["cols"], out["row_bytes"], out["expert_bytes"] = w.rows, w.cols, w.row_bytes, w.expert_stride
    if w.scale is not None:
        scale = np.ascontiguousarray(w.scale, np.float32)
        keep.append(scale)
        out["scale"] = scale.ctypes.data
    return out
