"""Two backends for one program: the first layers on one, the others and the head on the other.

Owns the residual stream that is handed over. Knows neither device: a slot or page is its halves in both executables.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import overload

import numpy as np

from ..errors import BackendError
from ..model.cut import Cut, cut_program
from ..model.program import Program
from .base import Backend, Batch, Executable, Float, Limits, Logits, StepReport, check_batch, check_state


class SplitBackend:
    """Compiles the embedding and the first ``layers`` layers for ``below``, the rest for ``above``, which must read
    weights of F32 where they lie, as the CPU's backends do."""

    def __init__(self, below: Backend, above: Backend, layers: int) -> None:
        self.below, self.above, self.layers = below, above, layers
        self.name = f"{below.name}+{above.name}"

    def compile(self, program: Program, limits: Limits) -> SplitExecutable:
        """Bind each part to its device. Raises ValueError where there is nothing to split."""
        cut = cut_program(program, self.layers, limits.rows)
        below = self.below.compile(cut.below, replace(limits, out_rows=limits.rows))
        try:
            above = self.above.compile(cut.above, limits)
        except BaseException:
            below.close()
            raise
        return SplitExecutable(program, limits, cut, below, above)

    def parts(self, program: Program) -> tuple[tuple[Backend, Program], tuple[Backend, Program]]:
        """Which part of a program each backend gets."""
        cut = cut_program(program, self.layers, 1)
        return (self.below, cut.below), (self.above, cut.above)


class SplitExecutable:
    """The executables of both parts, run one after the other. Not for use by two threads at once."""

    def __init__(self, program: Program, limits: Limits, cut: Cut, below: Executable, above: Executable) -> None:
        self.program, self.limits = program, limits
        self._below, self._above, self._stream = below, above, cut.stream
        self._below_names = {v.name for v in cut.below.values}
        self._names = {v.name for v in program.values}
        self._rows = np.arange(limits.rows, dtype=np.int32)
        self._delta_layers = cut.below.state.delta_layers

    @property
    def state_bytes(self) -> int:
        """Bytes of one slot, on both devices together."""
        return self._below.state_bytes + self._above.state_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, on both devices together."""
        return self._below.page_bytes + self._above.page_bytes

    @property
    def profile(self) -> bool:
        """Whether steps are timed op by op."""
        return all(getattr(exe, "profile", False) for exe in (self._below, self._above))

    @profile.setter
    def profile(self, on: bool) -> None:
        for exe in (self._below, self._above):
            exe.profile = on  # type: ignore[attr-defined]  # the reference has no use for it

    @overload
    def run(self, batch: Batch, keep: Sequence[str] = ()) -> tuple[Float, StepReport]: ...

    @overload
    def run(self, batch: Batch, keep: Sequence[str] = (), *, top: int) -> tuple[Logits, StepReport]: ...

    def run(self, batch: Batch, keep: Sequence[str] = (), top: int = 0) -> tuple[Logits, StepReport]:
        """One step; see Executable.run. The report counts the ops of each device."""
        check_batch(batch, self.limits, self.program.n_vocab)
        unknown = [name for name in keep if name not in self._names]
        if unknown:
            raise BackendError(f"the program has no value named {unknown[0]!r}")
        began = time.perf_counter()
        rows = self._rows[: len(batch.tokens)]
        lower = [name for name in keep if name in self._below_names]
        upper = [name for name in keep if name not in self._below_names]
        stream, first = self._below.run(replace(batch, out_rows=rows), lower)
        self._stream[: len(rows)] = stream
        logits, second = self._above.run(replace(batch, tokens=rows), upper, top=top)
        devices, op_seconds = Counter[str](), defaultdict[str, float](float)
        for report in (first, second):
            devices.update(report.devices)
            devices[next(iter(report.devices))] -= 1  # what hands the stream over is no op of the program
            for kind, seconds in report.op_seconds.items():
                op_seconds[kind] += seconds
        spent = time.perf_counter() - began
        return logits, StepReport(dict(devices), spent, len(rows), dict(op_seconds), first.values | second.values)

    def full_logits(self, row: int) -> Float:
        """All logits of a wanted row of the last step; see Executable.full_logits."""
        return self._above.full_logits(row)

    def copy_slot(self, source: int, target: int) -> None:
        """Copy the recurrent state of a slot."""
        self._below.copy_slot(source, target)
        self._above.copy_slot(source, target)

    def copy_page(self, source: int, target: int) -> None:
        """Copy keys and values of all layers."""
        self._below.copy_page(source, target)
        self._above.copy_page(source, target)

    def read_slot(self, slot: int) -> tuple[Float, Float]:
        """Copies of the recurrent state of a slot; see Executable.read_slot."""
        lower, upper = self._below.read_slot(slot), self._above.read_slot(slot)
        return np.concatenate([lower[0], upper[0]]), np.concatenate([lower[1], upper[1]])

    def write_slot(self, slot: int, delta: Float, conv: Float) -> None:
        """Put back what read_slot gave."""
        s = self.program.state
        check_state(delta, (s.delta_layers, s.v_heads, s.d, s.d), "delta")
        check_state(conv, (s.delta_layers, s.channels, s.conv_kernel - 1), "conv")
        at = self._delta_layers
        self._below.write_slot(slot, delta[:at], conv[:at])
        self._above.write_slot(slot, delta[at:], conv[at:])

    def close(self) -> None:
        """Release both."""
        self._below.close()
        self._above.close()
