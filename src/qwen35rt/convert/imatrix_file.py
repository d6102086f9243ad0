"""Importance matrices as files: how much each input column of a matrix matters, by the squares that it has met.

Reads and writes the GGUF form that llama-imatrix has: for a matrix NAME the F32 tensors NAME.in_sum2 and NAME.counts.
Knows neither how the sums are made nor what is done with them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import ModelFileError
from ..formats import BY_NAME
from ..model.gguf_file import GgufFile, TensorInfo, open_gguf
from .writer import GgufOutput, TensorPlan, Typed

__all__ = ["Coverage", "Entry", "Imatrix", "check_coverage", "read_imatrix", "write_imatrix"]

Float = npt.NDArray[np.float32]

_SUMS, _COUNTS = ".in_sum2", ".counts"
_OLD_NAME_BYTES = 4_096  # of a name in the old form; longer ones were never written
_SHOWN = 8


@dataclass(frozen=True, eq=False)
class Entry:
    """What was seen of one matrix, or of its E experts: ``in_sum2`` float32 [E, cols] is the sum over tokens of the
    squared inputs, ``counts`` float32 [E] how many tokens these were (in the unit that the writer chose)."""

    in_sum2: Float
    counts: Float

    @property
    def importance(self) -> Float:
        """Mean squared inputs, float32 [E, cols]; ones for an expert that no token has reached."""
        seen = self.counts[:, None] > 0
        ones = np.ones_like(self.in_sum2)
        return np.where(seen, np.divide(self.in_sum2, self.counts[:, None], out=ones.copy(), where=seen), ones)


@dataclass(frozen=True, eq=False)
class Imatrix:
    """Entries by the name of the weight tensor. ``chunk_count`` chunks of ``chunk_size`` tokens were run, of the texts
    that ``datasets`` names."""

    entries: Mapping[str, Entry]
    chunk_count: int
    chunk_size: int
    datasets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Coverage:
    """Names of wanted matrices without an entry, and of entries that are of no tensor of the model."""

    missing: tuple[str, ...]
    extra: tuple[str, ...]

    def notes(self) -> list[str]:
        """What a user should know, a line each."""
        found = []
        if self.missing:
            found.append(f"no entry for {_some(self.missing)}: quantised without importance weights")
        if self.extra:
            found.append(f"entries of no tensor of the model: {_some(self.extra)}")
        return found


def read_imatrix(path: str | os.PathLike[str]) -> Imatrix:
    """Read a file.

    Raises ModelFileError for a file that is missing, damaged, of another kind or in the old form (.dat), and for sums
    and counts that do not belong together or are negative, NaN or infinite.
    """
    file = Path(path)
    if file.is_file() and _is_old(file):
        raise ModelFileError(
            f"{file}: an importance matrix in the old .dat form, which is not read; make it GGUF with llama.cpp's "
            f"llama-imatrix --in-file {file.name} -o {file.stem}.gguf, or anew with qwen35rt imatrix"
        )
    with open_gguf(file) as f:
        kind = f.metadata.get("general.type")
        if kind != "imatrix":
            found = "is missing" if kind is None else f"is {kind!r}"
            raise ModelFileError(f"{file}: no importance matrix: key 'general.type' {found}, 'imatrix' is needed")
        entries = {
            name.removesuffix(_SUMS): _entry(f, name.removesuffix(_SUMS)) for name in f.tensors if name.endswith(_SUMS)
        }
        if not entries:
            raise ModelFileError(f"{file}: the importance matrix has no entries (tensors NAME{_SUMS})")
        return Imatrix(
            entries,
            chunk_count=f.get_int("imatrix.chunk_count"),
            chunk_size=f.get_int("imatrix.chunk_size"),
            datasets=tuple(f.get_strs("imatrix.datasets", ())),
        )


def write_imatrix(path: str | os.PathLike[str], imatrix: Imatrix) -> None:
    """Write a file; nothing is left of it after an error. Raises what GgufOutput does, ValueError for bad entries."""
    from gguf import GGUFValueType

    metadata = {
        "general.architecture": "imatrix",  # a model program that is given the file can say what it is
        "general.type": "imatrix",
        "imatrix.datasets": Typed(list(imatrix.datasets), GGUFValueType.ARRAY, GGUFValueType.STRING),
        "imatrix.chunk_count": imatrix.chunk_count,
        "imatrix.chunk_size": imatrix.chunk_size,
    }
    if not imatrix.datasets:
        del metadata["imatrix.datasets"]  # the container's writer has no empty arrays
    plans: list[TensorPlan] = []
    values: list[Float] = []
    for name, entry in imatrix.entries.items():
        experts, columns = entry.in_sum2.shape
        if entry.counts.shape != (experts,):
            raise ValueError(f"'{name}': {experts} experts and counts of the shape {entry.counts.shape}")
        one = experts == 1
        for suffix, array, shape in (
            (_SUMS, entry.in_sum2, (columns,) if one else (experts, columns)),
            (_COUNTS, entry.counts, (1,) if one else (experts, 1)),
        ):
            plans.append(TensorPlan(name + suffix, shape, BY_NAME["F32"]))
            values.append(np.ascontiguousarray(array, np.float32))
    with GgufOutput(path, metadata, plans) as output:
        for plan, array in zip(plans, values, strict=True):
            output.write(plan.name, array)


def check_coverage(
    imatrix: Imatrix, tensors: Mapping[str, TensorInfo], wanted: frozenset[str], source: str | os.PathLike[str]
) -> Coverage:
    """Compare the entries with the tensors of a model; ``wanted`` are the names that will be looked up.

    Raises ModelFileError naming ``source`` and the entry if one has other columns or experts than its tensor.
    """
    for name, entry in imatrix.entries.items():
        if name not in tensors:
            continue
        shape = tensors[name].shape
        need = (shape[2] if len(shape) > 2 else 1, shape[0])
        if entry.in_sum2.shape != need:
            experts, columns = entry.in_sum2.shape
            raise ModelFileError(
                f"{source}: the entry '{name}' is for {columns} columns of {experts} matrices, the tensor has "
                f"{need[1]} of {need[0]}; the importance matrix belongs to another model"
            )
    missing = tuple(sorted(wanted - imatrix.entries.keys()))
    return Coverage(missing, tuple(n for n in imatrix.entries if n not in tensors))


def _entry(f: GgufFile, name: str) -> Entry:
    sums, counts = _values(f, name + _SUMS), _values(f, name + _COUNTS)
    columns = f.tensors[name + _SUMS].shape[0]
    sums = sums.reshape(-1, columns)
    if counts.size != len(sums):
        raise ModelFileError(
            f"{f.path}: '{name}{_SUMS}' is of {len(sums)} matrices and '{name}{_COUNTS}' has {counts.size} counts"
        )
    return Entry(sums, counts)


def _values(f: GgufFile, name: str) -> Float:
    tensor = f.tensors.get(name)
    if tensor is None:
        raise ModelFileError(f"{f.path}: tensor '{name}' is missing")
    if tensor.format.name != "F32":
        raise ModelFileError(f"{f.path}: tensor '{name}' is {tensor.format.name}; F32 is needed")
    values = np.array(tensor.data.view(np.dtype("<f4")), np.float32)  # a copy: the file need not stay
    if not np.isfinite(values).all() or (values < 0).any():
        raise ModelFileError(f"{f.path}: tensor '{name}' holds a negative number, NaN or infinity")
    return values


def _is_old(file: Path) -> bool:
    """Whether a file begins as the old form does: entries, length of a name, the name as text."""
    try:
        with file.open("rb") as f:
            head = f.read(8 + _OLD_NAME_BYTES)
    except OSError:
        return False
    if len(head) < 8 or head.startswith(b"GGUF"):
        return False
    entries, length = struct.unpack_from("<ii", head)
    name = head[8 : 8 + length] if 0 < length <= _OLD_NAME_BYTES else b""
    return entries > 0 and len(name) == length and name.isascii() and name.decode("ascii").isprintable()


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
