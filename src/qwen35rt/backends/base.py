"""What every backend offers: Limits, Batch, StepReport, Executable, Backend. Knows no model and no kernels.

An Executable owns the state pools: ``limits.slots`` recurrent states and ``limits.pages`` KV pages. Who uses which
slot and page is decided outside; a batch names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
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


@dataclass(frozen=True)
class Batch:
    """The rows of one step. Rows of one sequence are adjacent and in order.

    tokens int32 [T]; positions int32 [3, T] (temporal, height, width); row_offsets int32 [S + 1]; starts int32 [S]:
    tokens that each sequence has in its pages and state before this step; slots int32 [S]; pages int32 [S, P]: page
    numbers of each sequence in order, wide enough for starts + rows of the step (unused entries -1);
    out_rows int32 [N]: rows whose logits are wanted. A sequence with start 0 begins with a zero state, whatever its
    slot holds.
    """

    tokens: Int
    positions: Int
    row_offsets: Int
    starts: Int
    slots: Int
    pages: Int
    out_rows: Int

    @staticmethod
    def single(
        tokens: Sequence[int] | Int, start: int, pages: Int, slot: int = 0, out_rows: Sequence[int] | None = None
    ) -> Batch:
        """A step of one text sequence; by default logits of its last row only."""
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
        )


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


class Executable(Protocol):
    """A program bound to a device, its weights and its state pools."""

    limits: Limits

    def run(self, batch: Batch, keep: Sequence[str] = ()) -> tuple[Float, StepReport]:
        """One step: -> logits [N, n_vocab] of the wanted rows (valid until the next call), and what was done.

        ``keep`` names values to return in the report (copies). Raises BackendError.
        """
        ...

    def copy_slot(self, source: int, target: int) -> None:
        """Copy a recurrent state (delta and conv state of all layers)."""
        ...

    def read_slot(self, slot: int) -> tuple[Float, Float]:
        """-> delta state [layers, v_heads, d (value), d (key)], conv state [layers, channels, kernel - 1]; copies."""
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
