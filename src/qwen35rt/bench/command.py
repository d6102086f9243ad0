"""The benchmark command: llama-bench's flags, runs, and tables. The only module of bench that prints."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..cli.parser import Parser, add_layers_argument, filled, whole

if TYPE_CHECKING:
    from ..backends.base import Executable
    from ..device import Choice
    from ..model.source import Source
    from .measure import Case

FORMATS = ("md", "csv", "json", "jsonl")
_RANGE = re.compile(r"(\d+)-(\d+)(?:([+*])(\d+))?")


def numbers(low: int, high: int = 2**31 - 1) -> Callable[[str], list[int]]:
    """An argparse type: ``1,2,8``, ranges ``1-4`` (step 1), ``0-1024+256`` (steps added), ``1-64*2`` (multiplied)."""
    one = whole(low, high)

    def parse(text: str) -> list[int]:
        found: list[int] = []
        for item in text.split(","):
            span = _RANGE.fullmatch(item)
            if not span:
                found.append(int(one(item)))
                continue
            first, last, how, step = int(span[1]), int(span[2]), span[3] or "+", int(span[4] or 1)
            if step < 1 or (how == "*" and (step < 2 or first < 1)):
                raise argparse.ArgumentTypeError(f"'{item}' never reaches its end")
            while first <= last:
                found.append(int(one(str(first))))
                first = first + step if how == "+" else first * step
                if len(found) > 10_000:
                    raise argparse.ArgumentTypeError(f"'{item}' is more than 10000 values")
        return found

    return parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags; those of llama-bench where the meaning is the same."""
    parser.description = (
        "Measures prefill (pp) and decode (tg) speed. Flags with several values take lists (1,2), ranges (1-4, "
        "0-1024+256, 1-64*2) and can be repeated; every combination is run."
    )
    many: dict[str, Any] = {"action": "append", "metavar": "N"}
    parser.add_argument(
        "-m", "--model", action="append", type=filled, metavar="PATH", help="GGUF file; can be repeated"
    )
    parser.add_argument(
        "-hf", "--hf-repo", action="append", type=filled, metavar="USER/REPO[:QUANT]", help="model from Hugging Face"
    )
    parser.add_argument(
        "-p", "--n-prompt", type=numbers(0), help="tokens of a prefill test, 0: none (default: 512)", **many
    )
    parser.add_argument("-n", "--n-gen", type=numbers(0), help="steps of a decode test, 0: none (default: 128)", **many)
    parser.add_argument("-d", "--n-depth", type=numbers(0), help="tokens before the timed part (default: 0)", **many)
    parser.add_argument(
        "-t", "--threads", type=numbers(1, 1024), help="CPU threads (default: the cores that may be used)", **many
    )
    parser.add_argument(
        "-b", "--batch-size", type=numbers(1, 65536), help="tokens of one prefill step (default: 512)", **many
    )
    parser.add_argument(
        "-r", "--repetitions", type=whole(1, 10_000), default=5, metavar="N", help="timed runs of a test"
    )
    parser.add_argument("-o", "--output", choices=FORMATS, default="md", help="form of the table")
    parser.add_argument("--no-warmup", action="store_true", help="do not run each test once before it is timed")
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or reference (NumPy, slow)")
    add_layers_argument(parser)
    parser.add_argument("--isa", metavar="LEVEL", help="CPU instruction level (default: the best)")
    parser.add_argument(
        "--profile", action="store_true", help="also show the time of each kind of op, on standard error"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show log lines, and where an error came from")


def main(argv: Sequence[str]) -> int:
    """Run the command; -> exit code."""
    parser = Parser("qwen35rt bench", "")
    add_arguments(parser)
    args = parser.parse_args(argv)
    from ..cli.console import setup_logging
    from .table import Table

    setup_logging(args.verbose)
    prompts, generates = _values(args.n_prompt, 512), _values(args.n_gen, 128)
    if not any(prompts) and not any(generates):
        parser.error("-p 0 and -n 0 leave nothing to measure")
    table = Table(args.output, sys.stdout)
    for path in _models(args):
        for row in _model_rows(args, path, prompts, generates):
            table.add(row)
    table.close()
    return 0


def _values(lists: list[list[int]] | None, default: int) -> list[int]:
    return [v for found in lists for v in found] if lists else [default]


def _models(args: argparse.Namespace) -> Iterator[str | None]:
    if not args.model and not args.hf_repo:
        yield None
    yield from args.model or ()
    for spec in args.hf_repo or ():
        from ..cli.hub import fetch

        yield str(fetch(spec))


def _model_rows(
    args: argparse.Namespace, path: str | None, prompts: list[int], generates: list[int]
) -> Iterator[dict[str, Any]]:
    from ..cli.console import Progress
    from ..device import choose_device
    from ..model.source import open_source
    from .measure import Bench, Case

    with Progress() as progress:
        source = open_source(path, progress)
    threads: list[int | None] = list(_values(args.threads, 0)) if args.threads else [None]
    for n_threads in threads:
        choice = choose_device(args.device, n_threads, args.isa, args.n_gpu_layers).for_layers(source.n_layers)
        for batch in _values(args.batch_size, 512):
            cases = [
                Case(prompt, generate, depth, batch)
                for depth in _values(args.n_depth, 0)
                for prompt, generate in [*((p, 0) for p in prompts if p), *((0, g) for g in generates if g)]
            ]
            with _compiled(source, choice, cases, batch) as executable:
                probes = _probes(choice)
                bench = Bench(executable, source.program.n_vocab)
                for case in cases:
                    if args.profile:
                        executable.profile = True  # type: ignore[attr-defined]  # the reference has no use for it
                    result = bench.run(case, args.repetitions, not args.no_warmup)
                    if args.profile:
                        _print_profile(case.name, result.op_seconds)
                    yield _row(source, choice, probes, result)


@contextlib.contextmanager
def _compiled(source: Source, choice: Choice, cases: Sequence[Case], batch: int) -> Iterator[Executable]:
    from ..backends.base import Limits
    from ..config import ENGINE

    longest = max(c.depth + c.tokens for c in cases)
    pages = -(-longest // ENGINE.page_tokens)
    executable = choice.backend.compile(source.program, Limits(rows=batch, out_rows=1, slots=2, pages=pages))
    try:
        yield executable
    finally:
        executable.close()


def _probes(choice: Choice) -> tuple[float, float]:
    """(GB/s that all threads read, 10^9 int8 operations a second); zeros where nothing was measured."""
    if choice.isa is None:
        return 0.0, 0.0
    from .. import _native

    pool = _native.Pool(choice.threads)
    try:
        return _native.probe_bandwidth(pool, 256), _native.probe_int8(choice.isa, pool)
    finally:
        pool.close()


def _row(source: Source, choice: Choice, probes: tuple[float, float], result: Any) -> dict[str, Any]:
    from .. import __version__
    from ..machine import cpu_name
    from .measure import bandwidth_share, deviation, int8_share, mean

    case, rates = result.case, result.rates
    rate = mean(rates)
    ns = [1e9 * s for s in result.seconds]
    return {
        "version": __version__,
        "cpu_info": cpu_name(),
        "model_filename": str(source.path),
        "model_type": source.description,
        "model_size": source.tensor_bytes,
        "model_n_params": source.params,
        "backend": choice.backend.name,
        "device": choice.device_name,
        "n_gpu_layers": choice.gpu_layers,
        "isa": choice.isa,
        "n_batch": case.batch,
        "n_threads": choice.threads,
        "n_prompt": case.prompt,
        "n_gen": case.generate,
        "n_depth": case.depth,
        "test": case.name,
        "avg_ns": round(mean(ns)),
        "stddev_ns": round(deviation(ns)),
        "avg_ts": rate,
        "stddev_ts": deviation(rates),
        "on_gpu": result.on_gpu,
        "probe_gb_s": probes[0] or None,
        "probe_int8_gop_s": probes[1] or None,
        "bandwidth_share": bandwidth_share(source, case, rate, probes[0]),
        "int8_share": int8_share(source, case, rate, probes[1]),
        "samples_ns": [round(n) for n in ns],
        "samples_ts": rates,
    }


def _print_profile(name: str, op_seconds: dict[str, float]) -> None:
    total = sum(op_seconds.values())
    if not total:
        print(f"{name}: this backend reports no times of ops", file=sys.stderr)
        return
    print(f"{name}: time by kind of op", file=sys.stderr)
    for kind, spent in sorted(op_seconds.items(), key=lambda item: -item[1]):
        print(f"  {kind:<16} {1e3 * spent:10.2f} ms  {spent / total:6.1%}", file=sys.stderr)
