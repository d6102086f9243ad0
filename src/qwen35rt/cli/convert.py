"""``qwen35rt convert``: a Hugging Face checkpoint folder made into a GGUF file."""

from __future__ import annotations

import argparse
import re

from .parser import whole

_UNITS = {"M": 10**6, "G": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT_DIR", help="folder with config.json and safetensors files")
    parser.add_argument("-o", "--outfile", required=True, metavar="PATH", help="the GGUF file to write")
    parser.add_argument(
        "--outtype",
        choices=("f32", "f16", "bf16", "q8_0"),
        default="bf16",
        help="type of the matrices; norms and other small tensors are always f32",
    )
    parser.add_argument(
        "--split-max-size",
        type=split_size,
        metavar="N(M|G)",
        help="write PATH as parts with at most so many (10^6 or 10^9) bytes of tensors",
    )
    parser.add_argument(
        "--mmproj", metavar="PATH", help="write the vision tower here, in f16 or f32 (default: it is left out)"
    )
    parser.add_argument("--no-mtp", action="store_true", help="leave the block for multi-token prediction out")
    parser.add_argument("-v", "--verbose", action="store_true", help="show log lines, and where an error came from")


def split_size(text: str) -> int:
    """The bytes that ``500M`` or ``4G`` stand for."""
    found = re.fullmatch(r"(\d+)([MG])", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number with M or G, such as 4G")
    number = whole(1, 10**6)(found[1])
    return int(number) * _UNITS[found[2]]


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from ..convert.hf import convert
    from .console import Progress, note, setup_logging

    setup_logging(args.verbose)
    with Progress() as progress:
        paths = convert(
            args.checkpoint,
            args.outfile,
            outtype=args.outtype,
            split_max_bytes=args.split_max_size,
            mmproj=args.mmproj,
            mtp=not args.no_mtp,
            progress=progress,
        )
    for path in paths:
        note(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")
    return 0
