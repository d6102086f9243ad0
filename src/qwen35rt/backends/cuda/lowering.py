"""What turning a node into launches needs: sizes of a step, pools, buffers of values, weights on the device.

Receives the launcher; imports no device library.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...model.program import Program, Value, View
from ...model.weights import QTensor
from ..base import Limits
from ..fusion import QUANTIZING
from .fusion import Node, fuse, quantizers, to_nodes
from .interface import NOTHING, Grid, Kernel, Launcher
from .memory import AT, needs, share_buffers, wanted_values

Go = Callable[["Step"], None]
PIECE = 128  # keys whose sums are joined to those before: that of cuda/attention.cu


@dataclass(frozen=True)
class Step:
    """Sizes that grids depend on. ``counts``: rows of each sequence; ``outs``: rows whose logits are wanted;
    ``pieces``: blocks that share a row's attention, 0 where one block does all."""

    counts: tuple[int, ...]
    outs: int
    pieces: int = 0

    @property
    def rows(self) -> int:
        return sum(self.counts)

    def of(self, gathered: bool) -> int:
        """Rows of a value."""
        return self.outs if gathered else self.rows


@dataclass(frozen=True)
class Pools:
    """State on the device; see Limits and StateShape for the shapes."""

    keys: Any
    values: Any
    delta: Any
    conv: Any


class Counted:
    """What lowering needs of a launcher; ``launches`` counts the kernels that were launched."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.empty, self.upload = launcher.empty, launcher.upload
        self.launches = 0

    def kernel(self, file: str, variant: str, name: str) -> Kernel:
        """See Launcher.kernel."""
        kernel = self._launcher.kernel(file, variant, name)

        def launch(grid: Grid, block: int, shared_bytes: int, args: tuple[Any, ...]) -> None:
            kernel(grid, block, shared_bytes, args)
            self.launches += 1

        return launch


@dataclass(frozen=True)
class Lowered:
    """For each node its kind, the program's ops that it stands for, and its launches, in order; where values are; bytes
    of all buffers."""

    nodes: tuple[tuple[str, int, tuple[Go, ...]], ...]
    values: dict[str, Any]
    logits: Any
    nbytes: int
    launcher: Counted

    def each(self, step: Step) -> Iterator[tuple[str, int]]:
        """Launch node by node: -> kind, and the program's ops that were launched with it: none where it has nothing to
        do, as behind ``gather_rows`` where no logits are wanted."""
        for kind, ops, launches in self.nodes:
            before = self.launcher.launches
            for go in launches:
                go(step)
            yield kind, ops if self.launcher.launches > before else 0

    def go(self, step: Step) -> int:
        """Launch everything; -> the program's ops that were launched."""
        return sum(ops for _, ops in self.each(step))


def i32(*numbers: int) -> tuple[np.int32, ...]:
    """Arguments of kernels."""
    return tuple(np.int32(n) for n in numbers)


def up(n: int, unit: int) -> int:
    """n / unit, rounded up."""
    return -(-n // unit)


def part_rows(limits: Limits) -> int:
    """Pairs of a row and a piece for whose sums there is room: beyond them there are blocks enough without pieces."""
    return min(4096, limits.slots * up(limits.pages * limits.page_tokens, PIECE))


class Lowering:
    """What the functions below need to turn one op into launches."""

    def __init__(
        self,
        program: Program,
        limits: Limits,
        launcher: Launcher,
        pools: Pools,
        step: Any,
        weight: Callable[[QTensor], tuple[Any, Any]],
        keep: bool,
        tensor_cores: bool,
    ) -> None:
        self.program, self.limits, self.launcher, self.pools = program, limits, Counted(launcher), pools
        self.step, self.weight, self.tensor_cores = step, weight, tensor_cores
        wanted = wanted_values(program, keep)
        self.nodes = to_nodes(program) if keep else fuse(program, wanted)
        chosen, sizes = share_buffers(needs(self.nodes, wanted))
        made = [
            launcher.empty(((limits.out_rows if gathered else limits.rows) * width,), np.uint8)
            for width, gathered in sizes
        ]
        self.nbytes = sum(b.nbytes for b in made)
        self._buffers = {key: made[number] for key, number in chosen.items()}
        self._quantised: set[int] = set()
        self._quantizers = quantizers(self.nodes)
        self._rooms: dict[Hashable, Any] = {}

    def array(self, value: Value) -> Any:
        """A value [rows, width]."""
        rows = self.limits.out_rows if value.gathered else self.limits.rows
        flat = self._buffers["value", value.id][: rows * value.width * 4]
        return flat.view(np.float32).reshape(rows, value.width)

    def has(self, value: Value) -> bool:
        """False for a value that a fused launch never writes."""
        return ("value", value.id) in self._buffers

    def view(self, view: View) -> tuple[Any, ...]:
        """Arguments of a view: array, width, offset, stride."""
        return (self.array(view.value), *i32(view.value.width, view.offset, view.stride))

    def vector(self, numbers: npt.ArrayLike, dtype: npt.DTypeLike = np.float32) -> Any:
        """A small array of weights on the device."""
        host = np.ascontiguousarray(numbers, dtype).reshape(-1)
        array = self.launcher.empty(host.shape, dtype)
        self.launcher.upload(array, host)
        return array

    def room(self, key: Hashable, size: int, dtype: npt.DTypeLike) -> Any:
        """Memory of ``size`` numbers for what one launch leaves to a later one; all layers share that of a key."""
        array = self._rooms.get(key)
        if array is None:
            array = self._rooms[key] = self.launcher.empty((size,), dtype)
            self.nbytes += array.nbytes
        if array.size != size:
            raise ValueError(f"{key}: {size} numbers are wanted of a room of {array.size}")
        return array

    def has_room(self, key: Hashable) -> bool:
        """Whether a room was asked for before."""
        return key in self._rooms

    def launch(
        self, file: str, name: str, grid: Callable[[Step], Grid], block: int, shared: int, *args: Any, variant: str = ""
    ) -> Go:
        """A launch whose grid alone depends on the step; none where the grid is empty."""
        kernel = self.launcher.kernel(file, variant, name)

        def go(step: Step) -> None:
            size = grid(step)
            if all(size):
                kernel(size, block, shared, args)

        return go

    def own_quants(self, node: Node) -> Any:
        """Where a node that can do so is to put its output as blocks of int8; NOTHING where nobody asks for it."""
        value = node.op.outs[0]
        made = self._quantizers.get(value.id)
        if made is None or self.nodes[made] is not node or node.op.kind not in QUANTIZING:
            return NOTHING
        self._quantised.add(value.id)
        return self._buffers["quants", value.id]

    def quants(self, value: Value) -> tuple[Any, list[Go]]:
        """A value as blocks of int8, and the launch that makes them where nothing did before."""
        made = self._buffers["quants", value.id]
        if value.id in self._quantised:
            return made, []
        self._quantised.add(value.id)
        cols, gathered = value.width, value.gathered
        args = self.array(value), made, self.step, *i32(count(gathered), cols)
        return made, [self.launch("quantize", "quantize", lambda s: (up(cols, 512), s.of(gathered), 1), 128, 0, *args)]


def count(gathered: bool) -> int:
    """Where a step's number of rows is."""
    return AT["N_OUTS"] if gathered else AT["N_ROWS"]
