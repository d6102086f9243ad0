"""A model file made ready to be compiled: its numbers, weights and program, and what people want to know of it."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..formats import FILE_TYPES
from .embedded import embedded_model
from .gguf_file import GgufFile, open_gguf
from .graph import build_program
from .hparams import HParams, read_hparams
from .program import Op, Program
from .weights import load_weights


@dataclass(frozen=True, eq=False)
class Source:
    """An open file and the program that it describes."""

    file: GgufFile
    hparams: HParams
    program: Program

    @property
    def path(self) -> Path:
        """The file, or the first part of a split one."""
        return self.file.path

    @property
    def n_layers(self) -> int:
        """Layers of the program."""
        return len(self.program.residuals)

    @property
    def params(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(t.shape) for t in self.file.tensors.values())

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.file.tensors.values())

    @property
    def description(self) -> str:
        """Architecture, size and recipe of formats, such as ``qwen35 752.39 M Q4_K_M``."""
        return f"{self.hparams.arch} {human(self.params)} {recipe(self.file)}"


def open_source(
    path: str | os.PathLike[str] | None = None, progress: Callable[[str, int, int], None] | None = None
) -> Source:
    """Open a model file (None: the embedded model) and build its program.

    With ``progress`` the file is read into memory first, which is called with ("loading", bytes done, bytes in all);
    without, its pages come in when they are first used. Raises ModelFileError, UnsupportedModel.
    """
    file = open_gguf(embedded_model() if path is None else path)
    hparams = read_hparams(file)
    program = build_program(hparams, load_weights(file, hparams))
    if progress is not None:
        file.prefault(lambda done, total: progress("loading", done, total))
    return Source(file, hparams, program)


def human(n: float) -> str:
    """A count in thousands, millions or billions."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n:.0f}"


def recipe(file: GgufFile) -> str:
    """The mix of formats that ``general.file_type`` names, else the format that most bytes have. For people only."""
    stated = file.metadata.get("general.file_type")
    if isinstance(stated, int) and stated in FILE_TYPES:
        return FILE_TYPES[stated]
    size: Counter[str] = Counter()
    for t in file.tensors.values():
        size[t.format.name] += t.nbytes
    return size.most_common(1)[0][0]


def _used_experts(op: Op) -> int:
    return int(op.attrs.get("used", 1))


def weight_bytes_per_token(program: Program) -> int:
    """Bytes of weights that a decode step of one sequence reads: chosen experts only, one row of the embedding."""
    total = 0
    for op in program.ops:
        for w in op.weights:
            total += w.row_bytes if op.kind == "embed" else w.rows * w.row_bytes * _used_experts(op)
        total += sum(v.nbytes for v in op.vectors)
    return total


def kv_bytes_per_token(program: Program, depth: float) -> float:
    """Bytes of float16 keys and values that a decode step at ``depth`` reads."""
    s = program.state
    return depth * s.attention_layers * s.kv_heads * s.head_dim * 2 * 2


def products_per_token(program: Program) -> tuple[int, int]:
    """Multiplications of linear layers for each token row, and for each row whose logits are wanted."""
    rows = wanted = 0
    for op in program.ops:
        if op.kind in ("linear", "moe_linear"):
            n = sum(w.rows * w.cols for w in op.weights) * _used_experts(op)
            if op.ins[0].value.gathered:
                wanted += n
            else:
                rows += n
    return rows, wanted
