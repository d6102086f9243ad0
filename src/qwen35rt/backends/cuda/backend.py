"""The CUDA backend: weights and state on the device, one stream, decode steps replayed as graphs.

Owns device memory of a program; knows no device library: the launcher is given.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from ...errors import BackendError, ConfigError, OutOfMemory
from ...model.program import Program
from ...model.weights import QTensor
from ..base import Batch, Float, Int, Limits, Logits, StepReport, check_batch, check_number, check_state
from .interface import NOTHING, Launcher
from .lowering import PIECE, Lowered, Lowering, Pools, Step, i32, part_rows, up
from .memory import HEADER, pack_step
from .ops import lower
from .sample import TOP_MOST, TopK

log = logging.getLogger(__name__)

MOST_ROWS = 65_535  # blocks that a grid can have along an axis that counts rows
COPIED_BYTES = 256 * 4 * 16  # of a block of cuda/copy.cu: four words of each thread
MOST_COPYING = 1024  # blocks: enough for all multiprocessors; each takes more where a state is large


class CudaBackend:
    """Compiles programs for the device behind ``launcher``. ``graphs``: replay decode steps as graphs.

    ``tensor_cores`` false: a row's result is the same bits in any step. With them, steps of many rows add up products,
    attention and the delta rule in another order (docs/cuda.md).
    """

    name = "cuda"

    def __init__(self, launcher: Launcher, graphs: bool = True, tensor_cores: bool = True) -> None:
        self.launcher, self.graphs = launcher, graphs
        self.tensor_cores = tensor_cores and launcher.tensor_cores
        self.threads = 1  # of the host

    @property
    def description(self) -> str:
        """The device's name."""
        return self.launcher.description

    def free_bytes(self) -> int:
        """Memory of the device that can be had now."""
        with self.launcher.activate():
            return self.launcher.free_bytes()

    def compile(self, program: Program, limits: Limits) -> CudaExecutable:
        """Upload weights, allocate pools and workspace. Raises OutOfMemory, ConfigError for steps of too many rows."""
        if limits.rows > MOST_ROWS:
            raise ConfigError(f"steps of {limits.rows} rows; a CUDA device takes up to {MOST_ROWS}")
        with self.launcher.activate():
            return CudaExecutable(program, limits, self.launcher, self.graphs, self.tensor_cores)


class CudaExecutable:
    """A program with its weights, workspace and pools. Not for use by two threads at once."""

    def __init__(
        self, program: Program, limits: Limits, launcher: Launcher, graphs: bool = True, tensor_cores: bool = True
    ) -> None:
        self.program, self.limits, self.launcher = program, limits, launcher
        self.profile = False
        self._graphs_on, self._tensor_cores = graphs, tensor_cores
        s = program.state
        kv_shape = (s.attention_layers, limits.pages, s.kv_heads, limits.page_tokens, s.head_dim)
        kept = np.float16 if limits.kv_dtype == "f16" else np.float32
        self._pools = Pools(
            launcher.zeros(kv_shape, kept),
            launcher.zeros(kv_shape, kept),
            launcher.zeros((limits.slots, s.delta_layers, s.v_heads, s.d, s.d), np.float32),
            launcher.zeros((limits.slots, s.delta_layers, s.channels, s.conv_kernel - 1), np.float32),
        )
        self._weights: dict[int, tuple[Any, Any]] = {}  # by id: the program keeps its tensors alive
        self._lowered: dict[bool, Lowered] = {}
        # By sizes and ``top``, with the ops that each launches. None: ran once, to be captured next time.
        self._graphs: dict[tuple[Step, int], tuple[Callable[[], object], int] | None] = {}
        self._tops: dict[int, TopK] = {}
        self._copy_items = launcher.kernel("copy", "", "copy_items")
        # Rows, sequences and pages of most steps; a step that needs more makes room.
        self._step: Any = launcher.empty((len(HEADER) + 8 * limits.rows + 8 * limits.slots + limits.pages,), np.int32)
        self._wanted: Any = ()  # logits of the last step, on the device
        self._logits: Float = np.zeros((0, program.logits.width), np.float32)  # on the host
        self._get_lowered(False)
        log.info("memory: %s", ", ".join(f"{name} {n / 2**20:.1f} MiB" for name, n in self.memory.items()))

    @property
    def memory(self) -> dict[str, int]:
        """Bytes on the device."""
        p = self._pools
        scales = (a.nbytes for pair in self._weights.values() for a in pair if a is not NOTHING)
        return {
            "weights": sum(scales),
            "recurrent state": p.delta.nbytes + p.conv.nbytes,
            "keys and values": p.keys.nbytes + p.values.nbytes,
            "workspace": sum(lowered.nbytes for lowered in self._lowered.values()),
        }

    @property
    def state_bytes(self) -> int:
        """Bytes of one slot."""
        return self.program.state.state_bytes()

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.program.state.page_bytes(self.limits.page_tokens, self.limits.value_bytes)

    # -------------------------------------------------------------------------------------- steps

    @overload
    def run(self, batch: Batch, keep: Sequence[str] = ()) -> tuple[Float, StepReport]: ...

    @overload
    def run(self, batch: Batch, keep: Sequence[str] = (), *, top: int) -> tuple[Logits, StepReport]: ...

    def run(self, batch: Batch, keep: Sequence[str] = (), top: int = 0) -> tuple[Logits, StepReport]:
        """One step; see Executable.run. With ``keep``, or where ``top`` is too many to be found, all logits are there.

        Otherwise they stay on the device, and the largest come with one copy.
        """
        began = time.perf_counter()
        self._wanted = ()
        n, width = len(batch.out_rows), self.program.logits.width
        some = top if not keep and 0 < top < min(width, TOP_MOST + 1) else 0
        with self.launcher.activate():
            lowered, ran, op_seconds = self._launch(batch, keep, some)
            gathered = {v.name: v.gathered for v in self.program.values}
            values = {
                name: self.launcher.download(lowered.values[name][: n if gathered[name] else len(batch.tokens)]).copy()
                for name in keep
            }
            logits: Logits
            if some:
                logits = self._tops[some].best(n)
            else:
                logits = self.launcher.download(lowered.logits[:n], self._room(n))
        self._wanted = lowered.logits[:n]
        return logits, self._report(batch, ran, began, op_seconds, values)

    def full_logits(self, row: int) -> Float:
        """All logits of a wanted row of the last step, copied now."""
        check_number("row", row, len(self._wanted))
        with self.launcher.activate():
            logits: Float = self.launcher.download(self._wanted[row], self._room(len(self._wanted))[row])
        return logits

    def _room(self, n: int) -> Float:
        """Room on the host for n whole rows."""
        if len(self._logits) < n:
            self._logits = self.launcher.host((n, self.program.logits.width), np.float32)
        return self._logits[:n]

    def _report(
        self, batch: Batch, ran: int, began: float, op_seconds: dict[str, float], values: dict[str, Float]
    ) -> StepReport:
        return StepReport({"cuda": ran}, time.perf_counter() - began, len(batch.tokens), op_seconds, values)

    def _launch(self, batch: Batch, keep: Sequence[str], top: int) -> tuple[Lowered, int, dict[str, float]]:
        """-> the program's launches, how many of its ops were launched, seconds by kind of op. Behind them the ``top``
        largest logits are found, if that is above 0."""
        check_batch(batch, self.limits, self.program.n_vocab)
        unknown = set(keep) - {v.name for v in self.program.values}
        if unknown:
            raise BackendError(f"the program has no value named {sorted(unknown)[0]!r}")
        self._send(pack_step(batch))
        lowered = self._get_lowered(bool(keep))
        if top and top not in self._tops:
            self._tops[top] = TopK(self.launcher, lowered.logits, self._step, top)
        step = self._step_of(batch)
        bucket = None if keep or self.profile else self._bucket(batch)
        seconds: dict[str, float] = {}
        if bucket is not None:
            ran = self._replay(lowered, bucket, top)
        elif self.profile:
            ran, seconds = self._go_timed(lowered, step)
            self._go_top(step, top)
        else:
            ran = self._go(lowered, step, top)
        return lowered, ran, seconds

    def _go(self, lowered: Lowered, step: Step, top: int) -> int:
        """Launch all of a step; -> the program's ops that were launched."""
        ran = lowered.go(step)
        self._go_top(step, top)
        return ran

    def _go_top(self, step: Step, top: int) -> None:
        if top:
            self._tops[top].go(step)

    def _go_timed(self, lowered: Lowered, step: Step) -> tuple[int, dict[str, float]]:
        """Waits behind each op: the sum is more than a step takes."""
        ran, seconds, began = 0, defaultdict[str, float](float), time.perf_counter()
        for kind, ops in lowered.each(step):
            self.launcher.synchronize()
            now = time.perf_counter()
            ran, seconds[kind], began = ran + ops, seconds[kind] + now - began, now
        return ran, dict(seconds)

    def _replay(self, lowered: Lowered, bucket: Step, top: int) -> int:
        """Run a bucket's launches: at first as they are, which compiles what is missing; then as a graph.

        A bucket whose graph finds no memory goes on as it began.
        """
        key = bucket, top
        if key not in self._graphs:
            ran = self._go(lowered, bucket, top)
            self._graphs[key] = None  # not before: what failed may have left something to compile
            return ran
        made = self._graphs[key]
        if made is None:
            launched: list[int] = []
            replay: Callable[[], object] = partial(self._go, lowered, bucket, top)
            try:
                replay = self.launcher.capture(lambda: launched.append(self._go(lowered, bucket, top)))
            except OutOfMemory as e:
                if not launched:
                    raise
                log.warning("no graph for steps of %d sequences, which are slower so: %s", bucket.rows, e)
            made = self._graphs[key] = replay, sum(launched)
        graph, ran = made
        graph()
        return ran

    def _bucket(self, batch: Batch) -> Step | None:
        """Sizes of the graph that serves a step of one row for each sequence; None for other steps."""
        rows = len(batch.tokens)
        size = 1 << (rows - 1).bit_length()
        if not self._graphs_on or rows != len(batch.starts) or len(batch.out_rows) > size:
            return None
        pieces = up(int(batch.starts.max()) + 1, PIECE)
        return Step((1,) * size, size, self._pieces(size, 1 << (pieces - 1).bit_length()))

    def _step_of(self, batch: Batch) -> Step:
        counts = np.diff(batch.row_offsets)
        pieces = up(int((batch.starts + counts).max()), PIECE)
        decode = len(batch.tokens) == len(batch.starts)
        split = self._pieces(len(batch.tokens), pieces) if decode else 0
        return Step(tuple(counts.tolist()), len(batch.out_rows), split)

    def _pieces(self, rows: int, pieces: int) -> int:
        """Blocks that share a row's attention; 0 where one piece is all there is, or there is no room for sums."""
        has_attention = self.program.state.attention_layers > 0
        return pieces if has_attention and pieces > 1 and rows * pieces <= part_rows(self.limits) else 0

    def _send(self, packed: Int) -> None:
        if packed.size > self._step.size:  # graphs and launches hold the old array's address
            self._lowered.clear()
            self._graphs.clear()
            self._tops.clear()
            self._step = self.launcher.empty((2 * packed.size,), np.int32)
        self.launcher.upload(self._step[: packed.size], packed)

    # -------------------------------------------------------------------------------------- state

    def copy_slot(self, source: int, target: int) -> None:
        """Copy the recurrent state of a slot."""
        check_number("slot", source, self.limits.slots)
        check_number("slot", target, self.limits.slots)
        if source != target:
            self._copy(self._pools.delta, self._pools.conv, 1, self.limits.slots, source, target)

    def copy_page(self, source: int, target: int) -> None:
        """Copy keys and values of all layers."""
        check_number("page", source, self.limits.pages)
        check_number("page", target, self.limits.pages)
        if source != target:
            layers = self.program.state.attention_layers
            self._copy(self._pools.keys, self._pools.values, layers, self.limits.pages, source, target)

    def _copy(self, first: Any, second: Any, outer: int, items: int, source: int, target: int) -> None:
        """One item of two pools [outer, items, ...] over another: one launch behind the steps before."""
        sizes = [pool.nbytes // (outer * items) if pool.nbytes else 0 for pool in (first, second)]
        blocks = min(up(max(sizes), COPIED_BYTES), MOST_COPYING)
        if blocks:
            with self.launcher.activate():
                args = first, second, *i32(*sizes, items, source, target)
                self._copy_items((blocks, outer, 2), 256, 0, args)

    def read_slot(self, slot: int) -> tuple[Float, Float]:
        """Copies of the recurrent state of a slot; see Executable.read_slot."""
        check_number("slot", slot, self.limits.slots)
        with self.launcher.activate():
            delta, conv = (self.launcher.download(pool[slot]) for pool in (self._pools.delta, self._pools.conv))
        return delta, conv

    def write_slot(self, slot: int, delta: Float, conv: Float) -> None:
        """Put back what read_slot gave."""
        check_number("slot", slot, self.limits.slots)
        check_state(delta, self._pools.delta.shape[1:], "delta")
        check_state(conv, self._pools.conv.shape[1:], "conv")
        with self.launcher.activate():
            self.launcher.upload(self._pools.delta[slot], np.ascontiguousarray(delta, np.float32))
            self.launcher.upload(self._pools.conv[slot], np.ascontiguousarray(conv, np.float32))

    def close(self) -> None:
        """Release weights, pools, graphs and workspace while the device is current; what a lost one had, too."""
        try:
            with self.launcher.activate():
                self._release()
        except BackendError as e:
            log.warning("a device that failed was left: %s", e)
            self._release()

    def _release(self) -> None:
        self._graphs.clear()
        self._tops.clear()
        self._lowered.clear()
        self._weights.clear()
        self._pools = Pools(None, None, None, None)
        self._step, self._wanted = None, ()

    # -------------------------------------------------------------------------------------- weights

    def _get_lowered(self, keep: bool) -> Lowered:
        if keep not in self._lowered:
            pools, step, cores = self._pools, self._step, self._tensor_cores
            args = self.program, self.limits, self.launcher, pools, step, self._weight, keep, cores
            self._lowered[keep] = lower(Lowering(*args))
        return self._lowered[keep]

    def _weight(self, tensor: QTensor) -> tuple[Any, Any]:
        """A tensor's bytes on the device, experts one behind the other, and its scales (NOTHING: none)."""
        if id(tensor) not in self._weights:
            size = tensor.rows * tensor.row_bytes
            data = self.launcher.empty((tensor.n_expert * size,), np.uint8)
            if tensor.expert_stride == size or tensor.n_expert == 1:
                self.launcher.upload(data, _flat(tensor.data[: data.size]))
            else:  # part of a fused tensor
                for e in range(tensor.n_expert):
                    at = e * tensor.expert_stride
                    self.launcher.upload(data[e * size : (e + 1) * size], _flat(tensor.data[at : at + size]))
            scale: Any = NOTHING
            if tensor.scale is not None:
                scale = self.launcher.empty(tensor.scale.shape, np.float32)
                self.launcher.upload(scale, np.ascontiguousarray(tensor.scale, np.float32))
            self._weights[id(tensor)] = data, scale
        return self._weights[id(tensor)]


def _flat(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(data).reshape(-1)
