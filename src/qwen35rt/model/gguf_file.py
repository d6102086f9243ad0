"""A model's GGUF file, whole or split: metadata with typed getters, and all tensors. Knows no model family.

``open_gguf`` takes any part of a split model, or a folder that holds one model.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from ..config import FILE_LIMITS
from ..errors import ModelFileError
from .gguf_part import ArrayRef, Part, TensorInfo

__all__ = ["GgufFile", "Metadata", "TensorInfo", "open_gguf"]

_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_PREFAULT_BYTES = 64 << 20


class Metadata(Mapping[str, Any]):
    """The keys of a file. Scalars are int, float, bool or str; arrays are lists, decoded anew at each access."""

    def __init__(self, part: Part | None) -> None:
        self._part = part
        self._values: dict[str, Any] = {} if part is None else part.values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        return self._part.decode(key, value) if isinstance(value, ArrayRef) and self._part is not None else value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def stored(self, key: str) -> Any:
        """The value as it is kept: arrays undecoded, None for an absent key."""
        return self._values.get(key)

    def stored_type(self, key: str) -> tuple[int, int | None]:
        """The container's number of a value's type, and for an array of its entries' type. KeyError if absent."""
        value = self._values[key]
        if self._part is None:
            raise KeyError(key)
        return self._part.types[key], value.type if isinstance(value, ArrayRef) else None

    def array_length(self, key: str) -> int | None:
        """Entries of an array, without decoding it; None if the key is absent or no array."""
        value = self._values.get(key)
        return value.count if isinstance(value, ArrayRef) else None


class GgufFile:
    """An open model file. ``tensors`` are in the order of the file, ``file_bytes`` counts all parts.

    Tensor data are views of the map and stay valid after ``close`` for as long as they are referenced.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = list(parts)
        self.paths = tuple(p.path for p in parts)
        self.path = self.paths[0]
        self.metadata = Metadata(parts[0])
        self.file_bytes = sum(p.size for p in parts)
        self.tensors: dict[str, TensorInfo] = {}
        for part in parts:
            for name, tensor in part.tensors.items():
                if name in self.tensors:
                    part.fail(f"tensor '{name}' is also in {self.paths[self.tensors[name].part].name}")
                self.tensors[name] = tensor

    def close(self) -> None:
        """Drop keys and tensors. The memory is unmapped when the last tensor view is gone."""
        self._parts.clear()
        self.metadata = Metadata(None)
        self.tensors = {}

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def prefault(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Read all parts into the page cache; ``progress(bytes done, bytes in all)`` is called now and then."""
        done = 0
        for part in self._parts:
            part.map.madvise(mmap.MADV_WILLNEED)
            for start in range(0, part.size, _PREFAULT_BYTES):
                piece = part.bytes[start : start + _PREFAULT_BYTES]
                int(piece[:: mmap.PAGESIZE].max())  # touches each page once
                done += len(piece)
                if progress is not None:
                    progress(done, self.file_bytes)

    # Typed getters: without a default the key must be there. All raise ModelFileError naming file and key.

    def get_int(self, key: str, default: int | None = None, *, low: int = 0, high: int = 2**31 - 1) -> int:
        """An integer of any stored width, ``low`` to ``high`` inclusive."""
        return self._int(key, self._get(key, default), low, high)

    def get_float(
        self, key: str, default: float | None = None, *, low: float = -math.inf, high: float = math.inf
    ) -> float:
        """A finite number, ``low`` to ``high`` inclusive; integers are accepted."""
        value = self._get(key, default)
        if type(value) not in (int, float):
            self._refuse(key, value, "a number is needed")
        if not math.isfinite(value) or not low <= value <= high:
            between = "" if math.isinf(low) and math.isinf(high) else f" from {low:g} to {high:g}"
            self._refuse(key, value, f"a finite number{between} is needed")
        return float(value)

    def get_bool(self, key: str, default: bool | None = None) -> bool:
        """A boolean."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            self._refuse(key, value, "true or false is needed")
        return bool(value)

    def get_str(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            self._refuse(key, value, "a string is needed")
        return str(value)

    def get_ints(
        self,
        key: str,
        default: Sequence[int] | None = None,
        *,
        count: int | None = None,
        low: int = 0,
        high: int = 2**31 - 1,
    ) -> list[int]:
        """An array of integers of any stored width, each from ``low`` to ``high`` inclusive; ``count``: its length."""
        return [self._int(key, v, low, high) for v in self._list(key, default, count)]

    def get_bools(self, key: str, default: Sequence[bool] | None = None, *, count: int | None = None) -> list[bool]:
        """An array of booleans; ``count``: its length."""
        return self._uniform(key, self._list(key, default, count), bool, "an array of booleans is needed")

    def get_strs(self, key: str, default: Sequence[str] | None = None, *, count: int | None = None) -> list[str]:
        """An array of strings; ``count``: its length."""
        return self._uniform(key, self._list(key, default, count), str, "an array of strings is needed")

    def _get(self, key: str, default: Any) -> Any:
        """The stored value; arrays come undecoded."""
        value = self.metadata.stored(key)
        if value is None:
            if default is None:
                raise ModelFileError(f"{self.path}: key '{key}' is missing")
            return default
        return value

    def _list(self, key: str, default: Sequence[Any] | None, count: int | None) -> list[Any]:
        value = self._get(key, default)
        if default is not None and value is default:
            return list(value)
        if not isinstance(value, ArrayRef):
            self._refuse(key, value, "an array is needed")
        if count is not None and value.count != count:
            self._refuse(key, value, f"{count} are needed")
        return list(self.metadata[key])

    def _uniform(self, key: str, values: list[Any], kind: type, need: str) -> list[Any]:
        if values and not isinstance(values[0], kind):  # the container has one type per array
            self._refuse(key, values, need)
        return values

    def _int(self, key: str, value: Any, low: int, high: int) -> int:
        if type(value) is not int:
            self._refuse(key, value, "an integer is needed")
        if not low <= value <= high:
            self._refuse(key, value, f"an integer from {low} to {high} is needed")
        return int(value)

    def _refuse(self, key: str, value: Any, need: str) -> NoReturn:
        shown = f"an array of {value.count} values" if isinstance(value, ArrayRef) else repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise ModelFileError(f"{self.path}: key '{key}' is {shown}; {need}")


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Open a GGUF file, a split model by any of its parts, or a folder that holds exactly one model.

    Raises ModelFileError, naming the file and what is wrong with it; reads headers only.
    """
    file = Path(path)
    try:
        if file.is_dir():
            file = _model_in(file)
        if not file.is_file():
            raise ModelFileError(f"{file}: {'not a regular file' if file.exists() else 'no such file'}")
    except OSError as e:  # a name that is too long, a folder that may not be read
        raise ModelFileError(f"{file}: cannot be opened: {e.strerror}") from None
    part = Part(file, 0)
    if "split.count" not in part.values:
        return GgufFile([part])
    count = _split_value(part, "split.count", 1, FILE_LIMITS.max_splits)
    if count == 1:
        return GgufFile([part])
    name = _PART_NAME.fullmatch(file.name)
    if name is None or int(name["count"]) != count:
        part.fail(f"part of a model split in {count}: it must keep its name NAME-NNNNN-of-{count:05d}.gguf")
    paths = [file.with_name(f"{name['stem']}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        part.fail(f"part of a model split in {count}: missing in the same folder: {_some(missing)}")
    del part
    return GgufFile(_checked([Part(p, i) for i, p in enumerate(paths)]))


def _checked(parts: list[Part]) -> list[Part]:
    """Parts of one split model whose keys agree."""
    for i, part in enumerate(parts):
        count = _split_value(part, "split.count", 1, FILE_LIMITS.max_splits)
        if count != len(parts):
            part.fail(f"key 'split.count' is {count}, the other parts and the file name say {len(parts)}")
        number = _split_value(part, "split.no", 0, FILE_LIMITS.max_splits)
        if number != i:
            part.fail(f"holds part {number + 1} of the model (key 'split.no' is {number}), part {i + 1} is needed here")
    found = sum(len(p.tensors) for p in parts)
    for part in parts:
        if "split.tensors.count" in part.values:
            stated = _split_value(part, "split.tensors.count", 0, FILE_LIMITS.max_tensors)
            if stated != found:
                part.fail(f"key 'split.tensors.count' is {stated}, the {len(parts)} parts hold {found} tensors")
    return parts


def _split_value(part: Part, key: str, low: int, high: int) -> int:
    value = part.values.get(key)
    if type(value) is not int or not low <= value <= high:
        part.fail(f"key '{key}' is {value!r}; an integer from {low} to {high} is needed")
    return value


def _model_in(folder: Path) -> Path:
    """The one model of a folder, by its first part; vision projectors (mmproj*) do not count."""
    files = sorted(p for p in folder.glob("*.gguf") if not p.name.startswith("mmproj"))
    models: dict[str, Path] = {}
    for file in files:
        name = _PART_NAME.fullmatch(file.name)
        models.setdefault(f"{name['stem']} in {int(name['count'])} parts" if name else file.name, file)
    if len(models) != 1:
        found = f"{len(models)} models: {_some(sorted(models))}" if models else "no GGUF model"
        raise ModelFileError(f"{folder}: the folder holds {found}; name one file")
    return next(iter(models.values()))


def _some(names: Sequence[str], most: int = 8) -> str:
    """At most ``most`` names, then a count."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
