"""The model as a list of ops over named values. Owns Value, View, Op, Program and Builder.

A value is a float32 array ``[rows, width]``; ``rows`` is the number T of token rows of a step, or the number of
rows whose logits are wanted for values made by ``gather_rows`` and after. Nothing here knows devices or batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .weights import QTensor

Vector = npt.NDArray[np.float32]

OP_KINDS: tuple[str, ...] = (
    "embed",
    "rms_norm",
    "linear",
    "rope",
    "kv_append",
    "attention",
    "sigmoid_mul",
    "conv1d_silu",
    "delta_gates",
    "l2_norm",
    "delta_net",
    "gated_rms_norm",
    "silu_mul",
    "add",
    "moe_route",
    "moe_linear",
    "gather_rows",
)


@dataclass(frozen=True)
class Value:
    """A named array [rows, width], float32. ``gathered`` values have a row per wanted logit row, not per token."""

    id: int
    name: str
    width: int
    gathered: bool = False

    def view(self, heads: int = 1, dim: int | None = None, offset: int = 0, stride: int | None = None) -> View:
        """``heads`` pieces of ``dim`` columns, the first at ``offset``, ``stride`` columns apart (None: adjacent)."""
        dim = self.width if dim is None else dim
        view = View(self, offset, heads, dim, dim if stride is None else stride)
        if view.offset + (heads - 1) * view.stride + dim > self.width:
            raise ValueError(f"view of {self.name} runs past its width {self.width}")
        return view


@dataclass(frozen=True)
class View:
    """Columns of a value seen as ``[rows, heads, dim]``: element (r, h, d) is column ``offset + h * stride + d``."""

    value: Value
    offset: int
    heads: int
    dim: int
    stride: int

    @property
    def width(self) -> int:
        """Columns seen: heads * dim."""
        return self.heads * self.dim


@dataclass(frozen=True)
class Op:
    """One step of the program. ``layer`` is the index among layers of the state's kind (attention or delta net)."""

    kind: str
    outs: tuple[Value, ...]
    ins: tuple[View, ...]
    weights: tuple[QTensor, ...] = ()
    vectors: tuple[Vector, ...] = ()
    layer: int = -1
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StateShape:
    """What one sequence keeps between steps.

    delta state float32 [delta_layers, v_heads, d, d] with the value dimension before the key dimension, conv state
    float32 [delta_layers, channels, conv_kernel - 1] (raw inputs, oldest first), and for each token and attention
    layer k and v [kv_heads, head_dim].
    """

    attention_layers: int
    kv_heads: int
    head_dim: int
    delta_layers: int
    v_heads: int
    d: int
    channels: int
    conv_kernel: int

    def state_bytes(self, value_bytes: int = 4) -> int:
        """Bytes of the delta and conv state of one sequence."""
        delta = self.v_heads * self.d * self.d
        return self.delta_layers * (delta + self.channels * (self.conv_kernel - 1)) * value_bytes

    def page_bytes(self, page_tokens: int, value_bytes: int) -> int:
        """Bytes of the keys and values of ``page_tokens`` tokens in all attention layers."""
        return 2 * self.attention_layers * self.kv_heads * page_tokens * self.head_dim * value_bytes


@dataclass(frozen=True)
class Program:
    """The whole forward pass: ``ops`` in order, ``logits`` [wanted rows, n_vocab], ``hidden`` [T, n_embd] before the
    output norm, ``residuals`` [T, n_embd] behind each layer, all that the ops after them read of those before."""

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    hidden: Value
    logits: Value
    state: StateShape
    n_vocab: int
    residuals: tuple[Value, ...] = ()


class Builder:
    """Appends ops. Each method is named like its op, returns the value that it makes, and computes nothing."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self._prefix = ""

    def scope(self, prefix: str) -> None:
        """Names of values made from now on start with ``prefix`` (``l3.``)."""
        self._prefix = prefix

    def _value(self, name: str, width: int, gathered: bool = False) -> Value:
        value = Value(len(self.values), self._prefix + name, width, gathered)
        self.values.append(value)
        return value

    def _emit(
        self,
        kind: str,
        name: str,
        width: int,
        ins: Sequence[View | Value],
        weights: Sequence[QTensor] = (),
        vectors: Sequence[Vector] = (),
        layer: int = -1,
        **attrs: Any,
    ) -> Value:
        views = tuple(i.view() if isinstance(i, Value) else i for i in ins)
        gathered = kind == "gather_rows" or (bool(views) and views[0].value.gathered)
        out = self._value(name, width, gathered)
        self.ops.append(Op(kind, (out,), views, tuple(weights), tuple(vectors), layer, attrs))
        return out

    def embed(self, table: QTensor) -> Value:
        """out[t] = row tokens[t] of ``table`` [n_vocab, n_embd]."""
        return self._emit("embed", "embed", table.cols, (), (table,))

    def rms_norm(self, x: Value | View, w: Vector, eps: float, name: str) -> Value:
        """Per head of the view: x / sqrt(mean(x^2) + eps) * w; w [dim] is shared by the heads."""
        x = x.view() if isinstance(x, Value) else x
        return self._emit("rms_norm", name, x.width, (x,), (), (w,), eps=eps)

    def linear(self, x: Value, w: QTensor, name: str) -> Value:
        """out = x @ w.T; w [out, in]."""
        return self._emit("linear", name, w.rows, (x,), (w,))

    def rope(self, x: Value | View, theta: float, rot: int, sections: tuple[int, ...], name: str) -> Value:
        """Rotates the first ``rot`` columns of each head by the row's three-axis position; the rest is copied."""
        x = x.view() if isinstance(x, Value) else x
        return self._emit("rope", name, x.width, (x,), theta=theta, rot=rot, sections=sections)

    def kv_append(self, k: View, v: View, layer: int) -> None:
        """Stores k and v [T, kv_heads, head_dim] behind what each sequence has in attention layer ``layer``."""
        self.ops.append(Op("kv_append", (), (k, v), (), (), layer, {}))

    def attention(self, q: View, kv_heads: int, layer: int, name: str) -> Value:
        """Causal softmax attention over the stored keys, scale 1/sqrt(dim); query head j reads kv head j // group."""
        return self._emit("attention", name, q.width, (q,), (), (), layer, kv_heads=kv_heads)

    def sigmoid_mul(self, x: Value | View, gate: Value | View, name: str) -> Value:
        """out = x * sigmoid(gate); a gate of width 1 serves the whole row."""
        x = x.view() if isinstance(x, Value) else x
        return self._emit("sigmoid_mul", name, x.width, (x, gate))

    def conv1d_silu(self, x: Value, w: Vector, layer: int, name: str) -> Value:
        """Causal depthwise convolution with the conv state, then SiLU; w [channels, kernel], last tap newest."""
        return self._emit("conv1d_silu", name, x.width, (x,), (), (w,), layer)

    def delta_gates(self, a: Value, b: Value, dt_bias: Vector, a_log: Vector, name: str) -> Value:
        """out [T, 2 * heads]: g = softplus(a + dt_bias) * a_log (log decay, <= 0), then beta = sigmoid(b)."""
        return self._emit("delta_gates", name, 2 * a.width, (a, b), (), (dt_bias, a_log))

    def l2_norm(self, x: View, scale: float, name: str) -> Value:
        """Per head: x / sqrt(sum(x^2) + 1e-6) * scale."""
        return self._emit("l2_norm", name, x.width, (x,), scale=scale)

    def delta_net(self, q: View, k: View, v: View, gates: Value, layer: int, name: str) -> Value:
        """Gated delta rule over the delta state of ``layer``; value head h uses key head h % key_heads."""
        return self._emit("delta_net", name, v.width, (q, k, v, gates), (), (), layer)

    def gated_rms_norm(self, x: View, z: View, w: Vector, eps: float, name: str) -> Value:
        """Per head: rms_norm(x) * w * silu(z)."""
        return self._emit("gated_rms_norm", name, x.width, (x, z), (), (w,), eps=eps)

    def silu_mul(self, gate: Value | View, up: Value | View, name: str) -> Value:
        """out = silu(gate) * up."""
        gate = gate.view() if isinstance(gate, Value) else gate
        return self._emit("silu_mul", name, gate.width, (gate, up))

    def add(self, a: Value, b: Value, name: str) -> Value:
        """out = a + b."""
        return self._emit("add", name, a.width, (a, b))

    def moe_route(self, scores: Value, used: int, name: str) -> Value:
        """out [T, 2 * used]: expert numbers (as float32), then weights: softmax over the ``used`` largest scores.

        Ties go to the lower expert number; experts are listed from the largest score down.
        """
        return self._emit("moe_route", name, 2 * used, (scores,), used=used)

    def moe_linear(self, x: Value, w: QTensor, route: Value, used: int, reduce: bool, name: str) -> Value:
        """``reduce`` false: x [T, in] -> [T, used * out], one product per chosen expert.

        ``reduce`` true: x [T, used * in] -> [T, out], the chosen experts' products weighted and summed in list order.
        """
        return self._emit(
            "moe_linear", name, w.rows if reduce else used * w.rows, (x, route), (w,), used=used, reduce=reduce
        )

    def gather_rows(self, x: Value, name: str) -> Value:
        """The rows whose logits are wanted."""
        return self._emit("gather_rows", name, x.width, (x,))
