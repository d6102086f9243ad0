"""Which ops of a program share a launch. Four rules, none of which changes a bit of any result:

- ``residual_into_linear``: the add that follows a product joins it;
- ``join_linears``: adjacent products of the same input become one node with several parts;
- ``join_heads``: two adjacent norms or rotations of heads of one size (of queries and keys) become one node;
- ``quantizers``: a value that meets quantised weights is quantised where it is computed, if that op can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...model.program import Op, Program, Value
from ...model.weights import QTensor

PRODUCTS = ("linear", "moe_linear")
PAIRED = {"rms_norm": ("eps",), "l2_norm": (), "rope": ("theta", "rot", "sections")}  # and what must be equal
QUANTIZING = ("rms_norm", "gated_rms_norm", "silu_mul", "sigmoid_mul")


@dataclass(frozen=True)
class Part:
    """One matrix of a product, where it goes, and what is added to it."""

    w: QTensor
    out: Value
    residual: Value | None = None


@dataclass
class Node:
    """What is launched together. ``parts`` replace weights and outputs of a linear; ``second`` is done beside ``op``;
    ``ops`` counts those it stands for."""

    op: Op
    parts: list[Part] = field(default_factory=list)
    second: Op | None = None
    ops: int = 1

    @property
    def outs(self) -> list[Value]:
        return [p.out for p in self.parts] or [*self.op.outs, *(self.second.outs if self.second else ())]

    @property
    def reads(self) -> list[Value]:
        views = [*self.op.ins, *(self.second.ins if self.second else ())]
        return [v.value for v in views] + [p.residual for p in self.parts if p.residual is not None]

    @property
    def weights(self) -> list[QTensor]:
        return [p.w for p in self.parts] or list(self.op.weights)


def to_nodes(program: Program) -> list[Node]:
    """One node per op."""
    return [Node(op, [Part(op.weights[0], op.outs[0])]) if op.kind == "linear" else Node(op, []) for op in program.ops]


def residual_into_linear(nodes: Sequence[Node], wanted: Iterable[Value]) -> list[Node]:
    """``add(a, linear(x))`` becomes a linear that adds ``a``, where nothing else reads the product."""
    readers = Counter(value.id for node in nodes for value in node.reads)
    readers.update(value.id for value in wanted)
    out: list[Node] = []
    for node in nodes:
        last = out[-1] if out else None
        if node.op.kind == "add" and last is not None and last.op.kind == "linear":
            a, b = (v.value for v in node.op.ins)
            part = last.parts[-1]
            if part.out == b and part.residual is None and readers[b.id] == 1 and a != b:
                last.parts[-1] = Part(part.w, node.op.outs[0], a)
                last.ops += 1
                continue
        out.append(node)
    return out


def join_linears(nodes: Sequence[Node]) -> list[Node]:
    """Adjacent linears of the same input become one node."""
    out: list[Node] = []
    for node in nodes:
        last = out[-1] if out else None
        if (
            last is not None
            and node.op.kind == last.op.kind == "linear"
            and node.op.ins == last.op.ins
            and not any(p.out in node.reads for p in last.parts)
        ):
            last.parts += node.parts
            last.ops += node.ops
        else:
            out.append(node)
    return out


def join_heads(nodes: Sequence[Node]) -> list[Node]:
    """Two adjacent ops of one kind on heads of one size become one node."""
    out: list[Node] = []
    for node in nodes:
        last = out[-1] if out else None
        if (
            last is not None
            and last.second is None
            and node.op.kind == last.op.kind
            and node.op.kind in PAIRED
            and node.op.ins[0].dim == last.op.ins[0].dim
            and node.op.outs[0].gathered == last.op.outs[0].gathered
            and all(node.op.attrs[name] == last.op.attrs[name] for name in PAIRED[node.op.kind])
            and last.op.outs[0] not in node.reads
        ):
            last.second = node.op
            last.ops += 1
        else:
            out.append(node)
    return out


def fuse(program: Program, wanted: Iterable[Value]) -> list[Node]:
    """The nodes of a program of which the values of ``wanted`` are asked for."""
    return join_heads(join_linears(residual_into_linear(to_nodes(program), wanted)))


def quantizers(nodes: Sequence[Node]) -> dict[int, int]:
    """-> for the id of each value that meets quantised weights, the number of the node that quantises it: that which
    makes it, or the first that needs it."""
    made = {value.id: number for number, node in enumerate(nodes) for value in node.outs}
    chosen: dict[int, int] = {}
    for number, node in enumerate(nodes):
        if node.op.kind in PRODUCTS and any(w.format.quantized for w in node.weights):
            value = node.op.ins[0].value
            maker = nodes[made[value.id]]
            whole = maker.op.kind in QUANTIZING and maker.op.ins[0].dim % 32 == 0 and maker.second is None
            chosen.setdefault(value.id, made[value.id] if whole else number)
    return chosen
