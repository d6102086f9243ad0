"""Cuts a Program in two between layers, so that each part can run on a device of its own. Knows no devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..formats import BY_NAME
from .program import Op, Program, StateShape, Value
from .weights import QTensor


@dataclass(frozen=True, eq=False)
class Cut:
    """``below``: embedding and first layers, whose logits are the residual stream of the rows that are asked for.
    ``above``: the rest; its tokens are numbers of rows of ``stream``, float32 [rows, n_embd], which it reads anew in
    each step: its embedding is a table of weights that lies there."""

    below: Program
    above: Program
    stream: npt.NDArray[np.float32]


def cut_program(program: Program, layers: int, rows: int) -> Cut:
    """Cut behind the first ``layers`` layers, for steps of up to ``rows`` rows. Each part has an op that the program
    lacks: the last one below, the first one above.

    Raises ValueError unless there are layers on both sides.
    """
    if not 0 < layers < len(program.residuals):
        raise ValueError(f"a program of {len(program.residuals)} layers cannot be cut behind {layers}")
    x = program.residuals[layers - 1]
    end = 1 + next(i for i, op in enumerate(program.ops) if x in op.outs)
    first, rest = program.ops[:end], program.ops[end:]
    wanted = Value(len(program.values), "stream", x.width, True)
    stream = np.zeros((rows, x.width), np.float32)
    data = stream.view(np.uint8).reshape(-1)
    table = QTensor("stream", BY_NAME["F32"], rows, x.width, 1, data, 4 * x.width, data.size)
    lower, upper = _shape(program.state, first), _shape(program.state, rest)
    below = _renumbered([*first, Op("gather_rows", (wanted,), (x.view(),))], x, wanted, lower, program.n_vocab)
    skipped = _shift(rest, lower)
    above = _renumbered([Op("embed", (x,), (), (table,)), *skipped], program.hidden, program.logits, upper, rows)
    return Cut(below, above, stream)


_DELTA_OPS, _ATTENTION_OPS = ("conv1d_silu", "delta_net"), ("kv_append", "attention")


def _shape(state: StateShape, ops: Sequence[Op]) -> StateShape:
    """What a sequence keeps of the layers that these ops make up."""
    kinds = [op.kind for op in ops]
    return replace(state, attention_layers=kinds.count("attention"), delta_layers=kinds.count("delta_net"))


def _shift(ops: Iterable[Op], below: StateShape) -> list[Op]:
    """The ops of the upper part, whose layers are counted from its own first one."""
    offsets = dict.fromkeys(_DELTA_OPS, below.delta_layers) | dict.fromkeys(_ATTENTION_OPS, below.attention_layers)
    return [replace(op, layer=op.layer - offsets[op.kind]) if op.kind in offsets else op for op in ops]


def _renumbered(ops: Sequence[Op], hidden: Value, logits: Value, state: StateShape, n_vocab: int) -> Program:
    """A program of its own: values are numbered by their place in it."""
    made: dict[int, Value] = {}
    done = []
    for op in ops:
        ins = tuple(replace(v, value=made[v.value.id]) for v in op.ins)
        for out in op.outs:
            made[out.id] = replace(out, id=len(made))
        done.append(replace(op, ins=ins, outs=tuple(made[out.id] for out in op.outs)))
    return Program(tuple(done), tuple(made.values()), made[hidden.id], made[logits.id], state, n_vocab)
