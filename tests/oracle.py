"""The oracle's models as programs, and helpers that run a prompt through a backend in any steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qwen35rt.backends import reference
from qwen35rt.backends.base import Backend, Batch, Executable, KvType, Limits
from qwen35rt.model.gguf_file import open_gguf
from qwen35rt.model.graph import build_program
from qwen35rt.model.hparams import HParams, read_hparams
from qwen35rt.model.program import Program
from qwen35rt.model.weights import DeltaWeights, QTensor, Weights, load_weights

from .implementations import oracle
from .ops.tensors import plain_tensor

Array = npt.NDArray[Any]
PAGE_TOKENS = 64
MODELS = oracle() / "models"
FILES = {
    "nano": ("f32", "f16", "bf16"),
    "dense": ("q8_0", "q4_0", "q4_k_m", "mix"),
    "wide": ("q4_k_m",),
    "moe": ("bf16",),
    "moek": ("q4_k_m",),
    "mtp": ("bf16",),
    "moemtp": ("q8_0",),
}
BASE = {name: variants[0] for name, variants in FILES.items()}  # the file of the split, greedy, state and trace keys
ALL_FILES = [(name, variant) for name, variants in FILES.items() for variant in variants]
EXPERTS = ("moe", "moek", "moemtp")

needs_oracle = pytest.mark.skipif(not MODELS.is_dir(), reason=f"no oracle data in {oracle()} (QWEN35RT_ORACLE)")


@dataclass(frozen=True, eq=False)
class Model:
    """A file of the oracle, opened."""

    hp: HParams
    weights: Weights
    program: Program


@cache
def golden(name: str) -> Mapping[str, Array]:
    """All arrays of a golden file."""
    with np.load(MODELS / f"{name}.golden.npz") as z:
        return {k: z[k] for k in z.files}


@cache
def model(name: str, variant: str) -> Model:
    """The program of a file."""
    f = open_gguf(MODELS / f"{name}.{variant}.gguf")
    hp = read_hparams(f)
    weights = load_weights(f, hp)
    return Model(hp, weights, build_program(hp, weights))


def changed(m: Model, matrix: Callable[[QTensor], QTensor], dt_bias: float | None = None) -> Program:
    """The program with every matrix replaced, and alternating dt biases of +-``dt_bias`` if given."""

    def part(x: Any) -> Any:
        if isinstance(x, QTensor):
            return matrix(x)
        if isinstance(x, DeltaWeights) and dt_bias is not None:
            signs = np.where(np.arange(len(x.dt_bias)) % 2, 1, -1)
            x = replace(x, dt_bias=(dt_bias * signs).astype(np.float32))
        if hasattr(x, "__dataclass_fields__"):
            return replace(x, **{k: part(getattr(x, k)) for k in x.__dataclass_fields__})
        return tuple(part(y) for y in x) if isinstance(x, tuple) else x

    return build_program(m.hp, part(m.weights))


def as_f32(tensor: QTensor) -> QTensor:
    """The same numbers in F32."""
    return plain_tensor(tensor.name, tensor.dequantize())


def prompts(name: str, variant: str, kind: str = "hf", but: Sequence[str] = ()) -> list[str]:
    """Names of the prompts with logits of that kind."""
    start = f"{kind}.{variant}."
    return [k[len(start) :] for k in golden(name) if k.startswith(start) and k[len(start) :] not in but]


def compiled(
    backend: Backend, program: Program, tokens: int = 256, slots: int = 1, kv_dtype: KvType = "f32"
) -> Executable:
    """An executable for steps and sequences of up to ``tokens`` tokens. HF kept keys and values in float32."""
    pages = slots * -(-tokens // PAGE_TOKENS)
    return backend.compile(program, Limits(tokens, tokens, slots, pages, PAGE_TOKENS, kv_dtype))


def step(
    exe: Executable, tokens: Array, begin: int, end: int, keep: Sequence[str] = (), positions: Array | None = None
) -> tuple[Array, Mapping[str, Array]]:
    """Tokens begin .. end - 1 of a prompt as one step in slot 0: logits of all rows, kept values."""
    batch = Batch.single(tokens[begin:end], begin, np.arange(exe.limits.pages, dtype=np.int32), 0, range(end - begin))
    if positions is not None:
        batch = replace(batch, positions=np.ascontiguousarray(positions[:, begin:end], np.int32))
    logits, report = exe.run(batch, keep)
    return logits.copy(), report.values


def in_steps(exe: Executable, tokens: Array, ends: Sequence[int]) -> Array:
    """Logits of all rows of a prompt run in steps that end at ``ends``."""
    return np.concatenate([step(exe, tokens, a, b)[0] for a, b in zip([0, *ends[:-1]], ends, strict=True)])


def every(chunk: int, length: int) -> list[int]:
    """Ends of chunks."""
    return [*range(chunk, length, chunk), length]


def prompt_logits(exe: Executable, name: str, prompt: str) -> Array:
    """Logits of the golden rows of a prompt, run in one step."""
    z = golden(name)
    return step(exe, z[f"tokens.{prompt}"], 0, len(z[f"tokens.{prompt}"]), (), z.get(f"pos.{prompt}"))[0][
        z[f"rows.{prompt}"]
    ]


def int8_rows(x: Array) -> Array:
    """Rows rounded to int8 in blocks of 32 columns, as a product with quantised weights sees them."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    unit = np.abs(blocks).max(-1, keepdims=True) / 127
    rounded = np.rint(np.divide(blocks, unit, out=np.zeros_like(blocks), where=unit > 0)) * unit
    out: Array = rounded.reshape(x.shape)
    return out


def bf16_rows(x: Array) -> Array:
    """Finite numbers rounded to the nearest bfloat16, as a product with BF16 weights sees them at avx512bf16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    out: Array = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32).astype(x.dtype)
    return out


@contextmanager
def rounded_activations(bf16: bool = False) -> Iterator[None]:
    """While it lasts the reference rounds what meets quantised weights to int8 in blocks of 32; with ``bf16`` also what
    meets BF16 weights to bfloat16."""
    kinds = ("linear", "moe_linear")
    plain = {kind: reference.KERNELS[kind] for kind in kinds}

    def rounding(kernel: reference.Kernel) -> reference.Kernel:
        def run(exe: reference.ReferenceExecutable, batch: Batch, op: Any, ins: list[Array]) -> Array | None:
            first, weights = ins[0], op.weights[0].format
            if weights.quantized:
                first = int8_rows(first)
            elif bf16 and weights.name == "BF16":
                first = bf16_rows(first)
            return kernel(exe, batch, op, [first, *ins[1:]])

        return run

    reference.KERNELS.update({kind: rounding(kernel) for kind, kernel in plain.items()})
    try:
        yield
    finally:
        reference.KERNELS.update(plain)
