"""Lowering for the CPU: where values lie, and that neither fusion nor the number of threads changes a bit."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qwen35rt.backends.base import Limits
from qwen35rt.backends.fusion import PRODUCTS, join_linears, residual_into_linear
from qwen35rt.model.program import Program, Value
from tests.implementations import isa_levels
from tests.oracle import ALL_FILES, PAGE_TOKENS, in_steps, model, needs_oracle

Array = npt.NDArray[Any]
LEVELS = isa_levels()

if LEVELS:
    from qwen35rt.backends.cpu.backend import CpuExecutable
    from qwen35rt.backends.cpu.lower import (
        Arena,
        Node,
        lower,
        quant_bytes,
        quantize_with_producer,
        to_nodes,
    )

pytestmark = pytest.mark.skipif(not LEVELS, reason="the compiled module qwen35rt._native is not built")
LIMITS = Limits(rows=5, out_rows=3, pages=4)


def logits(program: Program, ends: list[int], threads: int = 2, fuse: bool = True) -> Array:
    """Logits of all rows of random tokens run in these steps."""
    tokens = np.random.default_rng(zlib.crc32(b"tokens")).integers(0, program.n_vocab, ends[-1])
    limits = Limits(rows=1000, out_rows=1000, pages=16, page_tokens=PAGE_TOKENS)
    exe = CpuExecutable(program, limits, LEVELS[-1], threads, fuse)
    try:
        assert exe.threads == threads
        return in_steps(exe, tokens, ends)
    finally:
        exe.close()


@needs_oracle
@pytest.mark.parametrize(("name", "variant"), ALL_FILES)
def test_fusing_changes_no_bit(name: str, variant: str) -> None:
    """Prefill and single rows, every file."""
    program, ends = model(name, variant).program, [40, 41, 42, 64]
    plain, fused = (logits(program, ends, fuse=fuse) for fuse in (False, True))
    nodes, unfused = nodes_of(program, True), nodes_of(program, False)
    assert len(nodes) < len(unfused)
    assert sum(n.ops for n in nodes) == sum(n.ops for n in unfused) == len(program.ops)
    np.testing.assert_array_equal(fused, plain)


@needs_oracle
@pytest.mark.parametrize(
    ("name", "variant", "ends"),
    [
        ("nano", "f32", [990, *range(991, 1001)]),  # long enough for attention to be split over threads
        ("dense", "mix", [50, 57, *range(58, 65)]),
        ("moek", "q4_k_m", [50, 57, *range(58, 65)]),
    ],
)
def test_any_number_of_threads_gives_the_same_bits(name: str, variant: str, ends: list[int]) -> None:
    program = model(name, variant).program
    one, two, three = (logits(program, ends, threads) for threads in (1, 2, 3))
    np.testing.assert_array_equal(two, one)
    np.testing.assert_array_equal(three, one)


# ------------------------------------------------------------------------------------------ places of values


def nodes_of(program: Program, fuse: bool) -> list[Node]:
    """The nodes that lower() makes ops of."""
    nodes = to_nodes(program)
    if fuse:
        nodes = residual_into_linear(join_linears(nodes), (program.hidden, program.logits))
    return quantize_with_producer(nodes, fuse)


class Memory:
    """Which value each byte of the workspace holds: replays writes, checks reads. Addresses are absolute."""

    def __init__(self, memory: Array) -> None:
        self.start = memory.ctypes.data
        self.holds = np.full(len(memory), -1)

    def part(self, begin: int, nbytes: int) -> Array:
        """What a range of the workspace holds."""
        assert self.start <= begin
        assert begin + nbytes + 64 <= self.start + len(self.holds), "vector loads may run 64 bytes past a value"
        return self.holds[begin - self.start : begin - self.start + nbytes]


def nbytes_of(value: Value) -> int:
    return 4 * value.width * (LIMITS.out_rows if value.gathered else LIMITS.rows)


def ranges(node: Node, row: Any, parts: Iterator[Any]) -> tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]]:
    """Of an op as C sees it: what it reads and what it writes, (first byte, bytes) by value.

    The quantised form of a value has the number -2 - id.
    """
    reads = {
        v.value.id: (int(at["ptr"]) - 4 * v.offset, nbytes_of(v.value))
        for v, at in zip(node.op.ins, row["ins"], strict=False)  # unused places stay empty
    }
    writes = {}
    if node.parts:
        for part in node.parts:
            at = next(parts)
            writes[part.out.id] = (int(at["out"]["ptr"]), nbytes_of(part.out))
            if part.residual is not None:
                reads[part.residual.id] = (int(at["residual"]), nbytes_of(part.residual))
    elif node.outs:
        writes[node.outs[0].id] = (int(row["out"]["ptr"]), nbytes_of(node.outs[0]))
    if row["quant"]["q"]:
        value = node.outs[0] if node.quantizes and node.op.kind != "quantize" else node.op.ins[0].value
        rows = nbytes_of(value) // 4 // value.width
        (reads if node.op.kind in PRODUCTS else writes)[-2 - value.id] = (
            int(row["quant"]["q"]),
            quant_bytes(rows, value.width),
        )
    return reads, writes


def replay(program: Program, fuse: bool) -> None:
    """Fail where an op would read what another has overwritten, or write over what it reads itself."""
    from qwen35rt.backends.cpu.structs import OP

    lowered, nodes = lower(program, LIMITS, fuse), nodes_of(program, fuse)
    memory, parts = Memory(lowered.keep_alive[0]), iter(lowered.keep_alive[1])  # type: ignore[arg-type,call-overload]
    for node, row in zip(nodes, lowered.ops.view(OP), strict=True):
        reads, writes = ranges(node, row, parts)
        kept = dict(reads)
        if node.op.kind == "attention_merge":  # finishes what attention has written
            kept |= writes
        for value, (begin, n) in kept.items():
            assert (memory.part(begin, n) == value).all(), f"{node.op.kind} finds another value in place of an input"
        for value, (begin, n) in writes.items():
            memory.part(begin, n)[:] = value
        for value, (begin, n) in (reads | writes).items():
            assert (memory.part(begin, n) == value).all(), f"{node.op.kind} overwrites its own operand"
    begin, n = lowered.logits.ctypes.data, nbytes_of(program.logits)
    assert (memory.part(begin, n) == program.logits.id).all(), "the logits do not last until the end"


@needs_oracle
@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize(("name", "variant"), ALL_FILES)
def test_live_values_do_not_overlap(name: str, variant: str, fuse: bool) -> None:
    replay(model(name, variant).program, fuse)


@cache
def _sizes() -> list[int]:
    rng = np.random.default_rng(zlib.crc32(b"arena"))
    return [int(n) for n in rng.integers(1, 2000, 400)]


def test_arena_hands_out_disjoint_ranges() -> None:
    """Any order of take and release; what is free again is used again, and in the end everything is."""
    rng, arena = np.random.default_rng(zlib.crc32(b"release")), Arena()
    live: list[tuple[int, int]] = []
    most = total = 0
    for nbytes in _sizes():
        while live and rng.random() < 0.47:
            arena.release(*live.pop(int(rng.integers(len(live)))))
        offset = arena.take(nbytes)
        assert offset % 64 == 0
        assert offset + nbytes + 64 <= arena.size
        assert all(offset + nbytes + 64 <= o or o + n + 64 <= offset for o, n in live)
        live.append((offset, nbytes))
        most, total = max(most, sum(n for _, n in live)), total + nbytes
    assert arena.size < min(3 * most, total)
    for offset, nbytes in live:
        arena.release(offset, nbytes)
    assert arena.free == [(0, arena.size)]
