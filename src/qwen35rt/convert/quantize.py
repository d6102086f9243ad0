"""Makes a model file of other formats: plans each tensor, then streams it through the native quantisers in pieces.

Memory is a few pieces, whatever the model's size. Which format a tensor gets is decided in ``mixes``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGUFValueType

from ..errors import ConfigError, ModelFileError
from ..formats import Format
from ..model.gguf_file import GgufFile, TensorInfo
from ..model.hparams import read_hparams
from ..model.weights import QTensor
from .imatrix_file import Imatrix, check_coverage
from .mixes import Mix, MixOptions, choose
from .rows import NONE, Bytes, Float, RowQuantizer, RowsNotFinite, RowsOutOfRange
from .writer import GgufOutput, TensorPlan, Typed

__all__ = ["WRITABLE", "QuantizePlan", "TensorStep", "make_plan", "run_plan"]

Progress = Callable[[str, int, int], None]

# What csrc/kernels/quantize_*.c make; the others are only read.
WRITABLE: tuple[str, ...] = (
    *("F32", "F16", "BF16"),
    *("Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "MXFP4", "Q3_K", "Q2_K"),
)

_PIECE_BYTES = 16 << 20  # of float32 rows: large enough for all threads, small beside a model
_VERSION = 2  # general.quantization_version: how ggml reads its own formats


@dataclass(frozen=True, eq=False)
class TensorStep:
    """A tensor and what becomes of it. ``note``: why the format is not the one asked for."""

    tensor: TensorInfo
    format: Format
    note: str | None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the new file."""
        return math.prod(self.tensor.shape[1:]) * self.format.row_bytes(self.tensor.shape[0])

    @property
    def changes(self) -> bool:
        """Whether it is quantised rather than copied."""
        return self.format is not self.tensor.format


@dataclass(frozen=True, eq=False)
class QuantizePlan:
    """All that will be written. ``notes``: lines that a user should see."""

    source: GgufFile
    steps: tuple[TensorStep, ...]
    metadata: dict[str, Typed]
    imatrix: Imatrix | None
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the new file."""
        return sum(step.nbytes for step in self.steps)

    @property
    def weights(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(step.tensor.shape) for step in self.steps)


def make_plan(
    source: GgufFile,
    mix: Mix,
    options: MixOptions,
    imatrix: tuple[str, Imatrix] | None = None,
    allow_requantize: bool = False,
) -> QuantizePlan:
    """Decide everything without reading weights. ``imatrix``: the file's name and what is in it.

    Raises ConfigError for options that do not fit the model and for a quantised source without ``allow_requantize``,
    ModelFileError for a model or an importance matrix that cannot be used.
    """
    hp = read_hparams(source)
    choices = choose(mix, {n: t.shape for n, t in source.tensors.items()}, hp, options)
    steps = tuple(
        TensorStep(tensor, choices[name].format or tensor.format, choices[name].note)
        for name, tensor in source.tensors.items()
    )
    unwritable = sorted({s.format.name for s in steps if s.changes} - set(WRITABLE))
    if unwritable:
        raise ConfigError(f"{', '.join(unwritable)} cannot be made, only read; there are {', '.join(WRITABLE)}")
    again = [s for s in steps if s.changes and s.tensor.format.quantized]
    if again and not allow_requantize:
        first = again[0].tensor
        raise ConfigError(
            f"{source.path}: tensor '{first.name}' and {len(again) - 1} more are already quantised "
            f"({first.format.name}); start from an F32, F16 or BF16 file, or accept the loss with --allow-requantize"
        )
    notes = [f"{s.tensor.name}: {s.note}" for s in steps if s.note]
    if imatrix is not None:
        wanted = frozenset(
            s.tensor.name for s in steps if s.changes and s.format.quantized and s.tensor.name.startswith("blk.")
        )
        notes += check_coverage(imatrix[1], source.tensors, wanted, imatrix[0]).notes()
    metadata = _metadata(source, mix, imatrix)
    return QuantizePlan(source, steps, metadata, imatrix[1] if imatrix else None, tuple(notes))


def run_plan(
    plan: QuantizePlan, output: str | os.PathLike[str], threads: int | None = None, progress: Progress | None = None
) -> None:
    """Write the file; ``progress(stage, done, total)`` counts MiB of the source. Nothing is left after an error.

    ``threads`` None: the cores that may be used. Raises what GgufOutput does, and ModelFileError naming tensor and row
    for values that no format can hold.
    """
    plans = [TensorPlan(s.tensor.name, s.tensor.shape[::-1], s.format) for s in plan.steps]
    total = sum(s.tensor.nbytes for s in plan.steps)
    done = 0

    def count(read: int) -> None:
        nonlocal done
        done += read
        if progress is not None:
            progress("quantising, MiB", done >> 20, total >> 20)

    with (
        RowQuantizer(threads) as quantizer,
        GgufOutput(output, plan.metadata, plans, inputs=plan.source.paths) as file,
    ):
        for step in plan.steps:
            pieces = _quantized(plan, step, quantizer) if step.changes else _copied(step)
            file.write(step.tensor.name, _counted(pieces, count))


def _counted(pieces: Iterator[tuple[int, Bytes]], count: Callable[[int], None]) -> Iterator[Bytes]:
    """The pieces to be written; ``count`` is told what was read for each that is written."""
    for read, piece in pieces:
        yield piece
        count(read)


def _copied(step: TensorStep) -> Iterator[tuple[int, Bytes]]:
    """A tensor's own bytes -> (bytes of the source, bytes to be written)."""
    for start in range(0, step.tensor.nbytes, _PIECE_BYTES):
        piece = step.tensor.data[start : start + _PIECE_BYTES]
        yield piece.nbytes, piece


def _quantized(plan: QuantizePlan, step: TensorStep, quantizer: RowQuantizer) -> Iterator[tuple[int, Bytes]]:
    """A tensor in its new format, in groups of rows; -> as in _copied. A piece is valid until the next is asked for."""
    tensor = step.tensor
    columns, rows, experts = tensor.shape[0], tensor.shape[1], math.prod(tensor.shape[2:])
    row_bytes, new_row_bytes = tensor.format.row_bytes(columns), step.format.row_bytes(columns)
    entry = plan.imatrix.entries.get(tensor.name) if plan.imatrix else None
    importance = None if entry is None else entry.importance
    group = max(1, min(rows, _PIECE_BYTES // (4 * columns)))
    target = np.empty(group * new_row_bytes, np.uint8)
    for expert in range(experts):
        weights = NONE if importance is None else importance[expert]
        for start in range(0, rows, group):
            count = min(group, rows - start)
            first = (expert * rows + start) * row_bytes
            raw = tensor.data[first : first + count * row_bytes]
            # A scale of the product is a tensor of its own, which stays beside the new one.
            piece = QTensor(tensor.name, tensor.format, count, columns, 1, raw, row_bytes, count * row_bytes)
            values = piece.dequantize()
            try:
                out = quantizer.quantize(values, step.format, weights, target)
            except (RowsNotFinite, RowsOutOfRange) as e:
                raise _refused(plan, step, e, values, (expert, start)) from None
            yield raw.nbytes, out


def _refused(
    plan: QuantizePlan, step: TensorStep, error: RowsNotFinite | RowsOutOfRange, values: Float, at: tuple[int, int]
) -> ModelFileError:
    """Names the tensor and the row of a piece that begins at (expert, row) ``at``."""
    expert, start = at
    finite = np.isfinite(values).all(axis=1)
    row = start + int((~finite).argmax() if isinstance(error, RowsNotFinite) else np.abs(values).max(axis=1).argmax())
    where = f" of matrix {expert}" if math.prod(step.tensor.shape[2:]) > 1 else ""
    remedy = (
        "the file is damaged"
        if isinstance(error, RowsNotFinite)
        else f"keep it in BF16 (--tensor-type {step.tensor.name}=BF16)"
    )
    path = plan.source.paths[step.tensor.part]
    return ModelFileError(f"{path}: tensor '{step.tensor.name}', row {row}{where} holds {error}; {remedy}")


def _metadata(source: GgufFile, mix: Mix, imatrix: tuple[str, Imatrix] | None) -> dict[str, Typed]:
    """The keys of the source with their stored types, but what states how it was quantised and split."""
    found: dict[str, Typed] = {}
    for key in source.metadata:
        if key.startswith("split."):
            continue
        kind, item = source.metadata.stored_type(key)
        if item is not None and source.metadata.array_length(key) == 0:
            continue  # the container's writer has no empty arrays
        found[key] = Typed(source.metadata[key], GGUFValueType(kind), None if item is None else GGUFValueType(item))

    def state(key: str, value: Any) -> None:
        found[key] = Typed(value, GGUFValueType.STRING if isinstance(value, str) else GGUFValueType.UINT32)

    state("general.quantization_version", _VERSION)
    state("general.file_type", mix.file_type)
    if imatrix is not None:
        name, matrix = imatrix
        state("quantize.imatrix.file", name)
        if matrix.datasets:
            state("quantize.imatrix.dataset", ", ".join(matrix.datasets))
        state("quantize.imatrix.entries_count", len(matrix.entries))
        state("quantize.imatrix.chunks_count", matrix.chunk_count)
    return found
