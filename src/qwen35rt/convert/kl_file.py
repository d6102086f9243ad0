"""The file of a KL base: token ids and, for each scored position, the log-probabilities of the whole vocabulary.

Little-endian: HEADER, ids int32 [chunks, n_ctx], then a record for each scored position (``record_type``). A record
holds the most likely tokens as float32 and all others as 16-bit steps between the row's least and greatest
log-probability: 2 bytes for each token of the vocabulary and 2 KiB more. What is read back is normalised again, so that
it is a distribution. Its KL divergence from the float32 one is below 1e-7 while the row spans less than 60 nats, and a
model's mean divergence from it is less than 1e-6 off: 16-bit steps only meet tokens less likely than 1 in 256.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ..backends.base import Float
from ..config import EVALUATION, FILE_LIMITS
from ..errors import ConfigError, GenerationFailed, ModelFileError
from ..tokenizer import Tokenizer
from .perplexity import scored_per_chunk
from .text import Ids

log = logging.getLogger(__name__)

MAGIC, VERSION = b"qrtklb\r\n", 1
HEADER = struct.Struct("<8sIIIII16s")  # magic, version, n_vocab, n_ctx, chunks, exact tokens, digest of the vocabulary
_STEPS = 65_535

Record = npt.NDArray[np.void]


def record_type(n_vocab: int, exact: int) -> np.dtype[np.void]:
    """One scored position. ``low`` + ``codes`` * ``step`` is a log-probability less the row's greatest one."""
    fields: list[Any] = [
        ("nll", "<f8"),  # of the right token
        ("low", "<f4"),
        ("step", "<f4"),
        ("ids", "<u4", (exact,)),
        ("exact", "<f4", (exact,)),  # in place of the codes of ``ids``
        ("codes", "<u2", (n_vocab,)),
    ]
    return np.dtype(fields)


def vocabulary_digest(tokenizer: Tokenizer) -> bytes:
    """16 bytes that two vocabularies share only if all their tokens are equal."""
    h = hashlib.blake2b(digest_size=16)
    for token in tokenizer.vocab.tokens:
        raw = token.encode("utf-8", "surrogatepass")
        h.update(struct.pack("<I", len(raw)) + raw)
    return h.digest()


def encode(logits: Float, nll: float, dtype: np.dtype[np.void]) -> Record:
    """One record of logits float32 [n_vocab]. Raises GenerationFailed where one is not finite."""
    out = np.zeros((), dtype)
    x = logits - logits.max()
    low = np.float32(x.min())
    if not np.isfinite(low):
        raise GenerationFailed("the model's logits are not finite, so they make no KL base")
    step = np.float32(-low / _STEPS)
    exact = len(out["ids"])
    ids = np.argpartition(x, len(x) - exact)[len(x) - exact :]
    out["nll"], out["low"], out["step"] = nll, low, step
    out["ids"], out["exact"] = ids, x[ids]
    if step > 0:
        out["codes"] = np.minimum(np.rint((x - low) / step), _STEPS)
    return out


def decode(record: Record) -> Float:
    """-> log-probabilities less the greatest one, float32 [n_vocab]."""
    x: Float = record["codes"].astype(np.float32)
    x *= record["step"]
    x += record["low"]
    x[record["ids"]] = record["exact"]
    return x


class BaseWriter:
    """Writes a base beside its place and moves it there when it is complete; an error leaves nothing behind.

    Raises ConfigError before anything is written if the file exists or the disk has too little space.
    """

    def __init__(self, path: Path, ids: Ids, tokenizer: Tokenizer) -> None:
        self.path, self.partial = path, path.with_name(path.name + ".partial")
        count, n_ctx = ids.shape
        exact = min(EVALUATION.base_exact, tokenizer.n_vocab)
        self.dtype = record_type(tokenizer.n_vocab, exact)
        self.nbytes = HEADER.size + ids.nbytes + count * scored_per_chunk(n_ctx) * self.dtype.itemsize
        self._header = HEADER.pack(
            MAGIC, VERSION, tokenizer.n_vocab, n_ctx, count, exact, vocabulary_digest(tokenizer)
        ) + ids.astype("<i4").tobytes("C")
        if path.exists():
            raise ConfigError(f"{path} exists; compare with it (--kl-divergence), or remove it to write a new base")
        if not path.parent.is_dir():
            raise ConfigError(f"{path.parent}: no such folder")
        free = shutil.disk_usage(path.parent).free
        if free < self.nbytes:
            raise ConfigError(
                f"{path}: the base takes {self.nbytes / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are free; "
                "use fewer --chunks or another folder"
            )
        log.info("%s will take %.1f MiB", path, self.nbytes / 2**20)
        self._file: IO[bytes] | None = None

    def __enter__(self) -> BaseWriter:
        self._file = self.partial.open("wb")
        try:
            self._file.write(self._header)
        except BaseException as e:  # a block that was not entered is not left either
            self.__exit__(type(e), e, None)
            raise
        return self

    def add(self, logits: Float, nll: npt.NDArray[np.float64]) -> None:
        """The next scored positions: logits float32 [n, n_vocab], nll of their right tokens [n]."""
        assert self._file is not None
        for row, value in zip(logits, nll, strict=True):
            self._file.write(encode(row, float(value), self.dtype).tobytes())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        assert self._file is not None
        try:
            with self._file:
                if kind is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            if kind is None:
                self.partial.replace(self.path)
        finally:
            with contextlib.suppress(OSError):
                self.partial.unlink(missing_ok=True)


class BaseFile:
    """A base opened for reading. ``ids`` int32 [chunks, n_ctx]. Raises ModelFileError if it is none, or cut short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as f:
                head = f.read(HEADER.size)
                if len(head) < HEADER.size or head[:8] != MAGIC:
                    raise ModelFileError(f"{path}: not a KL base of qwen35rt (write one with --kl-base alone)")
                _, version, self.n_vocab, self.n_ctx, self.chunks, exact, self.digest = HEADER.unpack(head)
                if version != VERSION:
                    raise ModelFileError(f"{path}: a KL base of version {version}; this program reads {VERSION}")
                n_ids = self.chunks * self.n_ctx
                ok = (
                    self.n_ctx >= EVALUATION.min_ctx
                    and self.chunks > 0
                    and 0 < exact <= self.n_vocab <= FILE_LIMITS.max_width
                )
                wanted = HEADER.size + 4 * n_ids
                if ok:
                    self.dtype = record_type(self.n_vocab, exact)
                    wanted += self.chunks * scored_per_chunk(self.n_ctx) * self.dtype.itemsize
                if not ok or size != wanted:
                    raise ModelFileError(
                        f"{path}: damaged or cut short: {size} bytes, and its header needs {wanted}; write it again"
                    )
                self.ids: Ids = (
                    np.frombuffer(f.read(4 * n_ids), "<i4").astype(np.int32).reshape(self.chunks, self.n_ctx)
                )
        except OSError as e:
            raise ModelFileError(f"{path}: {e.strerror or e}") from None
        if self.ids.min() < 0 or self.ids.max() >= self.n_vocab:
            raise ModelFileError(f"{path}: damaged: a token id is not below {self.n_vocab}; write it again")

    def records(self) -> Iterator[Record]:
        """The records in order."""
        with self.path.open("rb") as f:
            f.seek(HEADER.size + 4 * self.ids.size)
            while raw := f.read(self.dtype.itemsize):
                if len(raw) < self.dtype.itemsize:
                    raise ModelFileError(f"{self.path}: cut short while it was read")
                yield np.frombuffer(raw, self.dtype)[0]
