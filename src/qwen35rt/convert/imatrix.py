"""Importance matrices made: sums of the squared inputs that each matrix of a model meets while it reads a text.

The inputs are the named values that the program's products read, kept by the executable. Knows no file format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..backends.base import Batch, Executable, Float, Limits
from ..config import ENGINE, EVALUATION
from ..errors import GenerationFailed
from ..model.program import Op, Program
from .imatrix_file import Entry, Imatrix
from .text import Ids

Double = npt.NDArray[np.float64]
ProgressFn = Callable[[str, int, int], None]


@dataclass
class _Input:
    """A value that products read, by expert where ``route`` names who reads which row; the matrices that meet it."""

    value: str
    route: str | None
    used: int  # experts of a row
    sums: Double  # [n_expert, cols]
    counts: npt.NDArray[np.int64]  # [n_expert]
    tensors: list[str] = field(default_factory=list)

    def add(self, values: Mapping[str, Float]) -> None:
        """Account for the rows of one step."""
        x = values[self.value]
        if self.route is None:
            self._add(0, x)
            return
        chosen = values[self.route][:, : self.used].astype(np.intp)  # [T, used]
        rows = x.reshape(len(x), -1, self.sums.shape[1])  # [T, used or 1, cols]
        rows = np.broadcast_to(rows, (len(x), self.used, self.sums.shape[1]))
        for expert in np.unique(chosen):
            self._add(int(expert), rows[chosen == expert])

    def _add(self, expert: int, rows: Float) -> None:
        wide = rows.astype(np.float64)
        self.sums[expert] += np.einsum("tc,tc->c", wide, wide)
        self.counts[expert] += len(rows)


def collect(
    program: Program,
    executable: Executable,
    ids: Ids,
    *,
    process_output: bool = False,
    dataset: str | None = None,
    progress: ProgressFn | None = None,
) -> Imatrix:
    """Run chunks int32 [chunks, n_ctx], each from an empty state, and add up the inputs of all matrices.

    The output matrix is left out unless ``process_output``, which needs ``limits.out_rows`` as large as
    ``limits.rows``. ``counts`` are rows: tokens, or for an expert the tokens routed to it. ``progress``: called with
    "imatrix", tokens done and in all. Raises GenerationFailed for inputs that are not finite.
    """
    inputs = _inputs(program, process_output)
    keep = sorted({name for i in inputs for name in (i.value, i.route) if name is not None})
    limits = executable.limits
    pages = np.arange(limits.pages, dtype=np.int32)
    count, n_ctx = ids.shape
    for chunk in range(count):
        for start in range(0, n_ctx, limits.rows):
            piece = ids[chunk, start : start + limits.rows]
            wanted = range(len(piece)) if process_output else ()
            _, report = executable.run(Batch.single(piece, start, pages, 0, wanted), keep)
            for i in inputs:
                i.add(report.values)
            if progress is not None:
                progress("imatrix", chunk * n_ctx + start + len(piece), ids.size)
        for i in inputs:
            if not np.isfinite(i.sums).all():
                raise GenerationFailed(f"chunk {chunk + 1} of {count}: inputs of {i.tensors[0]} are not finite")
    entries = {
        name: Entry(i.sums.astype(np.float32), i.counts.astype(np.float32)) for i in inputs for name in i.tensors
    }
    return Imatrix(entries, count, n_ctx, (dataset,) if dataset is not None else ())


def step_limits(program: Program, n_ctx: int, n_batch: int | None = None, process_output: bool = False) -> Limits:
    """Sizes of the steps of ``collect``. Where values are kept none shares its memory with another: without
    ``n_batch`` the rows of a step are as many as ``EVALUATION.workspace_bytes`` hold."""
    if n_batch is not None:
        rows = min(n_ctx, n_batch)
    else:
        row_bytes = 4 * sum(v.width for v in program.values if process_output or not v.gathered)
        most = max(1, min(n_ctx, ENGINE.n_batch, EVALUATION.workspace_bytes // row_bytes))
        rows = -(-n_ctx // -(-n_ctx // most))  # steps of about equal size
    return Limits(
        rows=rows,
        out_rows=rows if process_output else 1,
        slots=1,
        pages=-(-n_ctx // ENGINE.page_tokens),
        page_tokens=ENGINE.page_tokens,
    )


def _inputs(program: Program, process_output: bool) -> list[_Input]:
    """The values to look at. Products that read the same value share one; parts of a fused tensor are one matrix."""
    found: dict[tuple[str, str | None], _Input] = {}
    for op in program.ops:
        if op.kind not in ("linear", "moe_linear") or (op.outs[0] is program.logits and not process_output):
            continue
        route = op.ins[1].value.name if op.kind == "moe_linear" else None
        key = (op.ins[0].value.name, route)
        if key not in found:
            found[key] = _new_input(op, route)
        tensors = found[key].tensors
        for w in op.weights:
            if w.tensor_name not in tensors:
                tensors.append(w.tensor_name)
    return list(found.values())


def _new_input(op: Op, route: str | None) -> _Input:
    w = op.weights[0]
    experts = w.n_expert if route is not None else 1
    return _Input(
        value=op.ins[0].value.name,
        route=route,
        used=int(op.attrs.get("used", 1)),
        sums=np.zeros((experts, w.cols)),
        counts=np.zeros(experts, np.int64),
    )
