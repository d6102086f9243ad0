"""Measures this project beside llama.cpp on the same GGUF files, in turns, and prints and keeps the results.

    python benchmarks/compare.py -m a.gguf -m b.gguf -t 1 -t 2 -p 512 -n 32 -r 3
    python benchmarks/compare.py -m a.gguf --cold

Each runtime has a process of its own; the one that is not asked sleeps. Rows go to benchmarks/results/MACHINE.csv.
"""

from __future__ import annotations

import argparse
import csv
import random
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runtimes import NAMES, Runtime, peer_version

HERE = Path(__file__).resolve().parent
COLUMNS = (
    "time",
    "machine",
    "isa",
    "threads",
    "commit",
    "file",
    "test",
    "runtime",
    "n",
    "tokens_per_second",
    "repeat",
)
COLD_COLUMNS = (*COLUMNS[:8], "seconds", "anonymous_mb", "repeat")
COLD_TEXT = "The quick brown fox jumps over the lazy dog, and then it runs away."  # 16 tokens of Qwen's vocabulary
FIRST_IDS, SHORT = 1_000, 8  # ordinary tokens of the vocabulary; the prompt before a decode test


@dataclass(frozen=True)
class Test:
    """``prompt`` tokens, then ``draw`` tokens; the rate is of the drawn ones if ``decode``."""

    name: str
    prompt: int
    draw: int
    decode: bool

    @property
    def n(self) -> int:
        """Tokens or steps that are timed."""
        return self.draw - 1 if self.decode else self.prompt


def tests(prompts: list[int], steps: int, depths: list[int]) -> list[Test]:
    """Prefill tests, then decode tests after 8 tokens (depth 0) or after a longer prompt."""
    found = [Test(f"pp{p}", p, 1, False) for p in prompts if p]
    if steps:
        found += [Test(f"tg{steps}" + (f"@d{d}" if d else ""), d or SHORT, steps + 1, True) for d in depths]
    return found


class Results:
    """A CSV file with fixed columns, appended to."""

    def __init__(self, path: Path, columns: tuple[str, ...], isa: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not path.exists()
        self.file = path.open("a", newline="", encoding="utf-8")
        self.writer = csv.DictWriter(self.file, columns, lineterminator="\n")
        if fresh:
            self.writer.writeheader()
        self.common = {"machine": machine()}
        self.of_runtime = {NAMES[0]: {"isa": isa, "commit": commit()}, NAMES[1]: {"isa": "", "commit": peer_version()}}

    def add(self, runtime: str, **values: object) -> None:
        """One measurement."""
        now = {"time": time.strftime("%Y-%m-%dT%H:%M:%S")}
        self.writer.writerow({**now, **self.common, **self.of_runtime[runtime], "runtime": runtime, **values})
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def machine() -> str:
    """The processor's name."""
    sys.path.insert(0, str(HERE.parent / "src"))
    from qwen35rt.machine import cpu_name

    return cpu_name()


def own_isa() -> str:
    """The level that the project's kernels run at here."""
    sys.path.insert(0, str(HERE.parent / "src"))
    from qwen35rt.backends.cpu.backend import CpuBackend

    return CpuBackend(threads=1).isa


def commit() -> str:
    """The commit of this checkout, marked if the sources differ from it."""
    try:
        git = ["git", "-C", str(HERE.parent), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def warm(path: Path) -> None:
    """Bring a file into the page cache."""
    with path.open("rb", buffering=0) as f:
        while f.read(1 << 24):
            pass


def measure(args: argparse.Namespace, results: Results) -> Iterator[tuple[str, ...]]:
    """Run all tests; yields rows of the table. The runtimes take turns within each repeat."""
    planned = tests(args.n_prompt, args.n_gen, args.depth)
    n_ctx = max(t.prompt + t.draw for t in planned) + 64
    for path in args.model:
        warm(path)
        for threads in args.threads:
            runtimes = [Runtime(name, path, threads, n_ctx) for name in args.runtime]
            try:
                for r in runtimes:
                    r.wait_ready()
                for test in planned:
                    rates = _rates(runtimes, test, args, results)
                    best = {name: max(found) for name, found in rates.items()}
                    middle = {name: statistics.median(found) for name, found in rates.items()}
                    cells = [f"{best.get(n, 0):.2f} ({middle.get(n, 0):.2f})" if n in best else "-" for n in NAMES]
                    yield path.stem, str(threads), test.name, *cells, ratio(best), ratio(middle)
            finally:
                for r in runtimes:
                    r.close()


def _rates(runtimes: list[Runtime], test: Test, args: argparse.Namespace, results: Results) -> dict[str, list[float]]:
    """Tokens per second of each repeat. The first round is not kept: memory and kernels are touched in it."""
    rng = random.Random(args.seed)
    rates: dict[str, list[float]] = defaultdict(list)
    for repeat in range(-1, args.repetitions):
        short = repeat < 0 and not args.full_warmup
        ids = [rng.randrange(FIRST_IDS, args.vocab) for _ in range(min(test.prompt, 32) if short else test.prompt)]
        for r in runtimes:
            prompt_n, prompt_ms, steps, decode_ms = r.ask(ids, min(test.draw, 4) if short else test.draw)
            if repeat < 0:
                continue
            if prompt_n != test.prompt or steps != test.draw - 1:
                raise RuntimeError(f"{r.name}: {prompt_n} tokens and {steps} steps were run for {test}")
            rate = 1e3 * (steps / decode_ms if test.decode else prompt_n / prompt_ms)
            rates[r.name].append(rate)
            results.add(
                r.name,
                threads=r.threads,
                file=r.path.name,
                test=test.name,
                n=test.n,
                tokens_per_second=f"{rate:.3f}",
                repeat=repeat,
            )
    return rates


def cold(args: argparse.Namespace, results: Results) -> Iterator[tuple[str, ...]]:
    """A fresh process from its start to the first token of a text of 16 tokens, context 4,096; files in page cache."""
    for path in args.model:
        warm(path)
        for threads in args.threads:
            seconds: dict[str, list[float]] = defaultdict(list)
            memory: dict[str, int] = {}
            for repeat in range(args.repetitions):
                for name in args.runtime:
                    r = Runtime(name, path, threads, 4096, cold=True)
                    try:
                        seconds[name].append(r.ask(COLD_TEXT, 1) - r.began)
                        memory[name] = r.anonymous_bytes()
                    finally:
                        r.close()
                    results.add(
                        name,
                        threads=threads,
                        file=path.name,
                        test="cold",
                        seconds=f"{seconds[name][-1]:.3f}",
                        anonymous_mb=f"{memory[name] / 1e6:.1f}",
                        repeat=repeat,
                    )
            best = {name: min(found) for name, found in seconds.items()}
            middle = {name: statistics.median(found) for name, found in seconds.items()}
            cells = [
                f"{best[n]:.2f} s ({middle[n]:.2f}), {memory[n] / 1e6:.0f} MB" if n in best else "-" for n in NAMES
            ]
            yield path.stem, str(threads), "cold", *cells, ratio(best), ratio(middle)


def ratio(values: dict[str, float]) -> str:
    """Ours over the peer's."""
    return f"{values[NAMES[0]] / values[NAMES[1]]:.2f}" if len(values) == 2 else "-"


def print_table(rows: Iterator[tuple[str, ...]], what: str) -> None:
    """Markdown, row by row."""
    head = ("file", "threads", "test", *(f"{n}, {what}" for n in NAMES), "ratio of best", "ratio of median")
    print("| " + " | ".join(head) + " |")
    print("|" + "|".join("---" if i in (0, 2) else "--:" for i in range(len(head))) + "|", flush=True)
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def main() -> None:
    """Read the flags and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-m", "--model", action="append", type=Path, required=True, help="GGUF file; can be repeated")
    parser.add_argument("-t", "--threads", action="append", type=int, help="can be repeated (default: 1)")
    parser.add_argument("-p", "--n-prompt", action="append", type=int, help="prefill test, 0: none (default: 512)")
    parser.add_argument("-n", "--n-gen", type=int, default=32, help="steps of the decode test, 0: none")
    parser.add_argument("-d", "--depth", action="append", type=int, help="tokens before decode, 0: 8 (default: 0)")
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("--runtime", action="append", choices=NAMES, help="only this one (default: both)")
    parser.add_argument("--cold", action="store_true", help="measure the start of a process instead")
    parser.add_argument("--full-warmup", action="store_true", help="the round before the timed ones is a whole one")
    parser.add_argument("--vocab", type=int, default=200_000, help="prompts are random ids from 1,000 to here")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="CSV file (default: benchmarks/results/MACHINE.csv)")
    args = parser.parse_args()
    args.threads, args.n_prompt = args.threads or [1], [512] if args.n_prompt is None else args.n_prompt
    args.depth, args.runtime = args.depth or [0], args.runtime or list(NAMES)
    name = re.sub(r"[^a-z0-9]+", "-", machine().lower()).strip("-") + ("-cold" if args.cold else "")
    path = args.out or HERE / "results" / f"{name}.csv"
    results = Results(path, COLD_COLUMNS if args.cold else COLUMNS, own_isa())
    try:
        if args.cold:
            print_table(cold(args, results), "best (median), anonymous memory")
        else:
            print_table(measure(args, results), "tokens/s: best (median)")
    finally:
        results.close()


if __name__ == "__main__":
    main()
