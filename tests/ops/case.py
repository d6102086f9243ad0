"""What an op case is and how it is run: a small program that any backend can run, compared with the reference.

Inputs of the op under test are rows of F32 embedding tables: token i of a case is its own row, so a token's inputs do
not depend on how the rows are cut into steps.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen35rt.backends.base import Backend, Batch, KvType, Limits
from qwen35rt.backends.reference import ReferenceBackend
from qwen35rt.model.program import Builder, Program, StateShape, Value

from .tensors import plain_tensor, random_tensor

Array = npt.NDArray[Any]
PAGE_TOKENS = 16
NO_STATE = StateShape(0, 1, 16, 0, 1, 16, 1, 4)

# Bounds on the normalised mean square error against float64: sums of float32; int8 activations (B30: 1e-2 squared).
FLOAT32 = 1e-10
INT8 = 1e-4

BAD_ACTIVATIONS = [(fmt, bad) for fmt in ("Q8_0", "Q4_0", "IQ4_NL") for bad in (np.nan, np.inf, -np.inf)]


class Inputs:
    """What a case builds its program with: a Builder, a generator seeded by the case's name, input values."""

    def __init__(self, seed: str, rows: int) -> None:
        self.b = Builder()
        self.rng = np.random.default_rng(zlib.crc32(seed.encode()))
        self.rows = rows

    def value(self, numbers: npt.ArrayLike) -> Value:
        """A value whose row for token i is row i of ``numbers`` [rows, width]."""
        array = np.asarray(numbers, np.float32).reshape(self.rows, -1)
        self.b.scope(f"in{len(self.b.values)}.")
        made = self.b.embed(plain_tensor(f"table{len(self.b.values)}", array))
        self.b.scope("")
        return made

    def normal(self, width: int, scale: float = 1.0) -> Value:
        """Normal numbers."""
        return self.value(self.rng.normal(0, scale, (self.rows, width)))

    def int8(self, width: int, unit: float = 2.0**-6) -> Value:
        """Multiples of ``unit`` up to +-127, both reached in every 16 columns: int8 blocks hold them without error."""
        x = self.rng.integers(-127, 128, (self.rows, width))
        x[:, ::16] = 127 * self.rng.choice([-1, 1], x[:, ::16].shape)
        return self.value(x * unit)


def attention_program(seed: str, n_vocab: int, heads: int, kv_heads: int, head_dim: int) -> Program:
    """Two layers of attention over inputs from a seed, and their sum."""
    i, outs = Inputs(seed, n_vocab), []
    for layer in range(2):
        i.b.scope(f"l{layer}.")
        q, k, v = (i.normal(n * head_dim) for n in (heads, kv_heads, kv_heads))
        i.b.kv_append(k.view(kv_heads, head_dim), v.view(kv_heads, head_dim), layer)
        outs.append(i.b.attention(q.view(heads, head_dim), kv_heads, layer, "y"))
    out = i.b.add(outs[0], outs[1], "sum")
    wanted = i.b.gather_rows(out, "wanted")
    state = StateShape(2, kv_heads, head_dim, 0, 1, 16, 1, 4)
    return Program(tuple(i.b.ops), tuple(i.b.values), out, wanted, state, n_vocab)


@dataclass(frozen=True)
class Case:
    """One op (or a few) on some sequences.

    ``lengths``: tokens of each sequence; ``chunks``: rows that each takes from a step, repeated as needed, so that
    prefill and decode mix; ``nmse`` bounds the error of each sequence, separately for the ``columns`` named.
    ``every``: of each step, logits of every so-many-th row are wanted.
    """

    op: str
    label: str
    build: Callable[[Inputs], Value] = field(compare=False)
    nmse: float = FLOAT32
    lengths: tuple[int, ...] = (1, 2, 17, 70)
    chunks: tuple[tuple[int, ...], ...] = ((70,),)
    state: StateShape = NO_STATE
    columns: tuple[int, ...] = ()  # where the output's columns are split for the comparison
    every: int = 1
    far: int = 0  # > 0: random three-axis positions below this
    kv_dtype: KvType = "f16"

    @property
    def id(self) -> str:
        """Op, label and, where the sequences are cut, how."""
        return f"{self.op}-{self.label}"

    def program(self) -> Program:
        """The program; its logits are the output of the op under test."""
        inputs = Inputs(self.id, sum(self.lengths))
        out = self.build(inputs)
        wanted = inputs.b.gather_rows(out, "wanted")
        # n_vocab is what tokens must be below: here the rows of the tables, not the width of the output.
        return Program(tuple(inputs.b.ops), tuple(inputs.b.values), out, wanted, self.state, inputs.rows)

    def limits(self) -> Limits:
        """Pages of 16 tokens, two slots and pages more than needed."""
        pages = sum(-(-n // PAGE_TOKENS) for n in self.lengths) + 2
        rows = sum(self.lengths)
        return Limits(rows, rows, len(self.lengths) + 2, pages, PAGE_TOKENS, self.kv_dtype)

    def batches(self) -> Iterator[Batch]:
        """The steps. Slots and pages are scattered, sequences that are done drop out."""
        rng = np.random.default_rng(zlib.crc32(self.id.encode()) + 1)
        limits, count = self.limits(), len(self.lengths)
        slots = rng.permutation(limits.slots)[:count].astype(np.int32)
        pool = iter(rng.permutation(limits.pages))
        pages = np.full((count, -(-max(self.lengths) // PAGE_TOKENS)), -1, np.int32)
        for s, n in enumerate(self.lengths):
            for p in range(-(-n // PAGE_TOKENS)):
                pages[s, p] = next(pool)
        first = np.cumsum((0, *self.lengths))
        positions = rng.integers(0, self.far, (3, first[-1])) if self.far else None
        done, step = np.zeros(count, np.int32), 0
        while np.any(done < self.lengths):
            chunk = [c[step % len(c)] for c in (self.chunks * count)[:count]]
            take = np.minimum(chunk, np.array(self.lengths) - done)
            live = np.flatnonzero(take)
            at = np.concatenate([np.arange(done[s], done[s] + take[s]) for s in live])
            tokens = np.concatenate([first[s] + np.arange(done[s], done[s] + take[s]) for s in live])
            pos = np.broadcast_to(at, (3, len(at))) if positions is None else positions[:, tokens]
            yield Batch(
                tokens.astype(np.int32),
                np.ascontiguousarray(pos, np.int32),
                np.cumsum((0, *take[live])).astype(np.int32),
                done[live].copy(),
                slots[live],
                pages[live],
                np.arange(0, len(at), self.every, dtype=np.int32),
            )
            done[live] += take[live]
            step += 1


@dataclass(frozen=True)
class Outcome:
    """What a case gave: of each sequence the wanted rows [n, width], delta state and conv state."""

    rows: tuple[Array, ...]
    delta: tuple[Array, ...]
    conv: tuple[Array, ...]


@lru_cache(maxsize=1)
def _prepared(case: Case) -> tuple[Program, tuple[Batch, ...]]:
    """Program and steps of the last case: its implementations run one after the other."""
    return case.program(), tuple(case.batches())


def run_case(case: Case, backend: Backend) -> Outcome:
    """Run all steps of a case. One with state runs twice, so that slots and pages are not clean when it counts."""
    program, batches = _prepared(case)
    exe = backend.compile(program, case.limits())
    slots: dict[int, int] = {}  # by the sequence's first token
    first = np.cumsum((0, *case.lengths))
    rows: list[list[Array]] = []
    for _ in range(1 if case.state is NO_STATE else 2):
        rows = [[] for _ in case.lengths]
        for batch in batches:
            logits, report = exe.run(batch)
            if not np.all(np.isfinite(logits)):
                raise AssertionError(f"{case.id}: values that are not finite")
            if logits.shape[0] != len(batch.out_rows) or report.rows != len(batch.tokens):
                raise AssertionError(f"{case.id}: {logits.shape} logits, {report.rows} rows reported")
            for s in range(len(batch.starts)):
                begin, end = batch.row_offsets[s], batch.row_offsets[s + 1]
                number = int(np.searchsorted(first, batch.tokens[begin], "right")) - 1
                slots[number] = int(batch.slots[s])
                rows[number].append(logits[(batch.out_rows >= begin) & (batch.out_rows < end)].copy())
    states = [exe.read_slot(slots[s]) for s in range(len(case.lengths))]
    exe.close()
    return Outcome(tuple(np.concatenate(r) for r in rows), tuple(s[0] for s in states), tuple(s[1] for s in states))


@cache
def expected(case: Case) -> Outcome:
    """The reference's outcome in float64."""
    return run_case(case, ReferenceBackend(np.float64))


def nmse(got: Array, want: Array) -> float:
    """Sum of the squared differences over the sum of squares wanted; 0 where both are all zero."""
    error, size = float(np.sum((got - want) ** 2)), float(np.sum(want.astype(np.float64) ** 2))
    if size == 0:
        return 0.0 if error == 0 else np.inf
    return error / size


def check_case(case: Case, backend: Backend) -> None:
    """Fail unless the backend's outcome lies within the case's bound of the reference in float64."""
    check_outcome(case, run_case(case, backend))


def check_outcome(case: Case, got: Outcome) -> None:
    """Fail unless an outcome lies within the case's bound of the reference in float64."""
    want = expected(case)
    for s in range(len(case.lengths)):
        parts = [("out", got.rows[s], want.rows[s])]
        if case.columns:
            splits = zip(*(np.split(x, case.columns, axis=1) for x in (got.rows[s], want.rows[s])), strict=True)
            parts = [(f"out[{i}]", g, w) for i, (g, w) in enumerate(splits)]
        parts += [("delta state", got.delta[s], want.delta[s]), ("conv state", got.conv[s], want.conv[s])]
        for name, g, w in parts:
            error = nmse(g, w)
            if not error <= case.nmse:
                raise AssertionError(f"{case.id}: {name} of sequence {s}: error {error:.2e}, bound {case.nmse:.0e}")


def cut(case: Case, label: str, *chunks: tuple[int, ...]) -> Case:
    """The same case in other steps; the inputs stay those of the new name."""
    return replace(case, label=f"{case.label}-{label}", chunks=chunks)


def check_bad_activation(backend: Backend, fmt: str, bad: float) -> None:
    """Fail if rounding to int8 turns a NaN or an infinity into a number: no product of its row is finite (B29)."""
    rng = np.random.default_rng(29)
    b = Builder()
    table = random_tensor(rng, "table", "F32", 4, 96)
    x = b.embed(table)
    y = b.linear(x, random_tensor(rng, "w", fmt, 17, 96), "y")
    table.data.view(np.float32).reshape(4, 96)[2, 40] = bad
    program = Program(tuple(b.ops), tuple(b.values), x, y, StateShape(0, 1, 16, 0, 1, 16, 16, 4), 4)
    exe = backend.compile(program, Limits(rows=4, out_rows=4, pages=1))
    out = exe.run(Batch.single([0, 1, 2, 3], 0, np.zeros(1, np.int32), out_rows=[0, 1, 2, 3]))[0]
    exe.close()
    if not np.isfinite(out[[0, 1, 3]]).all() or np.isfinite(out[2]).any():
        raise AssertionError(f"{fmt}: {bad} in the activations of row 2 gives {out[:, 0]}")
