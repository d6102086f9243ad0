"""What a step needs in device memory beside weights and pools: its description, and buffers for values.

Buffers are shared by values that do not live at the same time. Knows no kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ...model.program import Program, Value
from ..base import Batch, Int
from .fusion import Node, quantizers

# Order and names of the numbers at the head of a step: those of cuda/common.cuh.
HEADER = (
    "N_ROWS",
    "N_SEQS",
    "N_OUTS",
    "N_SAVES",
    "PAGE_WIDTH",
    "AT_TOKENS",
    "AT_POSITION",
    "AT_OFFSETS",
    "AT_STARTS",
    "AT_SLOTS",
    "AT_SOURCES",
    "AT_PAGES",
    "AT_OUTS",
    "AT_SAVES",
    "AT_SAVED",
    "AT_SEQ",
)
AT = {name: i for i, name in enumerate(HEADER)}


def pack_step(batch: Batch) -> Int:
    """A batch as the int32 array that kernels read."""
    counts = np.diff(batch.row_offsets)
    sections = (
        batch.tokens,
        batch.positions,
        batch.row_offsets,
        batch.starts,
        batch.slots,
        batch.sources,
        batch.pages,
        batch.out_rows,
        batch.save_rows,
        batch.save_slots,
        np.repeat(np.arange(len(counts), dtype=np.int32), counts),
    )
    ends = len(HEADER) + np.cumsum([s.size for s in sections])
    head = (
        len(batch.tokens),
        len(batch.starts),
        len(batch.out_rows),
        len(batch.save_rows),
        batch.pages.shape[1],
        len(HEADER),
        *ends[:-1],
    )
    return np.concatenate([np.array(head, np.int32), *(s.reshape(-1) for s in sections)], dtype=np.int32)


@dataclass(frozen=True)
class Need:
    """A buffer that some node writes: ``width`` bytes of a row, the node that makes it and the last that reads it."""

    key: tuple[str, int]  # ("value" or "quants", id of the value)
    width: int
    gathered: bool
    first: int
    last: int


def quant_width(columns: int) -> int:
    """Bytes of a row as blocks of 32 (struct Quants of cuda/common.cuh)."""
    return columns // 32 * 48


def needs(nodes: Sequence[Node], kept: Iterable[Value]) -> list[Need]:
    """What each node needs, in order; values of ``kept`` live to the end."""
    first: dict[tuple[str, int], int] = {}
    last: dict[tuple[str, int], int] = {}
    values: dict[tuple[str, int], Value] = {}
    quantized = quantizers(nodes)
    for number, node in enumerate(nodes):
        for value in node.reads:
            last["value", value.id] = number
        for value in node.outs:
            key = "value", value.id
            first[key] = last[key] = number
            values[key] = value
        for value in (*node.outs, *node.reads):
            key = "quants", value.id
            if quantized.get(value.id) == number:
                first[key], values[key] = number, value
            if value.id in quantized:
                last[key] = number  # longer than needed where later reads are of the value itself
    for value in kept:
        last["value", value.id] = len(nodes)
    return [
        Need(key, quant_width(v.width) if key[0] == "quants" else 4 * v.width, v.gathered, first[key], last[key])
        for key, v in sorted(values.items(), key=lambda item: first[item[0]])
    ]


def share_buffers(wanted: Sequence[Need]) -> tuple[dict[tuple[str, int], int], list[tuple[int, bool]]]:
    """-> number of the buffer of each key; width in bytes of each buffer, and whether it is for gathered rows.

    A buffer is free again behind the last node that reads it: a node never writes over what it reads.
    """
    sizes: list[tuple[int, bool]] = []
    busy_until: list[int] = []
    chosen: dict[tuple[str, int], int] = {}
    for need in wanted:
        free = [
            i
            for i, (width, gathered) in enumerate(sizes)
            if busy_until[i] < need.first and gathered == need.gathered and need.width <= width <= 2 * need.width
        ]
        if free:
            number = min(free, key=lambda i: sizes[i])
            busy_until[number] = need.last
        else:
            number = len(sizes)
            sizes.append((need.width, need.gathered))
            busy_until.append(need.last)
        chosen[need.key] = number
    return chosen, sizes


def wanted_values(program: Program, keep: bool) -> list[Value]:
    """Values that must be there when a step has ended."""
    return list(program.values) if keep else [program.logits, program.hidden]
