"""What every backend offers: Limits, Batch, StepReport, Executable, Backend. Knows no model and no kernels.

An Executable owns the state pools: ``limits.slots`` recurrent states and ``limits.pages`` KV pages. Who uses which
slot and page is decided outside; a batch names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, Protocol, get_args, overload

import numpy as np
import numpy.typing as npt

from ..errors import BackendError, ConfigError
from ..model.program import Program

Float = npt.NDArray[np.float32]
Int = npt.NDArray[np.int32]


KvType = Literal["f16", "f32"]


@dataclass(frozen=True)
class Limits:
    """Sizes fixed when a program is compiled. Raises ConfigError for an unknown type of pages."""

    rows: int = 512  # token rows of one step
    out_rows: int = 512  # rows of one step whose logits may be asked for
    slots: int = 1  # recurrent states
    pages: int = 64  # KV pages, shared by all sequences
    page_tokens: int = 64  # tokens of one page
    kv_dtype: KvType = "f16"  # how pages keep keys and values

    def __post_init__(self) -> None:
        if self.kv_dtype not in get_args(KvType):
            raise ConfigError(f"no pages of type {self.kv_dtype!r}; known: {', '.join(get_args(KvType))}")

    @property
    def value_bytes(self) -> int:
        """Bytes of one number in a page."""
        return 2 if self.kv_dtype == "f16" else 4


def _nothing() -> Int:
    return np.zeros(0, np.int32)


@dataclass(frozen=True)
class Batch:
    """The rows of one step. Rows of one sequence are adjacent and in order.

    tokens int32 [T]; positions int32 [3, T] (temporal, height, width); row_offsets int32 [S + 1]; starts int32 [S]:
    tokens that each sequence has in its pages and state before this step; slots int32 [S]; pages int32 [S, P]: page
    numbers of each sequence in order, wide enough for starts + rows of the step (unused entries -1);
    out_rows int32 [N]: rows whose logits are wanted. A sequence with start 0 begins with a zero state, whatever its
    slot holds.

    sources int32 [S]: the slot from which a sequence with start > 0 takes its state; the new state goes to its entry
    of ``slots`` and the source stays as it is. Several sequences may share one. By default the same as ``slots``.
    save_rows, save_slots int32 [M]: the recurrent state after row save_rows[i] of the step, of the sequence that the
    row belongs to, is also written to slot save_slots[i]. Rows rise. Results do not depend on what is saved.
    """

    tokens: Int
    positions: Int
    row_offsets: Int
    starts: Int
    slots: Int
    pages: Int
    out_rows: Int
    sources: Int = field(default_factory=_nothing)
    save_rows: Int = field(default_factory=_nothing)
    save_slots: Int = field(default_factory=_nothing)

    def __post_init__(self) -> None:
        if not self.sources.size:
            object.__setattr__(self, "sources", self.slots)

    @staticmethod
    def single(
        tokens: Sequence[int] | npt.NDArray[Any],
        start: int,
        pages: npt.NDArray[Any],
        slot: int = 0,
        out_rows: Sequence[int] | None = None,
        saves: Sequence[tuple[int, int]] = (),
        source: int | None = None,
    ) -> Batch:
        """A step of one text sequence; by default logits of its last row only. ``saves``: (row, slot) pairs."""
        ids = np.asarray(tokens, np.int32)
        n = len(ids)
        pos = np.broadcast_to(np.arange(start, start + n, dtype=np.int32), (3, n)).copy()
        rows = [n - 1] if out_rows is None else out_rows
        return Batch(
            ids,
            pos,
            np.array([0, n], np.int32),
            np.array([start], np.int32),
            np.array([slot], np.int32),
            np.asarray(pages, np.int32).reshape(1, -1),
            np.asarray(rows, np.int32),
            np.array([slot if source is None else source], np.int32),
            np.array([row for row, _ in saves], np.int32),
            np.array([to for _, to in saves], np.int32),
        )


def check_batch(batch: Batch, limits: Limits, n_vocab: int) -> None:
    """Raise BackendError where a batch does not fit the limits or contradicts itself.

    Backends trust a batch that passed: every number in it that is used as an index is tested here.
    """
    n, count, pages = batch.tokens.size, batch.starts.size, batch.pages.shape[-1:]
    if not 1 <= n <= limits.rows:
        raise BackendError(f"a step of {n} rows; the limit is {limits.rows} and the least is 1")
    if batch.out_rows.size > limits.out_rows:
        raise BackendError(f"logits of {batch.out_rows.size} rows are wanted; the limit is {limits.out_rows}")
    shapes: dict[str, tuple[int, ...]] = {"tokens": (n,), "positions": (3, n), "row_offsets": (count + 1,)}
    shapes |= {"starts": (count,), "slots": (count,), "sources": (count,), "pages": (count, *pages)}
    shapes |= {"out_rows": (batch.out_rows.size,)} | dict.fromkeys(("save_rows", "save_slots"), (batch.save_rows.size,))
    for name, shape in shapes.items():
        array: Int = getattr(batch, name)
        if array.dtype != np.int32 or array.shape != shape or not array.flags.c_contiguous:
            raise BackendError(f"{name} must be contiguous int32 {shape}; it is {array.dtype} {array.shape}")
    offsets = batch.row_offsets.tolist()
    counts = [end - begin for begin, end in pairwise(offsets)]
    if offsets[0] != 0 or offsets[-1] != n or min(counts) < 1:
        raise BackendError("row_offsets must rise from 0 to the number of rows, one sequence after the other")
    if not _within(batch.tokens, n_vocab):
        raise BackendError(f"a token is not below the vocabulary's size {n_vocab}")
    if not _within(batch.out_rows, n):
        raise BackendError("out_rows names a row that the step does not have")
    starts = batch.starts.tolist()
    if min(starts) < 0:
        raise BackendError("a sequence starts before its first token")
    for start, rows, row in zip(starts, counts, batch.pages, strict=True):
        used = row[: -(-(start + rows) // limits.page_tokens)]
        if used.size * limits.page_tokens < start + rows or not _within(used, limits.pages):
            raise BackendError(
                f"a sequence of {start + rows} tokens lacks pages or names one that is not below {limits.pages}"
            )
    _check_slots(batch, limits)


def _check_slots(batch: Batch, limits: Limits) -> None:
    targets = [*batch.slots.tolist(), *batch.save_slots.tolist()]
    if not _within(batch.slots, limits.slots) or len(set(batch.slots.tolist())) != batch.slots.size:
        raise BackendError(f"each sequence needs a slot of its own below {limits.slots}")
    saved = batch.save_rows.tolist()
    if not _within(batch.save_rows, batch.tokens.size) or any(b <= a for a, b in pairwise(saved)):
        raise BackendError("save_rows must rise and name rows of the step")
    if not _within(batch.save_slots, limits.slots) or len(set(targets)) != len(targets):
        raise BackendError(f"each saved state needs a slot below {limits.slots} that the step writes nothing else to")
    if not _within(batch.sources, limits.slots):
        raise BackendError(f"sources names a slot that is not below {limits.slots}")
    for start, source, slot in zip(batch.starts.tolist(), batch.sources.tolist(), batch.slots.tolist(), strict=True):
        if start > 0 and source != slot and source in targets:
            raise BackendError(f"sources: the step overwrites slot {source}, from which a sequence takes its state")


def _within(numbers: Int, limit: int) -> bool:
    if numbers.size > 64:
        return int(numbers.min()) >= 0 and int(numbers.max()) < limit
    few = numbers.tolist()  # a decode step has a dozen such checks, and reductions cost more than they reduce
    return not few or (min(few) >= 0 and max(few) < limit)


def check_number(kind: str, number: int, count: int) -> None:
    """Raise BackendError unless ``number`` is that of one of ``count`` slots or pages."""
    if not 0 <= number < count:
        raise BackendError(f"{kind} {number} is not one of the {count} {kind}s")


def check_state(given: npt.NDArray[Any], shape: tuple[int, ...], name: str) -> None:
    """Raise BackendError unless a state to be written has the shape of a slot's."""
    if given.shape != shape:
        raise BackendError(f"the {name} state of a slot is {shape}; given was {given.shape}")


@dataclass(frozen=True)
class StepReport:
    """What one step did. ``devices`` counts the program's ops by the kind of device that ran them ("cpu", "cuda")."""

    devices: dict[str, int]
    seconds: float
    rows: int
    op_seconds: dict[str, float] = field(default_factory=dict)  # by op kind, when profiling is on
    values: dict[str, Float] = field(default_factory=dict)  # named values that were asked for

    @property
    def on_gpu(self) -> bool:
        """True only if every op of the step ran on a GPU."""
        return bool(self.devices) and set(self.devices) == {"cuda"}


@dataclass(frozen=True)
class Best:
    """The k largest logits of each row, of equal ones those of lower ids, a NaN before all numbers.

    ids int32 [N, k], rising in each row; logits float32 [N, k]. Of one row: [k] both. k is below n_vocab.
    """

    ids: Int
    logits: Float

    def __getitem__(self, at: int | slice) -> Best:
        return Best(self.ids[at], self.logits[at])


Logits = Float | Best


class Executable(Protocol):
    """A program bound to a device, its weights and its state pools."""

    limits: Limits

    @property
    def state_bytes(self) -> int:
        """Bytes of one slot: the recurrent state of one sequence."""
        ...

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: keys and values of all layers."""
        ...

    @overload
    def run(self, batch: Batch, keep: Sequence[str] = ()) -> tuple[Float, StepReport]: ...

    @overload
    def run(self, batch: Batch, keep: Sequence[str] = (), *, top: int) -> tuple[Logits, StepReport]: ...

    def run(self, batch: Batch, keep: Sequence[str] = (), top: int = 0) -> tuple[Logits, StepReport]:
        """One step: -> logits [N, n_vocab] of the wanted rows (valid until the next call), and what was done.

        ``keep`` names values to return in the report (copies). ``top`` above 0: so many largest logits of each row are
        enough, and a backend may give those alone. Raises BackendError.
        """
        ...

    def full_logits(self, row: int) -> Float:
        """All logits [n_vocab] of a wanted row of the last step, whatever its ``top`` was; valid until the next step.

        Raises BackendError for a row that was not wanted.
        """
        ...

    def copy_slot(self, source: int, target: int) -> None:
        """Copy a recurrent state (delta and conv state of all layers). Raises BackendError for an unknown slot."""
        ...

    def copy_page(self, source: int, target: int) -> None:
        """Copy keys and values of all layers. Raises BackendError for an unknown page."""
        ...

    def read_slot(self, slot: int) -> tuple[Float, Float]:
        """-> delta state [layers, v_heads, d (value), d (key)], conv state [layers, channels, kernel - 1]; copies.

        Raises BackendError for an unknown slot.
        """
        ...

    def write_slot(self, slot: int, delta: Float, conv: Float) -> None:
        """Put back what read_slot gave. Raises BackendError for an unknown slot or another shape."""
        ...

    def close(self) -> None:
        """Release pools and threads; the executable cannot be used afterwards."""
        ...


class Backend(Protocol):
    """A device that can compile programs."""

    name: str

    def compile(self, program: Program, limits: Limits) -> Executable:
        """Bind a program to this device."""
        ...
