"""Reads one GGUF file: its keys, and its tensors as views of the mapped bytes. Knows nothing of models and splits.

Nothing in a file is believed: every count, length, dimension and offset is compared with the bytes that are there
before anything is allocated for it.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ..config import FILE_LIMITS
from ..errors import ModelFileError
from ..formats import BY_ID, Format

Bytes = npt.NDArray[np.uint8]

_HEADER_BYTES = 24
_KEY_BYTES = 13  # the smallest key: length, one byte of name would follow, type, one byte of value
_TENSOR_BYTES = 32  # the smallest tensor entry without its name
_U32, _U64 = Struct("<I"), Struct("<Q")
_SCALARS: dict[int, Struct] = {
    0: Struct("<B"),
    1: Struct("<b"),
    2: Struct("<H"),
    3: Struct("<h"),
    4: _U32,
    5: Struct("<i"),
    6: Struct("<f"),
    7: Struct("<B"),
    10: _U64,
    11: Struct("<q"),
    12: Struct("<d"),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
# Types that ggml knows and this package does not run, so that a message can name them.
_OTHER_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
    41: "Q1_0",
    42: "Q2_0",
}
_FOREIGN = (
    (b"FUGG", "a big-endian GGUF file"),
    (b"ggml", "an old GGML file; convert the model again"),
    (b"tjgg", "an old GGJT file; convert the model again"),
    (b"lmgg", "an old GGML file; convert the model again"),
    (b"PK\x03\x04", "a zip archive or a PyTorch checkpoint"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself"),
    (b"{", "JSON text"),
    (b"<", "an HTML or XML page, as a failed download leaves it"),
)


@dataclass(frozen=True, eq=False)
class TensorInfo:
    """One tensor. ``shape`` lists dimensions as ggml does, the contiguous one first; ``data`` is uint8 [nbytes], a view
    of the mapped file."""

    name: str
    shape: tuple[int, ...]
    format: Format
    nbytes: int
    data: Bytes
    part: int


@dataclass(frozen=True, eq=False)
class ArrayRef:
    """Where an array of the metadata lies; decoded when it is asked for."""

    type: int
    count: int
    start: int
    end: int
    starts: npt.NDArray[np.int64] | None = None  # of strings: offsets in the array, and its end


class Part:
    """One mapped file: its header, keys and tensors."""

    def __init__(self, path: Path, index: int) -> None:
        self.path = path
        self.index = index
        self.map = _map(path)
        self.size = len(self.map)
        self.bytes: Bytes = np.frombuffer(self.map, np.uint8)
        self.pos = _HEADER_BYTES
        n_tensors, n_keys = self._header()
        self.values: dict[str, Any] = {}
        self.types: dict[str, int] = {}  # of the values; an ArrayRef has that of its entries
        for i in range(n_keys):
            self._key(i, n_keys)
        self.alignment = self._alignment()
        self.tensors: dict[str, TensorInfo] = {}
        self._place([self._tensor_entry(i, n_tensors) for i in range(n_tensors)])

    def fail(self, text: str) -> NoReturn:
        raise ModelFileError(f"{self.path}: {text}")

    def truncated(self, what: str, end: int) -> NoReturn:
        self.fail(f"truncated or damaged: {what} needs {end} bytes, the file has {self.size}")

    def _need(self, n: int, what: str) -> int:
        """Step over n bytes that must be there; -> where they start."""
        start = self.pos
        if n > self.size - start:
            self.truncated(what, start + n)
        self.pos = start + n
        return start

    def _u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.map, self._need(4, what))[0])

    def _u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.map, self._need(8, what))[0])

    def _text(self, start: int, end: int, what: str) -> str:
        try:
            return self.map[start:end].decode("utf-8")
        except UnicodeDecodeError as e:
            self.fail(f"{what} is not valid UTF-8: {e}")

    def _name(self, what: str) -> str:
        n = self._u64(f"the length of {what}")
        if n == 0:
            self.fail(f"{what} is empty")
        if n > FILE_LIMITS.max_name_bytes:
            self.fail(f"{what} states a length of {n} bytes, at most {FILE_LIMITS.max_name_bytes} are accepted")
        start = self._need(n, what)
        return self._text(start, start + n, what)

    def _header(self) -> tuple[int, int]:
        head = self.map[: min(self.size, _HEADER_BYTES)]
        if not b"GGUF".startswith(head[:4]):
            self.fail(f"not a GGUF file: {_describe(head)}; the file has {self.size} bytes")
        if self.size < _HEADER_BYTES:
            self.truncated("the GGUF header", _HEADER_BYTES)
        version, swapped = _U32.unpack_from(head, 4)[0], int.from_bytes(head[4:8], "big")
        if version not in (2, 3):
            if swapped in (1, 2, 3):
                self.fail("the file is big-endian GGUF; only little-endian files are read. Convert it again")
            self.fail(f"GGUF version {version} is not supported; versions 2 and 3 are")
        n_tensors, n_keys = _U64.unpack_from(head, 8)[0], _U64.unpack_from(head, 16)[0]
        room = self.size - _HEADER_BYTES
        for what, n, limit, least in (
            ("keys", n_keys, FILE_LIMITS.max_keys, _KEY_BYTES),
            ("tensors", n_tensors, FILE_LIMITS.max_tensors, _TENSOR_BYTES),
        ):
            if n > limit:
                self.fail(f"the header states {n} {what}, at most {limit} are accepted")
            if n * least > room:
                self.truncated(f"a header that states {n} {what}", _HEADER_BYTES + n * least)
        return n_tensors, n_keys

    def _key(self, i: int, n_keys: int) -> None:
        key = self._name(f"the name of key {i + 1} of {n_keys}")
        if key in self.values:
            self.fail(f"key '{key}' is there twice")
        what = f"key '{key}'"
        kind = self.types[key] = self._u32(what)
        if kind == _ARRAY:
            self.values[key] = self._array(what)
        elif kind == _STRING:
            n = self._u64(what)
            start = self._need(n, what)
            self.values[key] = self._text(start, start + n, what)
        elif kind in _SCALARS:
            value = _SCALARS[kind].unpack_from(self.map, self._need(_SCALARS[kind].size, what))[0]
            if kind == _BOOL:
                if value > 1:
                    self.fail(f"{what} is of type bool and holds {value}")
                value = bool(value)
            self.values[key] = value
        else:
            self.fail(f"{what} has the unknown value type {kind}")

    def _array(self, what: str) -> ArrayRef:
        kind, count = self._u32(what), self._u64(what)
        if kind == _ARRAY:
            self.fail(f"{what} is an array of arrays, which is not supported")
        if kind != _STRING:
            if kind not in _SCALARS:
                self.fail(f"{what} is an array of the unknown value type {kind}")
            start = self._need(count * _SCALARS[kind].size, what)
            return ArrayRef(kind, count, start, self.pos)
        start, end = self.pos, self.size
        if count * 8 > end - start:
            self.truncated(f"{what} with {count} strings", start + count * 8)
        starts = self._short_strings(start, count)
        if starts is not None:
            self.pos = int(starts[-1])
            return ArrayRef(kind, count, start, self.pos, starts - start)
        pos, data, unpack = start, self.map, _U64.unpack_from
        try:
            for _ in range(count):
                pos += 8 + unpack(data, pos)[0]
        except (struct.error, OverflowError, IndexError):
            self.truncated(what, pos + 8)
        if pos > end:
            self.truncated(what, pos)
        self.pos = pos
        return ArrayRef(kind, count, start, pos)

    def _short_strings(self, start: int, count: int) -> npt.NDArray[np.int64] | None:
        """Where each string and the end of the array lie if all are shorter than 64 KiB, else None.

        A real vocabulary has half a million strings to step over at each open: two bytes of a length are looked at in
        the loop, the six others in one go afterwards.
        """
        pos, data = start, self.map
        found = [pos]
        step = found.append
        try:
            for _ in range(count):
                high = data[pos + 1]
                pos += 8 + (data[pos] + (high << 8) if high else data[pos])
                step(pos)
        except IndexError:
            return None
        if not count or pos > self.size:
            return None
        starts = np.array(found, np.int64)
        if any(self.bytes[starts[:-1] + i].any() for i in range(2, 8)):
            return None
        return starts

    def decode(self, key: str, ref: ArrayRef) -> list[Any]:
        """The values of an array as Python objects."""
        if ref.type == _STRING and ref.starts is not None:
            short = self._split(ref, ref.starts[:-1])
            if short is not None:
                return short
        raw = self.map[ref.start : ref.end]
        if ref.type == _STRING:
            strings: list[str] = []
            pos, unpack = 0, _U64.unpack_from
            try:
                for _ in range(ref.count):
                    n = unpack(raw, pos)[0]
                    pos += 8
                    strings.append(raw[pos : pos + n].decode("utf-8"))
                    pos += n
            except UnicodeDecodeError as e:
                self.fail(f"key '{key}', string {len(strings)} is not valid UTF-8: {e}")
            return strings
        values = np.frombuffer(raw, np.dtype(_SCALARS[ref.type].format))
        if ref.type == _BOOL:
            if (values > 1).any():
                self.fail(f"key '{key}' is an array of bool and holds {int(values.max())}")
            values = values.astype(np.bool_)
        return list(values.tolist())

    def _split(self, ref: ArrayRef, starts: npt.NDArray[np.int64]) -> list[Any] | None:
        """The strings, by one decoding of all with their lengths cut down to a zero; None if one holds a zero or is
        no UTF-8."""
        raw = self.bytes[ref.start : ref.end].copy()
        keep = np.ones(len(raw), np.bool_)
        raw[starts] = 0
        for i in range(1, 8):
            keep[starts + i] = False
        try:
            strings = raw[keep].tobytes().decode("utf-8").split("\0")
        except UnicodeDecodeError:
            return None
        return strings[1:] if len(strings) == ref.count + 1 else None

    def _alignment(self) -> int:
        value = self.values.get("general.alignment", 32)
        low, high = FILE_LIMITS.min_alignment, FILE_LIMITS.max_alignment
        if type(value) is not int or not low <= value <= high or value & (value - 1):
            shown = "an array" if isinstance(value, ArrayRef) else repr(value)
            self.fail(f"key 'general.alignment' is {shown}; a power of two from {low} to {high} is needed")
        return value

    def _tensor_entry(self, i: int, n: int) -> tuple[str, tuple[int, ...], Format, int, int]:
        name = self._name(f"the name of tensor {i + 1} of {n}")
        what = f"tensor '{name}'"
        n_dims = self._u32(what)
        if not 1 <= n_dims <= FILE_LIMITS.max_dims:
            self.fail(f"{what} states {n_dims} dimensions; 1 to {FILE_LIMITS.max_dims} are possible")
        shape = tuple(self._u64(what) for _ in range(n_dims))
        kind, offset = self._u32(what), self._u64(what)
        if min(shape) < 1:
            self.fail(f"{what} has a dimension of 0: {list(shape)}")
        if kind not in BY_ID:
            known = _OTHER_TYPES.get(kind)
            self.fail(f"{what} has the {f'unsupported type {kind} ({known})' if known else f'unknown type {kind}'}")
        form = BY_ID[kind]
        if shape[0] % form.block:
            self.fail(
                f"{what} is {form.name} with rows of {shape[0]} elements; {form.name} needs a multiple of {form.block}"
            )
        if offset % self.alignment:
            self.fail(f"{what} has the offset {offset}, which is not a multiple of the alignment {self.alignment}")
        return name, shape, form, math.prod(shape) // form.block * form.nbytes, offset

    def _place(self, entries: list[tuple[str, tuple[int, ...], Format, int, int]]) -> None:
        """Check that the tensors lie inside the file and apart, and make their views."""
        names: set[str] = set()
        for name, *_ in entries:
            if name in names:
                self.fail(f"tensor '{name}' is there twice")
            names.add(name)
        base = -(-self.pos // self.alignment) * self.alignment
        before, end = "", base
        by_place = sorted(entries, key=lambda e: e[4])
        needed = base + max((offset + nbytes for *_, nbytes, offset in entries), default=0)
        for name, _, _, nbytes, offset in by_place:
            start = base + offset
            if start < end:
                self.fail(
                    f"tensors '{before}' and '{name}' overlap: one ends at byte {end}, the other starts at {start}"
                )
            before, end = name, start + nbytes
            if end > self.size:
                self.truncated(
                    f"tensor '{name}' of {nbytes} bytes ends at byte {end}; with all tensors the file", needed
                )
        for name, shape, form, nbytes, offset in entries:
            data = self.bytes[base + offset : base + offset + nbytes]
            self.tensors[name] = TensorInfo(name, shape, form, nbytes, data, self.index)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise ModelFileError(f"{path}: not a GGUF file: it is empty (0 bytes); a header takes {_HEADER_BYTES}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as e:
        raise ModelFileError(f"{path}: cannot be opened: {e}") from e


def _describe(head: bytes) -> str:
    """What a file that is not GGUF seems to be, from its first bytes."""
    if not any(head):
        return "it starts with zeros, as an unfinished download does"
    for magic, what in _FOREIGN:
        if head.startswith(magic):
            return f"it starts with {head[:12]!r}: {what}"
    if head[8:9] == b"{":
        return f"it starts with {head[:12]!r}: a safetensors file; convert it to GGUF first"
    return f"it starts with {head[:12]!r}"
