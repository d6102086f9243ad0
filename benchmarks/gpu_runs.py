"""What a phase of gpu_check.py measures with: sizes, results as lines of JSON, timed runs on an executable. The package
must be on the path."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen35rt.backends.base import Batch
from qwen35rt.backends.cuda.backend import CudaExecutable
from qwen35rt.config import ENGINE

TOP = ENGINE.top_k_on_device  # logits that steps ask for


@dataclass(frozen=True)
class Sizes:
    """How much a phase does: on a device, or in emulation."""

    formats: tuple[str, ...] = ("Q4_K", "Q6_K", "Q8_0", "F32", "BF16")
    seconds_of_ops: float = 40
    peak_bytes: int = 4 << 30
    peak_rounds: int = 4096
    repeats: int = 3
    step_rows: tuple[int, ...] = (512, 2048)  # rows of one step of a prefill
    prompts: tuple[int, ...] = (512, 4096, 32768)
    first_token: int = 2000
    sequences: tuple[int, ...] = (1, 8, 32)
    depth: int = 129  # tokens before decode: one graph then serves the next 127
    steps: int = 64
    greedy: int = 200
    compared: int = 21  # rows whose logits are compared: from 16 on tensor cores take part


EMULATED = Sizes(("Q4_K", "F32"), 0.1, 1 << 14, 2, 1, (2, 3), (3,), 2, (1, 2), 2, 1, 2, 4)


def row(test: str, value: float | str, unit: str = "", ok: bool = True, **more: Any) -> None:
    """One result."""
    print(json.dumps({"test": test, "value": value, "unit": unit, "ok": ok, **more}), flush=True)


class Runs:
    """Timed runs on an executable; tokens are drawn from a seed."""

    def __init__(self, exe: CudaExecutable, n_vocab: int, sizes: Sizes) -> None:
        self.exe, self.n_vocab, self.sizes = exe, n_vocab, sizes
        self.rng = np.random.default_rng(1)

    def prefill(self, prompt: int, step_rows: int, repeats: int) -> float:
        """Seconds until the first token is known: the median."""
        times = []
        pages = np.arange(-(-prompt // 64), dtype=np.int32)
        for number in range(1 + repeats):
            ids = self.rng.integers(0, self.n_vocab, prompt)
            if number == 0:  # to compile what is missing
                ids = ids[: 2 * step_rows]
            began = time.perf_counter()
            for at in range(0, len(ids), step_rows):
                assert self.exe.run(Batch.single(ids[at : at + step_rows], at, pages), top=TOP)[1].on_gpu
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    def decode(self, sequences: int) -> float:
        """Tokens a second of all sequences together, steps as the engine asks for them."""
        depth, steps, warm = self.sizes.depth, self.sizes.steps, 3
        each = -(-(depth + steps + warm) // 64)
        pages = np.arange(sequences * each, dtype=np.int32).reshape(sequences, each)
        for s in range(sequences):
            self.exe.run(Batch.single(self.rng.integers(0, self.n_vocab, depth), 0, pages[s], s), top=TOP)
        ids = self.rng.integers(0, self.n_vocab, (warm + steps, sequences))
        began = []
        for step in range(warm + steps):
            began.append(time.perf_counter())
            self.exe.run(decode_batch(ids[step], depth + step, pages), top=TOP)
        return sequences * steps / (time.perf_counter() - began[warm])

    def device_step(self) -> float:
        """Seconds of the graph that was captured last, without what the host does for a step."""
        graph, _ = [made for made in self.exe._graphs.values() if made is not None][-1]
        with self.exe.launcher.activate():
            graph()
            self.exe.launcher.synchronize()
            began = time.perf_counter()
            for _ in range(self.sizes.steps):
                graph()
            self.exe.launcher.synchronize()
        return (time.perf_counter() - began) / self.sizes.steps

    def profiles(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Seconds by kind of op of a decode step and of a step of a prefill."""
        depth, rows = self.sizes.depth, self.sizes.step_rows[0]
        pages = np.arange(-(-max(depth + 1, rows) // 64), dtype=np.int32).reshape(1, -1)
        self.exe.profile = True
        for name, batch in (
            ("decode step", decode_batch(np.zeros(1, np.int32), depth, pages)),
            (f"step of {rows} rows", Batch.single(self.rng.integers(0, self.n_vocab, rows), 0, pages[0])),
        ):
            self.exe.run(batch, top=TOP)
            yield name, self.exe.run(batch, top=TOP)[1].op_seconds
        self.exe.profile = False


def decode_batch(ids: Any, start: int, pages: Any) -> Batch:
    """One row of each sequence."""
    n = len(ids)
    numbers, starts = np.arange(n, dtype=np.int32), np.full(n, start, np.int32)
    offsets = np.arange(n + 1, dtype=np.int32)
    return Batch(np.asarray(ids, np.int32), np.tile(starts, (3, 1)), offsets, starts, numbers, pages, numbers)


def singles(ids: Any, first: int, pages: Any) -> list[Batch]:
    """A prefill of ``first`` rows, then one row a step."""
    rest = [Batch.single(ids[at : at + 1], at, pages) for at in range(first, len(ids))]
    return [Batch.single(ids[:first], 0, pages), *rest]


def host_backend() -> tuple[Any, str]:
    """The CPU backend, else the reference."""
    try:
        from qwen35rt.backends.cpu.backend import CpuBackend
    except ImportError:
        from qwen35rt.backends.reference import ReferenceBackend

        return ReferenceBackend(), "the reference"
    return CpuBackend(), "the CPU"


def greedy_gap(exe: Any, other: Any, prompt: Any, pages: Any, count: int) -> float:
    """The largest difference of the other backend's logits between its choice and the device's, fed the same tokens."""
    worst, ids, at = 0.0, list(prompt), 0
    for _ in range(count):
        batch = Batch.single(ids[at:], at, pages)
        at = len(ids)
        best, logits = exe.run(batch, top=TOP)[0][0], other.run(batch)[0][0]
        worst = max(worst, float(logits.max() - logits[best.ids[best.logits.argmax()]]))
        ids.append(int(logits.argmax()))
    other.close()
    return worst
