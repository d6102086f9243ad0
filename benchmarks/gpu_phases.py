"""One phase of gpu_check.py in a process of its own: ``gpu_phases.py PHASE OPTIONS-AS-JSON``.

Each result is one line of JSON on standard output, written as soon as it is known. A phase that dies takes nothing with
it; one whose time is up (``seconds`` of the options) says what it left out. With ``emulate`` (a folder for compiled
kernels) everything runs in emulation on tiny files.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from gpu_runs import EMULATED, TOP, Runs, Sizes, greedy_gap, host_backend, row, singles  # noqa: E402

from qwen35rt.backends.base import Batch, Limits  # noqa: E402
from qwen35rt.backends.cuda import open_cuda, source  # noqa: E402
from qwen35rt.backends.cuda.backend import CudaBackend, CudaExecutable  # noqa: E402
from qwen35rt.backends.fusion import PRODUCTS  # noqa: E402
from qwen35rt.model import source as model  # noqa: E402
from qwen35rt.self_test import BOUND, self_test  # noqa: E402

# Operations a clock and multiprocessor of dense int8 products on tensor cores, by compute capability.
INT8_RATE = {(7, 5): 2048, (8, 0): 4096, (8, 6): 2048, (8, 9): 2048, (9, 0): 8192, (10, 0): 16384, (12, 0): 2048}


class Phase:
    """The device and the options of this process."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.end: float = time.monotonic() + options["seconds"]
        self.sizes = EMULATED if options["emulate"] else Sizes()
        if options["emulate"]:
            from tests.cuda_host import cupy_host, host

            host.folder = lambda: Path(options["emulate"])  # type: ignore[assignment]
            self.backend = CudaBackend(cupy_host.launch_module(cupy_host.Machine()).CupyLauncher())
        else:
            self.backend = open_cuda()
        self.launcher: Any = self.backend.launcher

    def left(self) -> float:
        """Seconds that are left."""
        return self.end - time.monotonic()

    def has_time(self, test: str, seconds: float = 3) -> bool:
        """Whether a test that may take so long can begin. A result says if not."""
        there = self.left() >= seconds
        if not there:
            row(test, "left out", cut=True, detail="no time was left")
        return there

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

        rank: dict[tuple[str, str], int] = {}
        cases = []
        for case in all_cases():
            name = case.label.partition("-")[0] if case.op in ("embed", *PRODUCTS) else ""  # of the format
            at = rank[case.op, name] = rank.get((case.op, name), 0) + 1
            cases.append((name not in ("", *self.sizes.formats), at, case))  # to be compiled yet: last
        cases.sort(key=lambda item: item[:2])
        passed, failed = 0, []
        end = time.monotonic() + min(self.sizes.seconds_of_ops, self.left())
        for *_, case in cases:
            try:
                check_outcome(case, run_case(case, self.backend))
                passed += 1
            except AssertionError as e:
                failed.append(str(e))
                row("op case", case.id, ok=False, detail=str(e)[:300])
            if time.monotonic() > end:
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
        rows = [[exe.run(b)[0].copy() for b in singles(prompt, len(prompt) - 3, pages)] for exe in (eager, graphs)]
        same = all(np.array_equal(a, b) for a, b in zip(*rows, strict=True))
        row("graphs against launches one by one", "equal bits" if same else "different", ok=same)
        batch = Batch.single(prompt, 0, pages, out_rows=range(len(prompt)))
        logits = graphs.run(batch)[0].copy()
        best: Any
        best, report = graphs.run(batch, top=TOP)
        ids = np.sort(np.argsort(-logits, 1, kind="stable")[:, :TOP])
        right = report.on_gpu and np.array_equal(best.ids, ids)
        right = right and np.array_equal(best.logits, np.take_along_axis(logits, ids, 1))
        row("largest logits found on the device", "right" if right else "wrong", ok=right)
        other, name = host_backend()
        worst = greedy_gap(graphs, other.compile(program, limits), prompt, pages, self.sizes.greedy)
        row(f"{self.sizes.greedy} greedy tokens against {name}: gap where they part", worst, "logits", ok=worst < 0.05)
        for exe in (eager, graphs):
            exe.close()

    def oracle(self) -> None:
        """Logits and greedy text of the oracle's files, where they are."""
        from tests.oracle import MODELS

        if MODELS.is_dir() or self.options["emulate"]:
            self._run_tests("oracle")
        else:
            row("tests", "left out", detail="there is no oracle data here (QWEN35RT_ORACLE)")

    def tests(self) -> None:
        """The tests that need a GPU, but for the op cases (``pytest -m gpu`` runs them) and the oracle's files."""
        self._run_tests("not test_op and not oracle")

    def _run_tests(self, names: str) -> None:
        """Run pytest until the time is up; in emulation on quick tests, whatever is asked for."""
        if not (find_spec("pytest") and find_spec("gguf")):
            row("tests", "left out", detail="they need pytest and gguf")
            return
        chosen = ["tests/cuda/test_gpu.py", "-m", "gpu", "-k", names]
        chosen = ["tests/cuda/test_source.py"] if self.options["emulate"] else chosen
        command = [sys.executable, "-m", "pytest", *chosen, "-v", "--tb=short", "--no-header"]
        command += ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(ROOT)]  # settings name plugins
        counts = dict.fromkeys(("PASSED", "FAILED", "ERROR", "SKIPPED"), 0)
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
            ending = threading.Timer(max(self.left(), 0.1), run.kill)
            ending.start()
            for line in run.stdout or ():
                print(line, end="", file=sys.stderr)
                found = re.match(r"(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)", line)
                if found:
                    counts[found[2]] += 1
                    if found[2] in ("FAILED", "ERROR"):
                        row(found[1].rpartition("::")[2], found[2].lower(), ok=False)
            ending.cancel()
        cut = run.wait() < 0
        failed = counts["FAILED"] + counts["ERROR"] or not (counts["PASSED"] or cut)
        detail = f"{counts['SKIPPED']} skipped" if counts["PASSED"] else "pytest did not run; see the log"
        detail = f"its time was up; {counts['SKIPPED']} skipped" if cut else detail
        row("tests passed", counts["PASSED"], f"of {sum(counts.values())}", ok=not failed, cut=cut, detail=detail)

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
            if not self.has_time(name := f"decode, {sequences} sequence{'s' if sequences > 1 else ''}"):
                continue
            rate = runs.decode(sequences)
            steps = rate / sequences
            kept = sequences * (2 * state.state_bytes() + model.kv_bytes_per_token(found.program, sizes.depth))
            row(
                name,
                rate,
                "tokens/s",
                share_of="read",
                share=steps * weights / 1e9,
                detail=f"with state, keys and values {steps * (weights + kept) / 1e9:.0f} GB/s",
            )
            row(f"the same, steps on the device alone ({sequences})", 1e3 * runs.device_step(), "ms")
        long = [prompt for prompt in sizes.prompts if prompt > 10_000]
        self._prefills(found.program, runs, [prompt for prompt in sizes.prompts if prompt not in long])
        if self.has_time(name := f"first token of {sizes.first_token}"):
            row(name, 1e3 * runs.prefill(sizes.first_token, sizes.step_rows[0], sizes.repeats), "ms")
        for name, op_seconds in runs.profiles() if self.has_time("time by kind of op") else ():
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
            if not self.has_time(name := f"prefill of {prompt}, steps of {rows}", 8 if prompt > 10_000 else 3):
                continue
            rate = prompt / runs.prefill(prompt, rows, 1 if prompt > 10_000 else self.sizes.repeats)
            work = 2 * (per_row + wanted * -(-prompt // rows) / prompt) * rate / 1e12
            row(name, rate, "tokens/s", share_of="int8", share=work)

    def _against_cpu(self, program: Any, exe: CudaExecutable) -> None:
        """Logits of the real shapes: of 20 rows at once (tiles on tensor cores), and of one row behind them."""
        other, name = host_backend()
        if name == "the reference" and not self.options["emulate"]:
            row("logits against the CPU", "skipped", detail="the native extension is not built here")
            return
        ids = np.random.default_rng(8).integers(0, min(program.n_vocab, 5000), self.sizes.compared)
        limits, page = Limits(len(ids), 1, 1, 1), np.zeros(1, np.int32)
        host = other.compile(program, limits)
        got, want = (
            np.concatenate([it.run(b)[0].copy() for b in singles(ids, len(ids) - 1, page)]).astype(np.float64)
            for it in (exe, host)
        )
        host.close()
        error = float(np.sum((got - want) ** 2) / np.sum(want**2))
        row(f"logits against {name}", error, "nmse", ok=error < BOUND, detail=f"bound {BOUND:.0e}")


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
