"""One phase of gpu_check.py in a process of its own: ``gpu_phases.py PHASE OPTIONS-AS-JSON``.

Each result is one line of JSON on standard output, written as soon as it is known. A phase that dies takes nothing with
it. With ``emulate`` (a folder for compiled kernels) everything runs in emulation on tiny files.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from qwen35rt.backends.base import Batch, Limits  # noqa: E402
from qwen35rt.backends.cuda import open_cuda, source  # noqa: E402
from qwen35rt.backends.cuda.backend import CudaBackend, CudaExecutable  # noqa: E402
from qwen35rt.config import ENGINE  # noqa: E402
from qwen35rt.model import source as model  # noqa: E402
from qwen35rt.self_test import BOUND, self_test  # noqa: E402

# Operations a clock and multiprocessor of dense int8 products on tensor cores, by compute capability.
INT8_RATE = {(7, 5): 2048, (8, 0): 4096, (8, 6): 2048, (8, 9): 2048, (9, 0): 8192, (10, 0): 16384, (12, 0): 2048}
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


class Phase:
    """The device and the options of this process."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.sizes = EMULATED if options["emulate"] else Sizes()
        if options["emulate"]:
            from tests.cuda_host import cupy_host, host

            host.folder = lambda: Path(options["emulate"])  # type: ignore[assignment]
            self.backend = CudaBackend(cupy_host.launch_module(cupy_host.Machine()).CupyLauncher())
        else:
            self.backend = open_cuda()
        self.launcher: Any = self.backend.launcher

    # ------------------------------------------------------------------------------------ checks

    def device(self) -> None:
        """What there is; whether the modules compile; whether a model's logits are right."""
        names = ("numpy", "cupy") if not self.options["emulate"] else ("numpy",)
        versions = ", ".join(f"{name} {__import__(name).__version__}" for name in names)
        row("device", self.launcher.description, detail=f"Python {sys.version.split()[0]}, {versions}")
        wanted = [
            (file, variant)
            for file in source.files()
            for variant in source.variants(file)
            if file not in source.BY_FORMAT or variant in self.sizes.formats
        ]
        if self.options["emulate"]:
            wanted = [("rope", ""), ("quantize", "")]

        def compile_one(module: tuple[str, str]) -> None:
            with self.launcher.activate():
                self.launcher.function(*module, source.kernels(module[0])[0])

        began = time.perf_counter()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(compile_one, wanted))
        row("modules compiled", time.perf_counter() - began, "s", detail=f"{len(wanted)} modules")
        if not self.options["emulate"]:
            self_test(self.backend)
            row("embedded model, prefill and decode", "right", detail=f"error below {BOUND:.0e} of the reference's")

    def ops(self) -> None:
        """Op cases against the reference in float64, the first of each op first, until the time is up."""
        from tests.ops.case import check_outcome, run_case
        from tests.ops.cases import all_cases

        rank: dict[str, int] = {}
        cases = []
        for case in all_cases():
            rank[case.op] = rank.get(case.op, 0) + 1
            cases.append((rank[case.op], case))
        cases.sort(key=lambda item: item[0])
        began, passed, failed = time.perf_counter(), 0, []
        for _, case in cases:
            try:
                check_outcome(case, run_case(case, self.backend))
                passed += 1
            except AssertionError as e:
                failed.append(str(e))
                row("op case", case.id, ok=False, detail=str(e)[:300])
            if time.perf_counter() - began > self.sizes.seconds_of_ops:
                break
        row("op cases passed", passed, f"of {passed + len(failed)}", ok=not failed, detail=f"{len(cases)} in all")

    def checks(self) -> None:
        """Graphs against launches one by one, the largest logits, greedy text against another backend."""
        program = model.open_source(self.options["path"]).program
        limits = Limits(64, 64, 2, 8)
        pages = np.arange(4, dtype=np.int32)
        prompt = np.random.default_rng(5).integers(0, min(program.n_vocab, 500), self.sizes.compared)
        eager = CudaBackend(self.launcher, graphs=False).compile(program, limits)
        graphs = self.backend.compile(program, limits)
        rows = [[exe.run(b)[0].copy() for b in _singles(prompt, len(prompt) - 3, pages)] for exe in (eager, graphs)]
        same = all(np.array_equal(a, b) for a, b in zip(*rows, strict=True))
        row("graphs against launches one by one", "equal bits" if same else "different", ok=same)
        batch = Batch.single(prompt, 0, pages, out_rows=range(len(prompt)))
        logits = graphs.run(batch)[0].copy()
        best, report = graphs.run(batch, top=TOP)
        ids = np.sort(np.argsort(-logits, 1, kind="stable")[:, :TOP])
        right = report.on_gpu and np.array_equal([best.ids, best.logits], [ids, np.take_along_axis(logits, ids, 1)])
        row("largest logits found on the device", "right" if right else "wrong", ok=right)
        other, name = _host_backend()
        worst = _greedy_gap(graphs, other.compile(program, limits), prompt, pages, self.sizes.greedy)
        row(f"{self.sizes.greedy} greedy tokens against {name}: gap where they part", worst, "logits", ok=worst < 0.05)
        for exe in (eager, graphs):
            exe.close()

    def tests(self) -> None:
        """The tests that need a GPU, but for the op cases (``pytest -m gpu`` runs them); in emulation quick ones."""
        if not (find_spec("pytest") and find_spec("gguf")):
            row("tests", "left out", detail="they need pytest and gguf")
            return
        chosen = ["tests/cuda/test_gpu.py", "-m", "gpu", "-k", "not test_op"]
        chosen = ["tests/cuda/test_source.py"] if self.options["emulate"] else chosen
        command = [sys.executable, "-m", "pytest", *chosen, "-v", "--tb=short", "--no-header"]
        command += ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(ROOT)]  # settings name plugins
        counts = dict.fromkeys(("PASSED", "FAILED", "ERROR", "SKIPPED"), 0)
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
            for line in run.stdout or ():
                print(line, end="", file=sys.stderr)
                found = re.match(r"(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)", line)
                if found:
                    counts[found[2]] += 1
                    if found[2] in ("FAILED", "ERROR"):
                        row(found[1].rpartition("::")[2], found[2].lower(), ok=False)
        failed = counts["FAILED"] + counts["ERROR"] or not counts["PASSED"]
        detail = f"{counts['SKIPPED']} skipped" if counts["PASSED"] else "pytest did not run; see the log"
        row("tests passed", counts["PASSED"], f"of {sum(counts.values())}", ok=not failed, detail=detail)

    # ------------------------------------------------------------------------------------ peaks

    def peaks(self) -> None:
        """Memory and tensor throughput that simple kernels reach, and that the device's clocks promise."""
        launcher, sizes = self.launcher, self.sizes
        with launcher.activate():
            attributes = launcher.xp.cuda.Device().attributes
            multiprocessors = attributes["MultiProcessorCount"]
            module = launcher.xp.RawModule(code=_text(HERE / "peaks.cu"), options=("--std=c++17",), backend="nvrtc")
            module.compile()
            blocks = 8 * multiprocessors
            data = launcher.zeros((sizes.peak_bytes // 16, 4), np.uint32)
            out = launcher.empty((blocks * 256,), np.uint32)

            def best(name: str, *args: Any) -> float:
                kernel = module.get_function(name)
                times = []
                for _ in range(1 + 4 * sizes.repeats):
                    launcher.synchronize()
                    began = time.perf_counter()
                    for _ in range(sizes.repeats):
                        kernel((blocks, 1, 1), (256, 1, 1), args)
                    launcher.synchronize()
                    times.append((time.perf_counter() - began) / sizes.repeats)
                return min(times[1:])

            read = sizes.peak_bytes / best("read_words", data, out, np.int32(len(data))) / 1e9
            products = blocks * 8 * sizes.peak_rounds * 8 * 2 * 16 * 8
            int8 = 32 * products / best("products_int8", out.view(np.int32), np.int32(sizes.peak_rounds)) / 1e12
            bf16 = 16 * products / best("products_bf16", out.view(np.float32), np.int32(sizes.peak_rounds)) / 1e12
        row("memory reads", read, "GB/s", key="read")
        row("int8 products (mma)", int8, "TOP/s", key="int8")
        row("bfloat16 products (mma)", bf16, "TFLOP/s", key="bf16")
        bus, clock = attributes.get("GlobalMemoryBusWidth"), attributes.get("MemoryClockRate")
        if bus and clock:
            row("memory, by its clock", 2e3 * clock * bus / 8 / 1e9, "GB/s", key="nominal_read")
        rate, clock = INT8_RATE.get(launcher.capability), attributes.get("ClockRate")
        if rate and clock:
            row("int8 products, by the clock", rate * multiprocessors * clock * 1e3 / 1e12, "TOP/s", key="nominal_int8")

    # ------------------------------------------------------------------------------------ models

    def speed(self) -> None:
        """Load a file; logits against the CPU's; decode, prefill, first token; time by kind of op."""
        began, sizes = time.perf_counter(), self.sizes
        found = model.open_source(self.options["path"])
        tokens = max(*sizes.prompts, sizes.first_token, max(sizes.sequences) * (sizes.depth + sizes.steps + 67))
        pages = -(-tokens // 64) + max(sizes.sequences)
        limits = Limits(max(sizes.step_rows), max(sizes.sequences), max(sizes.sequences), pages)
        exe = self.backend.compile(found.program, limits)
        taken = time.perf_counter() - began
        gb = found.tensor_bytes / 1e9
        row("load", taken, "s", detail=f"{found.description}, {gb:.2f} GB, {gb / taken:.1f} GB/s from the page cache")
        runs = Runs(exe, found.program.n_vocab, sizes)
        self._against_cpu(found.program, exe)
        weights, state = model.weight_bytes_per_token(found.program), found.program.state
        for sequences in sizes.sequences:
            rate = runs.decode(sequences)
            steps = rate / sequences
            kept = sequences * (2 * state.state_bytes() + model.kv_bytes_per_token(found.program, sizes.depth))
            row(
                f"decode, {sequences} sequence{'s' if sequences > 1 else ''}",
                rate,
                "tokens/s",
                share_of="read",
                share=steps * weights / 1e9,
                detail=f"with state, keys and values {steps * (weights + kept) / 1e9:.0f} GB/s",
            )
            row(f"the same, steps on the device alone ({sequences})", 1e3 * runs.device_step(), "ms")
        long = [prompt for prompt in sizes.prompts if prompt > 10_000]
        self._prefills(found.program, runs, [prompt for prompt in sizes.prompts if prompt not in long])
        first = runs.prefill(sizes.first_token, sizes.step_rows[0], sizes.repeats)
        row(f"first token of {sizes.first_token}", 1e3 * first, "ms")
        for name, op_seconds in runs.profiles():
            total = sum(op_seconds.values())
            for kind, seconds in sorted(op_seconds.items(), key=lambda item: -item[1])[:8]:
                row(f"{name}: {kind}", 1e3 * seconds, "ms", detail=f"{seconds / total:.0%} (waiting behind each op)")
        self._prefills(found.program, runs, long)
        exe.close()

    def _prefills(self, program: Any, runs: Runs, prompts: list[int]) -> None:
        """Each prompt in the usual steps, and the last one that is not long in longer steps, too."""
        per_row, wanted = model.products_per_token(program)
        usual, longer = self.sizes.step_rows
        for prompt, rows in [*((p, usual) for p in prompts), *((p, longer) for p in prompts[-1:] if p <= 10_000)]:
            rate = prompt / runs.prefill(prompt, rows, 1 if prompt > 10_000 else self.sizes.repeats)
            work = 2 * (per_row + wanted * -(-prompt // rows) / prompt) * rate / 1e12
            row(f"prefill of {prompt}, steps of {rows}", rate, "tokens/s", share_of="int8", share=work)

    def _against_cpu(self, program: Any, exe: CudaExecutable) -> None:
        """Logits of the real shapes: of 20 rows at once (tiles on tensor cores), and of one row behind them."""
        other, name = _host_backend()
        if name == "the reference" and not self.options["emulate"]:
            row("logits against the CPU", "skipped", detail="the native extension is not built here")
            return
        ids = np.random.default_rng(8).integers(0, min(program.n_vocab, 5000), self.sizes.compared)
        limits, page = Limits(len(ids), 1, 1, 1), np.zeros(1, np.int32)
        host = other.compile(program, limits)
        got, want = (
            np.concatenate([it.run(b)[0].copy() for b in _singles(ids, len(ids) - 1, page)]).astype(np.float64)
            for it in (exe, host)
        )
        host.close()
        error = float(np.sum((got - want) ** 2) / np.sum(want**2))
        row(f"logits against {name}", error, "nmse", ok=error < BOUND, detail=f"bound {BOUND:.0e}")


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
            self.exe.run(_decode_batch(ids[step], depth + step, pages), top=TOP)
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
            ("decode step", _decode_batch(np.zeros(1, np.int32), depth, pages)),
            (f"step of {rows} rows", Batch.single(self.rng.integers(0, self.n_vocab, rows), 0, pages[0])),
        ):
            self.exe.run(batch, top=TOP)
            yield name, self.exe.run(batch, top=TOP)[1].op_seconds
        self.exe.profile = False


def _decode_batch(ids: Any, start: int, pages: Any) -> Batch:
    """One row of each sequence."""
    n = len(ids)
    numbers, starts = np.arange(n, dtype=np.int32), np.full(n, start, np.int32)
    offsets = np.arange(n + 1, dtype=np.int32)
    return Batch(np.asarray(ids, np.int32), np.tile(starts, (3, 1)), offsets, starts, numbers, pages, numbers)


def _singles(ids: Any, first: int, pages: Any) -> list[Batch]:
    """A prefill of ``first`` rows, then one row a step."""
    rest = [Batch.single(ids[at : at + 1], at, pages) for at in range(first, len(ids))]
    return [Batch.single(ids[:first], 0, pages), *rest]


def _host_backend() -> tuple[Any, str]:
    """The CPU backend, else the reference."""
    try:
        from qwen35rt.backends.cpu.backend import CpuBackend
    except ImportError:
        from qwen35rt.backends.reference import ReferenceBackend

        return ReferenceBackend(), "the reference"
    return CpuBackend(), "the CPU"


def _greedy_gap(exe: Any, other: Any, prompt: Any, pages: Any, count: int) -> float:
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


def _text(path: Path) -> str:
    """A file with the project's includes in it."""
    text = path.read_text()
    return re.sub(r'(?m)^# *include "([\w.]+)"$', lambda m: _text(source.kernel_folder() / m.group(1)), text)


def main() -> None:
    """Run one phase."""
    name, options = sys.argv[1], json.loads(sys.argv[2])
    phase = Phase(options)
    go: Callable[[], None] = getattr(phase, name)
    go()


if __name__ == "__main__":
    main()
