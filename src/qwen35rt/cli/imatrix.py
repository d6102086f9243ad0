"""``qwen35rt imatrix``: an importance matrix of a model, measured on a text."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .parser import add_model_arguments, whole

if TYPE_CHECKING:
    from ..convert.imatrix_file import Imatrix


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.description = (
        "Runs a text through a model and writes how large the inputs of each matrix were, as a GGUF file that a "
        "quantiser can weigh errors with."
    )
    parser.add_argument("-f", "--file", required=True, metavar="PATH", help="the text, UTF-8; - is standard input")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the GGUF file to write")
    parser.add_argument("--chunks", type=whole(1), metavar="N", help="chunks at most (default: all)")
    parser.add_argument("--process-output", action="store_true", help="also measure the output matrix")
    add_model_arguments(parser, ctx_size="tokens of a chunk, 0: the model's context (default: 512)")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from ..config import EVALUATION
    from ..convert.imatrix import collect, step_limits
    from ..convert.imatrix_file import write_imatrix
    from ..convert.text import cut_text, read_text
    from ..convert.writer import refuse_output
    from ..device import choose_device
    from ..errors import ConfigError
    from ..model.source import open_source
    from ..tokenizer import build_tokenizer
    from .console import Progress, model_path, note, setup_logging

    setup_logging(args.verbose)
    output, path = Path(args.output), model_path(args)
    # Before the work, not after it.
    refuse_output(output, [args.file, *([path] if path else [])])
    text = read_text(args.file)
    choice = choose_device(args.device, args.threads, args.isa, args.n_gpu_layers)
    with Progress() as progress:
        source = open_source(path, progress)
        choice = choice.for_layers(source.n_layers)
        own = source.hparams.n_ctx_train
        n_ctx = {None: min(EVALUATION.n_ctx, own), 0: own}.get(args.ctx_size, args.ctx_size)
        if n_ctx > own:
            raise ConfigError(f"-c {n_ctx}: the model's context holds {own} tokens")
        ids = cut_text(build_tokenizer(source.file.metadata), text, n_ctx, args.chunks)
        limits = step_limits(source.program, n_ctx, args.batch_size, args.process_output)
        note(f"{source.path.name}: {source.description}, {limits.rows} tokens a step, {choice.description}")
        executable = choice.backend.compile(source.program, limits)
        began = time.perf_counter()
        try:
            found = collect(
                source.program,
                executable,
                ids,
                process_output=args.process_output,
                dataset=args.file,
                progress=progress,
            )
        finally:
            executable.close()
        seconds = time.perf_counter() - began
    write_imatrix(output, found)
    for line in _unseen(found):
        note(line)
    print(
        f"{output}: {len(found.entries)} matrices, {found.chunk_count} chunks of {n_ctx} tokens, "
        f"{ids.size / seconds:.1f} tokens/s, device {choice.backend.name}"
    )
    return 0


def _unseen(found: Imatrix) -> list[str]:
    """A line for each matrix of experts some of which no token has reached."""
    return [
        f"{name}: no token reached {int((e.counts == 0).sum())} of {len(e.counts)} experts; more text would"
        for name, e in found.entries.items()
        if (e.counts == 0).any()
    ]
