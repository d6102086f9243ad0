"""``qwen35rt quantize``: a model file in other formats."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from .parser import whole

if TYPE_CHECKING:
    from ..convert.quantize import QuantizePlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    from ..convert.mixes import ALIASES, MIXES

    listed = ", ".join(f"{mix.name} {mix.bits:g}" for mix in MIXES.values())
    aliases = ", ".join(f"{alias} is {name}" for alias, name in ALIASES.items())
    parser.epilog = (
        f"Types, with bits per weight of the 9B model (MXFP4_MOE: of the 35B-A3B): {listed}. {aliases}. Types of "
        "single tensors are formats, such as Q6_K or F16."
    )
    parser.add_argument("input", metavar="IN", help="GGUF file, any part of a split one, or a folder that holds one")
    parser.add_argument(
        "output", metavar="OUT", help="the file to be written; one that is there is replaced at the end"
    )
    parser.add_argument("type", metavar="TYPE", help="the mix, such as Q4_K_M; listed below")
    parser.add_argument(
        "--tensor-type",
        action="append",
        metavar="PATTERN=TYPE",
        help="format of the tensors in whose names the regular expression is found; the first that fits counts",
    )
    parser.add_argument("--output-tensor-type", metavar="TYPE", help="format of the output matrix")
    parser.add_argument("--token-embedding-type", metavar="TYPE", help="format of the token embedding")
    parser.add_argument("--imatrix", metavar="FILE", help="importance weights, as qwen35rt imatrix writes them")
    parser.add_argument("--pure", action="store_true", help="one format for all matrices that no other flag names")
    parser.add_argument("--allow-requantize", action="store_true", help="accept an input that is quantised already")
    parser.add_argument("--dry-run", action="store_true", help="show what would be done, and write nothing")
    parser.add_argument(
        "-t", "--threads", type=whole(1, 1024), metavar="N", help="CPU threads (default: the cores that may be used)"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show log lines, and where an error came from")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from ..convert.imatrix_file import read_imatrix
    from ..convert.mixes import MixOptions, find_format, find_mix, parse_tensor_type
    from ..convert.quantize import WRITABLE, make_plan, run_plan
    from ..convert.writer import refuse_output
    from ..model.gguf_file import open_gguf
    from .console import Progress, note, setup_logging

    setup_logging(args.verbose)
    began = time.perf_counter()
    mix = find_mix(args.type)
    options = MixOptions(
        tensor_types=[parse_tensor_type(text, WRITABLE) for text in args.tensor_type or ()],
        output=find_format(args.output_tensor_type, WRITABLE) if args.output_tensor_type else None,
        token_embedding=find_format(args.token_embedding_type, WRITABLE) if args.token_embedding_type else None,
        pure=args.pure,
        imatrix=args.imatrix is not None,
    )
    with open_gguf(args.input) as source:
        if not args.dry_run:
            refuse_output(Path(args.output), [*source.paths, *([args.imatrix] if args.imatrix else [])])
        imatrix = (args.imatrix, read_imatrix(args.imatrix)) if args.imatrix else None
        plan = make_plan(source, mix, options, imatrix, args.allow_requantize)
        for line in plan.notes:
            note(line)
        if args.dry_run:
            _print_steps(plan)
        else:
            with Progress() as progress:
                run_plan(plan, args.output, args.threads, progress)
        for line in _table(plan):
            note(line)
        bits = 8 * plan.nbytes / plan.weights
        end = "nothing was written" if args.dry_run else f"{time.perf_counter() - began:.1f} s"
        note(f"{mix.name}: {plan.nbytes / 2**20:.1f} MiB, {bits:.2f} bits per weight, {end}")
    return 0


def _print_steps(plan: QuantizePlan) -> None:
    for step in plan.steps:
        t = step.tensor
        shape = " x ".join(map(str, t.shape))
        print(f"{t.name:<40} {shape:<24} {t.format.name:<8} {step.format.name:<8} {step.nbytes} bytes")


def _table(plan: QuantizePlan) -> list[str]:
    """Tensors and bytes of each format, the largest share first."""
    tensors: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for step in plan.steps:
        tensors[step.format.name] += 1
        sizes[step.format.name] += step.nbytes
    rows = [f"{name:<8} {tensors[name]:>7} {size:>14}" for name, size in sizes.most_common()]
    return [f"{'type':<8} {'tensors':>7} {'bytes':>14}", *rows]
