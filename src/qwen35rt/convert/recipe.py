"""How one GGUF tensor is made from tensors of a checkpoint, and its making, piece by piece. Knows no names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..config import CONVERT
from ..errors import ModelFileError
from ..formats import BY_NAME, Format
from .checkpoint import Checkpoint, HfTensor, check_dtype
from .encode import Float, encode, is_finite, to_float32
from .rows import RowsOutOfRange
from .writer import TensorPlan

Array = npt.NDArray[Any]
Index = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Recipe:
    """GGUF tensor ``name`` of ``shape`` (numpy's order) from the tensors ``sources``, each of ``source_shape``.

    The sources are seen as one matrix: stacked, in rows of ``shape[-1]``, or of one element for a vector. Of it the
    ``rows`` are taken, of each row the ``cols``, in that order (None: all), then ``change`` is applied. ``matrix``:
    stored in the type that the user asks for, else in F32.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    source_shape: tuple[int, ...]
    matrix: bool = True
    rows: Index | None = None
    cols: Index | None = None
    change: Callable[[Float], Float] | None = None

    def plan(self, form: Format) -> TensorPlan:
        """The tensor as it is stored, if matrices are to be stored in ``form``."""
        if not self.matrix:
            form = BY_NAME["F32"]
        elif self.shape[-1] % form.block:
            form = BY_NAME["F16"]
        return TensorPlan(self.name, self.shape, form)


def check(recipe: Recipe, checkpoint: Checkpoint) -> list[HfTensor]:
    """The sources of a recipe. Raises ModelFileError for one that is missing, of another shape or another type."""
    found: list[HfTensor] = []
    for name in recipe.sources:
        tensor = checkpoint.tensors.get(name)
        if tensor is None:
            raise ModelFileError(
                f"{checkpoint.folder}: tensor '{name}' is missing; '{recipe.name}' is made from it, with the shape "
                f"{list(recipe.source_shape)} by config.json"
            )
        if tensor.shape != recipe.source_shape:
            raise ModelFileError(
                f"{tensor.file}: tensor '{name}' has the shape {list(tensor.shape)}; config.json needs "
                f"{list(recipe.source_shape)}"
            )
        check_dtype(tensor)
        if found and tensor.dtype != found[0].dtype:
            raise ModelFileError(
                f"{tensor.file}: tensor '{name}' is {tensor.dtype}, '{found[0].name}' {found[0].dtype}"
            )
        found.append(tensor)
    return found


def pieces(recipe: Recipe, checkpoint: Checkpoint, form: Format) -> Iterator[Array]:
    """The tensor in groups of whole rows, each as GgufOutput.write takes it.

    Raises ModelFileError for numbers that are not finite or that ``form`` cannot hold.
    """
    tensors = check(recipe, checkpoint)
    dtype = check_dtype(tensors[0])
    width = 1 if len(recipe.shape) == 1 else recipe.shape[-1]
    total = math.prod(recipe.shape) // width
    step = max(1, CONVERT.piece_bytes // (4 * width))
    for start in range(0, total, step):
        stop = min(total, start + step)
        index = np.arange(start, stop) if recipe.rows is None else recipe.rows[start:stop]
        raw = _gather(checkpoint, tensors, index, np.empty((len(index), width), dtype))
        if recipe.cols is not None:
            raw = raw[:, recipe.cols]
        if not is_finite(raw):
            raise _fault(tensors[0], "holds numbers that are not finite")
        if recipe.change is None and tensors[0].dtype == form.name:
            yield raw  # as it is: nothing else to do for most of a checkpoint
            continue
        values = to_float32(raw)
        if recipe.change is not None:
            values = recipe.change(values)
            if not is_finite(values):
                raise _fault(tensors[0], f"makes '{recipe.name}' infinite")
        try:
            yield encode(values, form)
        except (OverflowError, RowsOutOfRange) as e:
            raise _fault(tensors[0], f"holds {e}; use --outtype bf16 or f32") from None


def _fault(tensor: HfTensor, text: str) -> ModelFileError:
    return ModelFileError(f"{tensor.file}: tensor '{tensor.name}' {text}")


def _gather(checkpoint: Checkpoint, tensors: list[HfTensor], index: Index, out: Array) -> Array:
    """Fill ``out`` [len(index), width] with rows of the stacked tensors, one read for each run of adjacent rows."""
    width = out.shape[1]
    rows = tensors[0].size // width
    part = index // rows
    cuts = np.flatnonzero((np.diff(index) != 1) | (np.diff(part) != 0)) + 1
    for a, b in zip([0, *cuts.tolist()], [*cuts.tolist(), len(index)], strict=True):
        checkpoint.read(tensors[int(part[a])], int(index[a] % rows) * width, out[a:b])
    return out
