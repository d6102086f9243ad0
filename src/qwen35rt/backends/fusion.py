"""Nodes of a lowered program, and the rules of fusing that backends share. No rule changes a bit of any result:

- ``join_linears``: adjacent products of the same input become one node with several parts;
- ``residual_into_linear``: the add that follows a product joins it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from ..model.program import Op, Value
from ..model.weights import QTensor

PRODUCTS = ("linear", "moe_linear")
QUANTIZING = ("rms_norm", "gated_rms_norm", "silu_mul", "sigmoid_mul")  # can write their output as int8 blocks too


@dataclass(frozen=True)
class Part:
    """One matrix of a product, where it goes, and what is added to it."""

    w: QTensor
    out: Value
    residual: Value | None = None


@dataclass
class Node:
    """What runs as one: ``op`` gives kind, inputs and attributes; ``parts`` replace its weights and outputs; ``ops``
    counts the program's ops that it stands for."""

    op: Op
    parts: list[Part] = field(default_factory=list)
    ops: int = 1

    @property
    def outs(self) -> list[Value]:
        return [p.out for p in self.parts] or list(self.op.outs)

    @property
    def reads(self) -> list[Value]:
        return [v.value for v in self.op.ins] + [p.residual for p in self.parts if p.residual is not None]

    @property
    def weights(self) -> list[QTensor]:
        return [p.w for p in self.parts] or list(self.op.weights)


N = TypeVar("N", bound=Node)


def join_linears(nodes: Iterable[N]) -> list[N]:
    """Adjacent products with equal inputs become one node, where they have parts."""
    out: list[N] = []
    for node in nodes:
        last = out[-1] if out else None
        if (
            last is not None
            and node.parts
            and last.parts
            and node.op.kind in PRODUCTS
            and last.op.kind == node.op.kind
            and last.op.ins == node.op.ins
            and last.op.attrs == node.op.attrs
            and not any(p.out in node.reads for p in last.parts)
        ):
            last.parts += node.parts
            last.ops += node.ops
        else:
            out.append(node)
    return out


def residual_into_linear(nodes: Iterable[N], wanted: Iterable[Value]) -> list[N]:
    """``add(a, linear(x))`` becomes a linear that adds ``a``, where nothing else reads the product."""
    nodes = list(nodes)
    readers = Counter(value.id for node in nodes for value in node.reads)
    readers.update(value.id for value in wanted)
    out: list[N] = []
    for node in nodes:
        last = out[-1] if out else None
        if node.op.kind == "add" and last is not None and last.op.kind == "linear" and len(last.parts) == 1:
            a, b = (v.value for v in node.op.ins)
            part = last.parts[0]
            if part.out == b and part.residual is None and readers[b.id] == 1 and a != b:
                last.parts = [Part(part.w, node.op.outs[0], a)]
                last.ops += node.ops
                continue
        out.append(node)
    return out
