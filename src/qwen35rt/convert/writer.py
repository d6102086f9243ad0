"""Writes GGUF files tensor by tensor: hidden temporary files that get their final names only when all is on disk.

Knows nothing of models. Memory is what the caller hands to ``write``: a tensor, or rows of one.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType

from ..config import FILE_LIMITS
from ..errors import ConfigError, Qwen35Error
from ..formats import Format

__all__ = ["GgufOutput", "TensorPlan", "Typed", "refuse_output"]

Array = npt.NDArray[Any]

_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SCALAR_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "BOOL": 1}


@dataclass(frozen=True)
class Typed:
    """A metadata value whose stored type is not the plain one: ``Typed(20, GGUFValueType.INT32)``.

    For a list ``kind`` is ARRAY and ``item`` the type of its entries.
    """

    value: Any
    kind: GGUFValueType
    item: GGUFValueType | None = None


@dataclass(frozen=True)
class TensorPlan:
    """A tensor to be written. ``shape`` is numpy's order of dimensions, in elements: the contiguous one last."""

    name: str
    shape: tuple[int, ...]
    format: Format

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor as it is stored. The last dimension must be a multiple of the format's block."""
        return math.prod(self.shape[:-1]) * self.format.row_bytes(self.shape[-1])


class GgufOutput:
    """A GGUF file being written, or the parts of a split one; a context manager.

    ``write`` takes the tensors in the order of ``tensors``. Leaving the block without an error gives the files their
    final names; leaving it with one, or before the last tensor, removes what was written and leaves an existing file of
    that name as it is. ``paths`` are the final names: ``path``, or NAME-00001-of-0000N.gguf beside it if the
    bytes of the tensors do not fit one part of ``split_max_bytes``.

    ``metadata``: a plain int is stored as u32 (i32 if negative, and in lists), a float as f32, bool and str as such,
    lists by their first entry; ``Typed`` for all other types. It must hold general.architecture; split.* keys and empty
    lists are left out. ``inputs``: files that may not be overwritten.

    Raises ConfigError for a path that cannot be used, Qwen35Error where the disk is full or fails.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata: Mapping[str, Any],
        tensors: Sequence[TensorPlan],
        split_max_bytes: int | None = None,
        inputs: Iterable[str | os.PathLike[str]] = (),
    ) -> None:
        self._metadata = {k: _typed(v) for k, v in metadata.items() if not k.startswith("split.") and v not in ([], ())}
        self._alignment = int(self._metadata["general.alignment"].value) if "general.alignment" in metadata else 32
        _check_plans(tensors)
        self._parts = _split(tensors, split_max_bytes, self._alignment)
        self.paths = _final_names(Path(path), len(self._parts))
        for final in self.paths:
            refuse_output(final, inputs)
        self.nbytes = sum(_padded(t.nbytes, self._alignment) for t in tensors)
        self._needed = self.nbytes + _header_bytes(self._metadata, tensors, self._alignment)
        token = secrets.token_hex(4)
        self._temporary = [p.with_name(f".{p.name}.{token}.partial") for p in self.paths]
        self._queue = [(part, plan) for part, plans in enumerate(self._parts) for plan in plans]
        self._next = 0
        self._files: list[BinaryIO] = []

    def __enter__(self) -> GgufOutput:
        folder = self.paths[0].parent
        free = shutil.disk_usage(folder).free
        if free < self._needed:
            raise Qwen35Error(self._full(f"{free} are free"))
        try:
            for i in range(len(self._parts)):
                self._open(i)
        except OSError as e:
            self._abort()
            raise self._failed(e) from e
        except BaseException:
            self._abort()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None:
                self._finish()
        except OSError as e:
            raise self._failed(e) from e
        finally:
            self._abort()  # after success there is nothing left to remove

    def write(self, name: str, data: Array | Iterable[Array]) -> None:
        """Write the next tensor: one array, or arrays that follow each other in it, such as groups of rows.

        Arrays are uint8 of stored bytes, or for F32, F16 and BF16 float32, float16 and uint16; shapes do not matter.
        Raises ValueError for another tensor than the next one, for a wrong dtype or number of bytes.
        """
        if self._next == len(self._queue):
            raise ValueError(f"tensor '{name}' is one more than the {len(self._queue)} that were declared")
        part, plan = self._queue[self._next]
        if plan.name != name:
            raise ValueError(f"tensor '{name}' was written where '{plan.name}' is next")
        done = 0
        for piece in (data,) if isinstance(data, np.ndarray) else data:
            raw = _bytes_of(plan, piece)
            done += raw.nbytes
            if done > plan.nbytes:
                raise ValueError(_wrong_size(plan, done))
            self._put(part, raw.data)
        if done != plan.nbytes:
            raise ValueError(_wrong_size(plan, done))
        self._put(part, bytes(_padded(done, self._alignment) - done))
        self._next += 1

    def _put(self, part: int, data: bytes | memoryview) -> None:
        try:
            self._files[part].write(data)
        except OSError as e:
            raise self._failed(e) from e

    def _open(self, part: int) -> None:
        """Write all that stands before the data of a part."""
        # Its own support for split files is not used: it fixes the parts' names and wants whole tensors.
        path, plans = self._temporary[part], self._parts[part]
        writer = gguf.GGUFWriter(path, str(self._metadata["general.architecture"].value))
        try:
            if part == 0:
                for key, value in self._metadata.items():
                    if key == "general.alignment":
                        writer.add_custom_alignment(self._alignment)
                    elif key != "general.architecture":  # the constructor has added it
                        writer.add_key_value(key, value.value, value.kind, value.item)
            else:
                writer.kv_data[0].clear()
                if self._alignment != 32:
                    writer.add_custom_alignment(self._alignment)
            if len(self._parts) > 1:
                writer.add_uint16("split.no", part)
                writer.add_uint16("split.count", len(self._parts))
                writer.add_int32("split.tensors.count", len(self._queue))
            for plan in plans:
                # A dtype other than uint8 makes the shape one of elements.
                kind = GGMLQuantizationType(plan.format.id)
                writer.add_tensor_info(plan.name, plan.shape, np.dtype(np.float32), plan.nbytes, kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        finally:
            writer.close()
        file = path.open("ab", buffering=1 << 20)
        self._files.append(file)
        file.write(bytes(_padded(file.tell(), self._alignment) - file.tell()))

    def _finish(self) -> None:
        if self._next != len(self._queue):
            raise ValueError(f"tensor '{self._queue[self._next][1].name}' and those after it were not written")
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        named: list[Path] = []
        try:
            for temporary, final in zip(self._temporary, self.paths, strict=True):
                temporary.replace(final)
                named.append(final)
        except BaseException:
            for final in named:  # parts of a model that is not whole
                final.unlink(missing_ok=True)
            raise
        _sync_folder(self.paths[0].parent)

    def _abort(self) -> None:
        for file in self._files:
            with suppress(OSError):  # closing flushes, which fails again on a full disk
                file.close()
        for path in self._temporary:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _failed(self, error: OSError) -> Qwen35Error:
        if error.errno in _FULL:
            return Qwen35Error(self._full(os.strerror(error.errno)))
        return Qwen35Error(f"{self.paths[0]}: writing failed: {error.strerror or error}; nothing was kept")

    def _full(self, why: str) -> str:
        return (
            f"{self.paths[0]}: the file needs {self._needed} bytes ({self._needed / 2**30:.2f} GiB) and {why}; "
            f"free space in {self.paths[0].parent}, or name another folder. Nothing was kept"
        )


def refuse_output(path: Path, inputs: Iterable[str | os.PathLike[str]] = ()) -> None:
    """Raise ConfigError if a file cannot be written at ``path``, or if it is one of ``inputs``."""
    if path.is_dir():
        raise ConfigError(f"{path}: the output is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: the folder {path.parent} does not exist; make it first")
    if not path.exists():
        return
    if not path.is_file():
        raise ConfigError(f"{path}: the output is not a regular file")
    for given in inputs:
        if Path(given).exists() and path.samefile(given):
            raise ConfigError(f"{path}: the output is also an input; name another file")


def _typed(value: Any) -> Typed:
    if isinstance(value, Typed):
        return value
    if isinstance(value, list | tuple):
        kind = _kind(value[0]) if value else GGUFValueType.INT32
        return Typed(list(value), GGUFValueType.ARRAY, GGUFValueType.INT32 if kind == GGUFValueType.UINT32 else kind)
    return Typed(value, _kind(value))


def _kind(value: Any) -> GGUFValueType:
    if isinstance(value, bool):
        return GGUFValueType.BOOL
    if isinstance(value, int):
        return GGUFValueType.INT32 if value < 0 else GGUFValueType.UINT32
    if isinstance(value, float):
        return GGUFValueType.FLOAT32
    if isinstance(value, str):
        return GGUFValueType.STRING
    raise ValueError(f"metadata value {value!r} has no type of the container")


def _check_plans(tensors: Sequence[TensorPlan]) -> None:
    names = set()
    for plan in tensors:
        if plan.name in names:
            raise ValueError(f"tensor '{plan.name}' is declared twice")
        names.add(plan.name)
        if not 1 <= len(plan.shape) <= FILE_LIMITS.max_dims or min(plan.shape) < 1:
            raise ValueError(f"tensor '{plan.name}' has the shape {list(plan.shape)}")
        if plan.shape[-1] % plan.format.block:
            raise ValueError(
                f"tensor '{plan.name}' has rows of {plan.shape[-1]}, {plan.format.name} needs multiples of "
                f"{plan.format.block}"
            )


def _split(tensors: Sequence[TensorPlan], most: int | None, alignment: int) -> list[list[TensorPlan]]:
    """Tensors of each part: in order, as many as fit ``most`` bytes, at least one."""
    parts: list[list[TensorPlan]] = [[]]
    filled = 0
    for plan in tensors:
        size = _padded(plan.nbytes, alignment)
        if most is not None and parts[-1] and filled + size > most:
            parts.append([])
            filled = 0
        parts[-1].append(plan)
        filled += size
    if len(parts) > FILE_LIMITS.max_splits:
        raise ConfigError(f"parts of {most} bytes make {len(parts)} files, at most {FILE_LIMITS.max_splits} are read")
    return parts


def _final_names(path: Path, parts: int) -> list[Path]:
    path = path.resolve() if path.is_symlink() else path  # so that the file is replaced, not the link
    if parts == 1:
        return [path]
    stem = path.name.removesuffix(".gguf")
    return [path.with_name(f"{stem}-{i + 1:05d}-of-{parts:05d}.gguf") for i in range(parts)]


def _bytes_of(plan: TensorPlan, piece: Array) -> npt.NDArray[np.uint8]:
    if piece.dtype not in (np.dtype(np.uint8), _DTYPES.get(plan.format.name)):
        raise ValueError(f"tensor '{plan.name}' is {plan.format.name} and was given {piece.dtype} values")
    return np.ascontiguousarray(piece).reshape(-1).view(np.uint8)


def _wrong_size(plan: TensorPlan, found: int) -> str:
    return (
        f"tensor '{plan.name}' {list(plan.shape)} {plan.format.name} takes {plan.nbytes} bytes and was given "
        f"{found}{' or more' if found > plan.nbytes else ''}"
    )


def _header_bytes(metadata: Mapping[str, Typed], tensors: Sequence[TensorPlan], alignment: int) -> int:
    """Bytes of keys and tensor entries, near enough to tell whether the disk holds them."""

    def size(values: Sequence[Any], kind: GGUFValueType | None) -> int:
        if kind == GGUFValueType.STRING:
            return sum(8 + len(v if isinstance(v, bytes) else str(v).encode()) for v in values)
        name = "" if kind is None else kind.name
        return len(values) * next((n for end, n in _SCALAR_BYTES.items() if name.endswith(end)), 8)

    total = 24 + alignment
    for key, typed in metadata.items():
        values = typed.value if typed.kind == GGUFValueType.ARRAY else [typed.value]
        kind = typed.item if typed.kind == GGUFValueType.ARRAY else typed.kind
        total += 24 + len(key.encode()) + size(values, kind)
    return total + sum(24 + len(t.name.encode()) + 8 * len(t.shape) for t in tensors)


def _padded(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def _sync_folder(folder: Path) -> None:
    """Make the new names last; not every file system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
