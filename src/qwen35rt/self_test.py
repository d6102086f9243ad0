"""Runs a few tokens of the embedded model on a backend and on the reference: a device that is wrong is not used."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .backends.base import Backend, Batch, Limits
from .backends.reference import ReferenceBackend
from .errors import BackendError, BackendUnavailable
from .model.program import Program
from .model.source import open_source

# Ordinary tokens of the embedded model: as many as kernels for long steps need, and one of a decode step.
TOKENS = np.arange(300, 397, dtype=np.int32)
PAGES = np.arange(2, dtype=np.int32)
BOUND = 1e-3  # on the normalised mean square error: int8 activations stay far below


def self_test(backend: Backend) -> None:
    """Raise BackendUnavailable if the backend fails, or if its logits differ from the reference's."""
    source = open_source()
    with source.file:
        try:
            got = _logits(backend, source.program)
        except BackendError as e:
            raise BackendUnavailable(f"device {backend.name} does not work here: {e}") from e
        want = _logits(ReferenceBackend(), source.program)
    error = float(np.sum((got - want) ** 2) / np.sum(want**2))
    if not error < BOUND:
        raise BackendUnavailable(
            f"device {backend.name} does not work here: its results are wrong "
            f"(error {error:.1e} on the embedded model, bound {BOUND:.0e}); please report this"
        )


def _logits(backend: Backend, program: Program) -> npt.NDArray[Any]:
    """Logits float64 [2, n_vocab] behind a prefill and behind a decode step."""
    exe = backend.compile(program, Limits(rows=len(TOKENS), out_rows=1, pages=len(PAGES), kv_dtype="f16"))
    try:
        last = len(TOKENS) - 1
        steps = ((TOKENS[:last], 0), (TOKENS[last:], last))
        # Copies, since a step's logits last until the next step only.
        found = [exe.run(Batch.single(ids, start, PAGES))[0].astype(np.float64) for ids, start in steps]
    finally:
        exe.close()
    return np.concatenate(found)
