"""Which ops of a program share a launch: the rules of backends/fusion.py and two more, which change no bit either:

- ``join_heads``: two adjacent norms or rotations of heads of one size (of queries and keys) become one node;
- ``quantizers``: a value that meets quantised weights is quantised where it is computed, if that op can.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...model.program import Op, Program, Value
from .. import fusion
from ..fusion import PRODUCTS, QUANTIZING, Part, join_linears, residual_into_linear

PAIRED = {"rms_norm": ("eps",), "l2_norm": (), "rope": ("theta", "rot", "sections")}  # and what must be equal


@dataclass
class Node(fusion.Node):
    """What is launched together: ``second`` is done beside ``op``. Only linears have parts."""

    second: Op | None = None

    @property
    def outs(self) -> list[Value]:
        return super().outs + list(self.second.outs if self.second else ())

    @property
    def reads(self) -> list[Value]:
        return super().reads + [v.value for v in (self.second.ins if self.second else ())]


def to_nodes(program: Program) -> list[Node]:
    """One node per op."""
    return [Node(op, [Part(op.weights[0], op.outs[0])]) if op.kind == "linear" else Node(op) for op in program.ops]


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
