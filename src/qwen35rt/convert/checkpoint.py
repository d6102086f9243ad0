"""A Hugging Face checkpoint folder: its JSON files, and its safetensors read by rows. Knows no model family.

Nothing is mapped or kept: memory is what a caller asks for at a time.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ..config import CONVERT
from ..errors import ConfigError, ModelFileError, UnsupportedModel

Array = npt.NDArray[Any]

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


@dataclass(frozen=True)
class HfTensor:
    """A tensor of a shard: ``dtype`` is safetensors' name, ``start`` the offset of its data in ``file``."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


class Checkpoint:
    """An open checkpoint folder; a context manager. ``tensors`` are those of all shards, ``files`` all that it reads.

    Raises ModelFileError naming the file for one that is missing, damaged, or contradicts the index.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            why = "is a file; name the folder that holds it" if self.folder.exists() else "does not exist"
            raise ModelFileError(f"{self.folder}: the checkpoint folder {why}")
        self.files: list[Path] = []
        self.tensors: dict[str, HfTensor] = {}
        self._open: dict[Path, BinaryIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the folder as an object, None if there is none."""
        path = self.folder / name
        if not path.is_file():
            return None
        self.files.append(path)
        if path.stat().st_size > CONVERT.max_json_bytes:
            raise ModelFileError(f"{path}: {path.stat().st_size} bytes are too many for a JSON file of a checkpoint")
        return parse_json(path, path.read_bytes())

    def text(self, name: str) -> str | None:
        """A text file of the folder, None if there is none."""
        path = self.folder / name
        if not path.is_file():
            return None
        self.files.append(path)
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as e:
            raise ModelFileError(f"{path}: not UTF-8 text: {e}") from None

    def open_weights(self) -> None:
        """Read the headers of all shards into ``tensors``."""
        index = self.json(INDEX)
        named: Mapping[str, str] = {}
        if index is not None:
            named = index.get("weight_map", {})
            if not isinstance(named, dict) or not named or not all(isinstance(v, str) for v in named.values()):
                raise ModelFileError(f"{self.folder / INDEX}: 'weight_map' is not a list of tensors and their files")
            shards = sorted(set(named.values()))
        else:
            shards = [WEIGHTS]
        for shard in shards:
            path = self.folder / shard
            if Path(shard).name != shard or not path.is_file():
                raise ModelFileError(self._no_shard(shard, len(shards), index is not None))
            self.files.append(path)
            for tensor in _headers(path):
                if tensor.name in self.tensors:
                    raise ModelFileError(
                        f"{path}: tensor '{tensor.name}' is also in {self.tensors[tensor.name].file.name}; "
                        "download the checkpoint again"
                    )
                self.tensors[tensor.name] = tensor
        for name, shard in named.items():
            found = self.tensors.get(name)
            if found is None or found.file.name != shard:
                raise ModelFileError(f"{self.folder / shard}: tensor '{name}' is missing, {INDEX} says that it is here")

    def _no_shard(self, shard: str, count: int, indexed: bool) -> str:
        if indexed:
            return f"{self.folder / shard}: no such file; {INDEX} names it as one of {count}. Download it"
        if any(self.folder.glob("*.bin")) or any(self.folder.glob("*.pt*")):
            return f"{self.folder}: PyTorch files are not read; save the checkpoint as safetensors"
        return f"{self.folder}: neither {WEIGHTS} nor {INDEX} is there; name a checkpoint's folder"

    def read(self, tensor: HfTensor, start: int, out: Array) -> None:
        """Fill the contiguous ``out`` with elements from ``start`` on."""
        if tensor.file not in self._open:
            self._open[tensor.file] = self._stack.enter_context(tensor.file.open("rb", buffering=0))
        view = out.reshape(-1).view(np.uint8).data
        at = tensor.start + start * out.itemsize
        while view:
            try:
                n = os.preadv(self._open[tensor.file].fileno(), [view], at)
            except OSError as e:
                raise ModelFileError(f"{tensor.file}: reading tensor '{tensor.name}' failed: {e.strerror}") from e
            if n == 0:
                raise ModelFileError(f"{tensor.file}: ends inside tensor '{tensor.name}'; download it again")
            view, at = view[n:], at + n


def parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    """A JSON object without double names; errors name the file."""

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            double = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise ModelFileError(f"{path}: '{double}' is there twice; download the file again")
        return found

    try:
        value = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:
        raise ModelFileError(f"{path}: not whole, valid JSON ({e}); download the file again") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: the JSON text is no object")
    return value


def _headers(path: Path) -> list[HfTensor]:
    """The tensors of a safetensors file; the library checks the header and that it covers the file."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ConfigError(
            "reading a checkpoint needs the package safetensors: pip install 'qwen35rt[convert]'"
        ) from None
    try:
        with safe_open(path, "numpy"):
            pass
    except (SafetensorError, OSError) as e:
        raise ModelFileError(f"{path}: no whole, valid safetensors file ({e}); download it again") from None
    # The library cannot hand out BF16 to NumPy, so the data are found by their offsets.
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = parse_json(path, file.read(length))
    tensors = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, (begin, _) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        tensors.append(HfTensor(name, path, dtype, shape, 8 + length + begin))
    return tensors


def check_dtype(tensor: HfTensor) -> np.dtype[Any]:
    """The dtype that a tensor's elements are read with, BF16 as uint16. Raises UnsupportedModel for other types."""
    found = DTYPES.get(tensor.dtype)
    if found is None:
        raise UnsupportedModel(
            f"{tensor.file}: tensor '{tensor.name}' is {tensor.dtype}; {', '.join(DTYPES)} can be converted. "
            "Take the checkpoint that is not quantised"
        )
    return found
