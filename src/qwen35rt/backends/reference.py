"""The specification: every op of the program in NumPy, one at a time. Slow and obvious on purpose.

Owns dequantised copies of the weights and the state pools. Knows no kernels, no fusion and no model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import BackendError
from ..model.program import Op, Program, View
from .base import Batch, Limits, StepReport, check_batch, check_number, check_state

if TYPE_CHECKING:
    from ..model.weights import QTensor

Array = npt.NDArray[Any]
L2_EPS = 1e-6


class ReferenceBackend:
    """Compiles programs for NumPy. ``dtype`` float32 or float64 is used for all values, sums and states.

    Pages of type "f32" keep keys and values as they are, in ``dtype``.
    """

    name = "reference"

    def __init__(self, dtype: npt.DTypeLike = np.float32) -> None:
        self.dtype: np.dtype[Any] = np.dtype(dtype)

    def compile(self, program: Program, limits: Limits) -> ReferenceExecutable:
        """Allocate the state pools; weights are dequantised when an op first needs them."""
        return ReferenceExecutable(program, limits, self.dtype)


class ReferenceExecutable:
    """A program with its pools: delta [slots, layers, v_heads, d (value), d (key)], conv [slots, layers, channels,
    kernel - 1], keys and values [layers, pages, page_tokens, kv_heads, head_dim]."""

    def __init__(self, program: Program, limits: Limits, dtype: np.dtype[Any]) -> None:
        self.program, self.limits, self.dtype = program, limits, dtype
        s = program.state
        self.delta = np.zeros((limits.slots, s.delta_layers, s.v_heads, s.d, s.d), dtype)
        self.conv = np.zeros((limits.slots, s.delta_layers, s.channels, max(s.conv_kernel - 1, 0)), dtype)
        kv = (s.attention_layers, limits.pages, limits.page_tokens, s.kv_heads, s.head_dim)
        kept = np.float16 if limits.kv_dtype == "f16" else dtype
        self.keys, self.values = np.zeros(kv, kept), np.zeros(kv, kept)
        self._wanted: Array = np.zeros((0, program.logits.width), dtype)  # logits of the last step
        self._weights: dict[int, Array] = {}  # by id: the program keeps its tensors alive

    def run(self, batch: Batch, keep: Sequence[str] = (), top: int = 0) -> tuple[Array, StepReport]:
        """One step: -> logits [N, n_vocab] of the wanted rows in the working precision, all whatever ``top`` is, and
        the report.

        Values that are not finite pass through without a warning: finding them is the caller's business.
        """
        began = time.perf_counter()
        self._wanted = self._wanted[:0]
        check_batch(batch, self.limits, self.program.n_vocab)
        unknown = set(keep) - {v.name for v in self.program.values}
        if unknown:
            raise BackendError(f"the program has no value named {sorted(unknown)[0]!r}")
        for seq in sequences(batch):
            if seq.start == 0:
                self.delta[seq.slot] = 0
                self.conv[seq.slot] = 0
            elif seq.source != seq.slot:
                self.copy_slot(seq.source, seq.slot)
        made: dict[int, Array] = {}
        op_seconds: dict[str, float] = {}
        with np.errstate(all="ignore"):
            for op in self.program.ops:
                t0 = time.perf_counter()
                out = KERNELS[op.kind](self, batch, op, [read_view(made, view) for view in op.ins])
                if out is not None:
                    made[op.outs[0].id] = out.reshape(len(out), op.outs[0].width)
                op_seconds[op.kind] = op_seconds.get(op.kind, 0.0) + time.perf_counter() - t0
        kept = {v.name: made[v.id].copy() for v in self.program.values if v.name in keep}
        devices = {"cpu": len(self.program.ops)}
        report = StepReport(devices, time.perf_counter() - began, len(batch.tokens), op_seconds, kept)
        self._wanted = made[self.program.logits.id]
        return self._wanted, report

    def full_logits(self, row: int) -> Array:
        """All logits of a wanted row of the last step."""
        check_number("row", row, len(self._wanted))
        logits: Array = self._wanted[row]
        return logits

    def weight(self, tensor: QTensor) -> Array:
        """The tensor's numbers [rows, cols] or [n_expert, rows, cols]; dequantised once, F32 read where it lies."""
        if id(tensor) not in self._weights:
            self._weights[id(tensor)] = tensor.dequantize().astype(self.dtype, copy=False)
        return self._weights[id(tensor)]

    @property
    def state_bytes(self) -> int:
        """Bytes of one slot."""
        return self.program.state.state_bytes(self.delta.itemsize)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.program.state.page_bytes(self.limits.page_tokens, self.keys.itemsize)

    def copy_slot(self, source: int, target: int) -> None:
        """Copy a recurrent state."""
        check_number("slot", source, self.limits.slots)
        check_number("slot", target, self.limits.slots)
        self.delta[target] = self.delta[source]
        self.conv[target] = self.conv[source]

    def copy_page(self, source: int, target: int) -> None:
        """Copy keys and values of all layers."""
        check_number("page", source, self.limits.pages)
        check_number("page", target, self.limits.pages)
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]

    def read_slot(self, slot: int) -> tuple[Array, Array]:
        """-> delta state [layers, v_heads, d (value), d (key)], conv state [layers, channels, kernel - 1]; copies."""
        check_number("slot", slot, self.limits.slots)
        return self.delta[slot].copy(), self.conv[slot].copy()

    def write_slot(self, slot: int, delta: Array, conv: Array) -> None:
        """Put back what read_slot gave."""
        check_number("slot", slot, self.limits.slots)
        check_state(delta, self.delta.shape[1:], "delta")
        check_state(conv, self.conv.shape[1:], "conv")
        self.delta[slot] = delta
        self.conv[slot] = conv

    def close(self) -> None:
        """Drop the dequantised weights."""
        self._weights.clear()


# ---------------------------------------------------------------------------------------------- batches and views


class SequenceRows(NamedTuple):
    """One sequence of a batch: its rows of the step, tokens that it had before, where its state comes from and goes to,
    its pages, and for each of its rows after which the state is saved, the slot."""

    rows: slice
    start: int
    source: int
    slot: int
    pages: npt.NDArray[np.int32]
    saves: dict[int, int]


def sequences(batch: Batch) -> Iterator[SequenceRows]:
    """The sequences of a batch in order."""
    saves = dict(zip(batch.save_rows.tolist(), batch.save_slots.tolist(), strict=True))
    for s, (begin, end) in enumerate(zip(batch.row_offsets[:-1], batch.row_offsets[1:], strict=True)):
        rows = slice(int(begin), int(end))
        own = {row: slot for row, slot in saves.items() if rows.start <= row < rows.stop}
        yield SequenceRows(rows, int(batch.starts[s]), int(batch.sources[s]), int(batch.slots[s]), batch.pages[s], own)


def read_view(made: dict[int, Array], view: View) -> Array:
    """-> [rows, heads, dim]."""
    columns = view.offset + view.stride * np.arange(view.heads)[:, None] + np.arange(view.dim)
    return made[view.value.id][:, columns]


def places(seq: SequenceRows, first: int, end: int, page_tokens: int) -> tuple[Array, Array]:
    """Page number and place in it of the sequence's tokens first .. end - 1."""
    at = np.arange(first, end)
    return seq.pages[at // page_tokens], at % page_tokens


# ---------------------------------------------------------------------------------------------- formulas


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) without overflow."""
    e = np.exp(-np.abs(x))
    y: Array = np.where(x >= 0, 1, e).astype(x.dtype) / (1 + e)
    return y


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def softmax(x: Array) -> Array:
    """Over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    y: Array = e / e.sum(-1, keepdims=True)
    return y


def rms(x: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) over the last axis."""
    y: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(eps))
    return y


# ---------------------------------------------------------------------------------------------- ops
# Each takes the executable, the batch, the op and its inputs [rows, heads, dim], and returns [rows, ...].


def embed(exe: ReferenceExecutable, batch: Batch, op: Op, ins: list[Array]) -> Array:
    return exe.weight(op.weights[0])[batch.tokens]


def rms_norm(exe: ReferenceExecutable, batch: Batch, op: Op, ins: list[Array]) -> Array:
    y: Array = rms(ins[0], op.attrs["eps"]) * op.vectors[0].astype(exe.dtype)
    return y


def linear(exe: ReferenceExecutable, batch: Batch, op: Op, ins: list[Array]) -> Array:
    return ins[0][:, 0] @ exe.weight(op.weights[0]).T


def rope(exe: ReferenceExecutable, batch: Batch, op: Op, ins: list[Array]) -> Array:
    rot, sections = op.attrs["rot"], op.attrs["sections"]
    half = rot // 2
    j = np.arange(half)
    axis = np.zeros(half, np.intp)  # which of the three positions turns pair j
    axis[(j % 3 == 1) & (j < 3 * sections[1])] = 1
    axis[(j % 3 == 2) & (j < 3 * sections[2])] = 2
    angle = batch.positions[axis].T * op.attrs["theta"] ** (-2.0 * j / rot)  # float64 [T, half]
    cos, sin = np.cos(angle)[:, None].astype(exe.dtype), np.sin(angle)[:, None].astype(exe.dtype)
    a, b = ins[0][..., :half], ins[0][..., half:rot]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, ins[0][..., rot:]], -1)


def kv_append(exe: ReferenceExecutable, batch: Batch, op: Op, ins: list[Array]) -> None:
    for seq in sequences(batch):
        count = seq.rows.stop - seq.rows.start
        page, place = places(seq, seq.start, seq.start + count, exe.limits.page_tokens)
        exe.keys[op.layer, page, place] = ins[0][seq.rows]
        exe.values[op.layer, page, place] = ins[1][seq.rows]


def attention(exe: ReferenceExecutable, batch: Batch, op: Op, ins: list[Array]) -> Array:
    out = np.empty_like(ins[0])
    scale = 1 / math.sqrt(ins[0].shape[-1])
    for seq in sequences(batch):
        q = ins[0][seq.rows]  # [n, heads, dim]
        end = seq.start + len(q)
        page, place = places(seq, 0, end, exe.limits.page_tokens)
        group = q.shape[1] // op.attrs["kv_heads"]
        k = exe.keys[op.layer, page, place].astype(exe.dtype).repeat(group, 1).transpose(1, 2, 0)  # [heads, dim, end]
        v = exe.values[op.layer, page, place].astype(exe.dtype).repeat(group, 1).transpose(1, 0, 2)  # [heads, end, dim]
        scores = q.transpose(1, 0, 2) @ k * exe.dtype.type(scale)
        later = np.arange(end) > np.arange(seq.start, end)[:, None]
        scores[:, later] = -np.inf
        out[seq.rows] = (softmax(scores) @ v).transpose(1, 0, 2)
    return out


def sigmoid_mul(exe: ReferenceExecutable, batch: Batch, op: Op, ins: list[Array]) -> Array:
    return ins[0] * sigmoid(ins[1])


def conv1d_silu(exe: ReferenceExecutable, batch: Batch, op: Op, ins: list[Array]) -> Array:
    x = ins[0][:, 0]
    w = op.vectors[0].astype(exe.dtype)  # [channels, kernel], last tap newest
    taps = w.shape[1]
    out = np.empty_like(x)
    for seq in sequences(batch):
        state = exe.conv[seq.slot, op.layer]  # [channels, kernel - 1], oldest first
        past = np.concatenate([state.T, x[seq.rows]])
        n = len(past) - (taps - 1)
        out[seq.rows] = silu(np.asarray(sum(past[i : i + n] * w[:, i] for i in range(taps))))
        state[:] = past[n:].T
        for row, slot in seq.saves.items():
            after = row - seq.rows.start + 1
            exe.conv[slot, op.layer] = past[after : after + taps - 1].T
    return out


def delta_gates(exe: ReferenceExecutable, batch: Batch, op: Op, ins: list[Array]) -> Array:
    a, b = ins[0][:, 0], ins[1][:, 0]
    dt_bias, a_neg = (v.astype(exe.dtype) for v in op.vectors)
    g = np.logaddexp(exe.dtype.type(0), a + dt_bias) * a_neg
    return np.concatenate([g, sigmoid(b)], -1)


def l2_norm(exe: ReferenceExecutable, batch: Batch, op: Op, ins: list[Array]) -> Array:
    x = ins[0]
    root = np.sqrt((x * x).sum(-1, keepdims=True) + exe.dtype.type(L2_EPS))
    y: Array = x / root * exe.dtype.type(op.attrs["scale"])
    return y


def delta_net(exe: ReferenceExecutable, batch: Batch, op: Op, ins: list[Array]) -> Array:
    q, k, v, gates = ins
    heads = v.shape[1]
    key_head = np.arange(heads) % q.shape[1]
    q, k = q[:, key_head], k[:, key_head]
    decay, beta = np.exp(gates[:, 0, :heads]), gates[:, 0, heads:]
    out = np.empty_like(v)
    for seq in sequences(batch):
        state = exe.delta[seq.slot, op.layer]  # [heads, d (value), d (key)], updated in place
        for t in range(seq.rows.start, seq.rows.stop):
            state *= decay[t][:, None, None]
            error = v[t] - (state @ k[t][:, :, None])[:, :, 0]
            state += (beta[t][:, None] * error)[:, :, None] * k[t][:, None, :]
            out[t] = (state @ q[t][:, :, None])[:, :, 0]
            if t in seq.saves:
                exe.delta[seq.saves[t], op.layer] = state
    return out


def gated_rms_norm(exe: ReferenceExecutable, batch: Batch, op: Op, ins: list[Array]) -> Array:
    y: Array = rms(ins[0], op.attrs["eps"]) * op.vectors[0].astype(exe.dtype) * silu(ins[1])
    return y


def silu_mul(exe: ReferenceExecutable, batch: Batch, op: Op, ins: list[Array]) -> Array:
    return silu(ins[0]) * ins[1]


def add(exe: ReferenceExecutable, batch: Batch, op: Op, ins: list[Array]) -> Array:
    return ins[0] + ins[1]


def moe_route(exe: ReferenceExecutable, batch: Batch, op: Op, ins: list[Array]) -> Array:
    scores = ins[0][:, 0]
    chosen = np.argsort(-scores, -1, kind="stable")[:, : op.attrs["used"]]
    weight = softmax(np.take_along_axis(scores, chosen, -1))
    return np.concatenate([chosen.astype(exe.dtype), weight], -1)


def moe_linear(exe: ReferenceExecutable, batch: Batch, op: Op, ins: list[Array]) -> Array:
    used, reduce = op.attrs["used"], op.attrs["reduce"]
    tensor = op.weights[0]
    w = exe.weight(tensor).reshape(tensor.n_expert, tensor.rows, tensor.cols)
    route = ins[1][:, 0]
    chosen, weight = route[:, :used].astype(np.intp), route[:, used:]
    x = ins[0][:, 0].reshape(len(route), -1, w.shape[2])  # [T, used or 1, in]
    x = np.broadcast_to(x, (len(route), used, w.shape[2]))
    products = np.empty((len(route), used, w.shape[1]), exe.dtype)
    for expert in np.unique(chosen):
        at = chosen == expert
        products[at] = x[at] @ w[expert].T
    if not reduce:
        return products
    total = np.zeros((len(route), w.shape[1]), exe.dtype)
    for i in range(used):
        total += weight[:, i, None] * products[:, i]
    return total


def gather_rows(exe: ReferenceExecutable, batch: Batch, op: Op, ins: list[Array]) -> Array:
    return ins[0][batch.out_rows]


Kernel = Callable[[ReferenceExecutable, Batch, Op, list[Array]], "Array | None"]
KERNELS: dict[str, Kernel] = {
    "embed": embed,
    "rms_norm": rms_norm,
    "linear": linear,
    "rope": rope,
    "kv_append": kv_append,
    "attention": attention,
    "sigmoid_mul": sigmoid_mul,
    "conv1d_silu": conv1d_silu,
    "delta_gates": delta_gates,
    "l2_norm": l2_norm,
    "delta_net": delta_net,
    "gated_rms_norm": gated_rms_norm,
    "silu_mul": silu_mul,
    "add": add,
    "moe_route": moe_route,
    "moe_linear": moe_linear,
    "gather_rows": gather_rows,
}
