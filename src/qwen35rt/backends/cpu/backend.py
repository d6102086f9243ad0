"""The CPU backend: one C call per step on a thread pool, weights read where the file is mapped."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import _native
from ...config import environment
from ...cpu_count import own_cpus, usable_threads
from ...errors import BackendError, BackendUnavailable, ConfigError, OutOfMemory
from ...model.program import Program
from ..base import Batch, Float, Limits, StepReport, check_batch, check_number, check_state
from .lower import Lowered, lower
from .structs import STATE

log = logging.getLogger(__name__)


class CpuBackend:
    """Opens the kernels of one instruction level. ``isa`` None: QWEN35RT_ISA, else the best of this machine.

    ``threads`` None: QWEN35RT_THREADS, else the cores that this process may use. Raises BackendUnavailable for a
    level that this build or machine lacks.
    """

    name = "cpu"

    def __init__(self, threads: int | None = None, isa: str | None = None) -> None:
        asked = "isa" if isa else "QWEN35RT_ISA"
        isa = isa or environment().isa or _native.best_isa()
        if isa not in _native.isa_names():
            raise ConfigError(f"{asked}: no instruction level {isa!r}; known: {', '.join(_native.isa_names())}")
        if isa not in _native.isa_levels():
            raise BackendUnavailable(
                f"this machine cannot run the instruction level {isa!r} ({asked}); "
                f"it has: {', '.join(_native.isa_levels())}"
            )
        self.isa = isa
        self.threads = usable_threads(threads)
        if self.threads > (cpus := own_cpus()):
            log.warning("%d threads on %d CPUs wait for each other; fewer are faster", self.threads, cpus)

    def compile(self, program: Program, limits: Limits) -> CpuExecutable:
        """Lay out the step, the workspace and the state pools."""
        return CpuExecutable(program, limits, self.isa, self.threads)


class CpuExecutable:
    """A program with its workspace, pools and threads. Not for use by two threads at once."""

    def __init__(self, program: Program, limits: Limits, isa: str, threads: int, fuse: bool = True) -> None:
        self.program, self.limits, self.isa = program, limits, isa
        self.profile = False
        self._fuse = fuse
        self._lowered: dict[bool, Lowered] = {}
        self._wanted: Float = np.zeros((0, program.logits.width), np.float32)  # logits of the last step
        s = program.state
        kv_shape = (s.attention_layers, limits.pages, s.kv_heads, limits.page_tokens, s.head_dim)
        kv_type = np.dtype(f"f{limits.value_bytes}")
        try:
            self._k: npt.NDArray[Any] = np.zeros(kv_shape, kv_type)
            self._v: npt.NDArray[Any] = np.zeros(kv_shape, kv_type)
            self._delta: Float = np.zeros((limits.slots, s.delta_layers, s.v_heads, s.d, s.d), np.float32)
            self._conv: Float = np.zeros((limits.slots, s.delta_layers, s.channels, s.conv_kernel - 1), np.float32)
            self._pool = _native.Pool(threads)
        except MemoryError as e:
            raise OutOfMemory(f"no memory for the state pools ({limits}); lower the context or the slots") from e
        state = np.zeros((), STATE)
        for name, array in (("k", self._k), ("v", self._v), ("delta", self._delta), ("conv", self._conv)):
            state[name] = array.ctypes.data
        state["kv_bytes"] = kv_type.itemsize
        state["n_pages"], state["page_tokens"] = limits.pages, limits.page_tokens
        for name in ("kv_heads", "head_dim", "attention_layers", "delta_layers", "v_heads", "d", "channels"):
            state[name] = getattr(s, name)
        state["conv_kernel"] = s.conv_kernel
        self._state = state.reshape(1).view(np.uint8).reshape(-1)

        log.info("memory: %s", ", ".join(f"{name} {n / 2**20:.1f} MiB" for name, n in self.memory.items()))

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that a full context takes. Weights are pages of the file; pools and workspace grow as they are used."""
        weights = {id(w): w.nbytes for op in self.program.ops for w in op.weights}
        return {
            "weights (mapped)": sum(weights.values()),
            "recurrent state": self._delta.nbytes + self._conv.nbytes,
            "keys and values": self._k.nbytes + self._v.nbytes,
            "workspace": self._get_lowered(self._fuse).nbytes,
        }

    @property
    def state_bytes(self) -> int:
        """Bytes of one slot."""
        return self.program.state.state_bytes()

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.program.state.page_bytes(self.limits.page_tokens, self.limits.value_bytes)

    @property
    def threads(self) -> int:
        """Threads that work on a step."""
        return self._pool.threads

    def run(self, batch: Batch, keep: Sequence[str] = (), top: int = 0) -> tuple[Float, StepReport]:
        """One step; see Executable.run. All logits are there, whatever ``top`` is."""
        self._wanted = self._wanted[:0]
        check_batch(batch, self.limits, self.program.n_vocab)
        lowered = self._get_lowered(self._fuse and not keep)
        unknown = [name for name in keep if name not in lowered.values]
        if unknown:
            raise BackendError(f"the program has no value named {unknown[0]!r}")
        seconds = np.zeros(len(lowered.op_kinds)) if self.profile else None
        start = time.perf_counter()
        status = _native.run(
            self.isa,
            self._pool,
            lowered.ops,
            self._state,
            batch.tokens,
            batch.positions.reshape(-1),
            batch.row_offsets,
            batch.starts,
            batch.slots,
            batch.pages.reshape(-1),
            batch.pages.shape[1],
            batch.out_rows,
            batch.sources,
            batch.save_rows,
            batch.save_slots,
            seconds,
        )
        if status:
            no_memory = status == 1
            raise OutOfMemory("no memory for the scratch of a step") if no_memory else BackendError(f"status {status}")
        op_seconds: dict[str, float] = defaultdict(float)
        if seconds is not None:
            for kind, spent in zip(lowered.op_kinds, seconds, strict=True):
                op_seconds[kind] += float(spent)
        values = {}
        for name in keep:
            gathered = any(v.gathered for v in self.program.values if v.name == name)
            values[name] = lowered.values[name][: len(batch.out_rows) if gathered else len(batch.tokens)].copy()
        report = StepReport(
            {"cpu": len(self.program.ops)}, time.perf_counter() - start, len(batch.tokens), dict(op_seconds), values
        )
        self._wanted = lowered.logits[: len(batch.out_rows)]
        return self._wanted, report

    def full_logits(self, row: int) -> Float:
        """All logits of a wanted row of the last step."""
        check_number("row", row, len(self._wanted))
        logits: Float = self._wanted[row]
        return logits

    def copy_slot(self, source: int, target: int) -> None:
        """Copy the recurrent state of a slot."""
        check_number("slot", source, self.limits.slots)
        check_number("slot", target, self.limits.slots)
        self._delta[target] = self._delta[source]
        self._conv[target] = self._conv[source]

    def read_slot(self, slot: int) -> tuple[Float, Float]:
        """Copies of the recurrent state of a slot; see Executable.read_slot."""
        check_number("slot", slot, self.limits.slots)
        return self._delta[slot].copy(), self._conv[slot].copy()

    def write_slot(self, slot: int, delta: Float, conv: Float) -> None:
        """Put back what read_slot gave."""
        check_number("slot", slot, self.limits.slots)
        check_state(delta, self._delta.shape[1:], "delta")
        check_state(conv, self._conv.shape[1:], "conv")
        self._delta[slot] = delta
        self._conv[slot] = conv

    def copy_page(self, source: int, target: int) -> None:
        """Copy keys and values of all layers."""
        check_number("page", source, self.limits.pages)
        check_number("page", target, self.limits.pages)
        self._k[:, target] = self._k[:, source]
        self._v[:, target] = self._v[:, source]

    def close(self) -> None:
        """Stop the threads and release workspace and pools."""
        self._pool.close()
        self._lowered.clear()
        empty = np.zeros(0, np.float32)
        self._k = self._v = self._delta = self._conv = empty
        self._wanted = self._wanted[:0]

    def _get_lowered(self, fuse: bool) -> Lowered:
        if fuse not in self._lowered:
            try:
                self._lowered[fuse] = lower(self.program, self.limits, fuse)
            except MemoryError as e:
                raise OutOfMemory(f"no memory for the workspace ({self.limits}); lower the rows of a step") from e
        return self._lowered[fuse]
