"""``qwen35rt perplexity``: how well a model predicts a text, alone or against a base that another model wrote."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .parser import add_model_arguments, whole

if TYPE_CHECKING:
    from ..convert.kl import Divergence
    from ..convert.kl_file import BaseFile
    from ..convert.perplexity import Mean, Perplexity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.description = (
        "Cuts a text into chunks and reports the perplexity of the second half of each. --kl-base FILE also writes the "
        "predictions to a file; --kl-base FILE --kl-divergence compares the model with such a file."
    )
    parser.add_argument("-f", "--file", metavar="PATH", help="the text, UTF-8; - is standard input")
    parser.add_argument("--chunks", type=whole(1), metavar="N", help="chunks at most (default: all)")
    parser.add_argument("--kl-base", metavar="FILE", help="base of a KL divergence, to write or to compare with")
    parser.add_argument("--kl-divergence", action="store_true", help="compare with --kl-base; -f can be left out")
    parser.add_argument(
        "--kv-dtype", choices=("f16", "f32"), default="f16", help="how keys and values are kept in the model's context"
    )
    parser.add_argument("--json", action="store_true", help="write the result as JSON")
    add_model_arguments(parser, ctx_size="tokens of a chunk, 0: the model's context (default: 512, or the base's)")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from ..config import EVALUATION
    from ..convert.kl import compare, write_base
    from ..convert.kl_file import BaseFile
    from ..convert.perplexity import perplexity
    from ..convert.text import read_text
    from ..errors import ConfigError
    from .console import Progress, open_model

    if args.kl_divergence and not args.kl_base:
        raise ConfigError("--kl-divergence needs --kl-base FILE, the base to compare with")
    if args.file is None and not args.kl_divergence:
        raise ConfigError("no text was named; give -f FILE, or -f - for standard input")
    text = None if args.file is None else read_text(args.file)
    base = BaseFile(Path(args.kl_base)) if args.kl_divergence else None
    if args.ctx_size is None:
        args.ctx_size = base.n_ctx if base else EVALUATION.n_ctx
    elif base and args.ctx_size != base.n_ctx:
        raise ConfigError(f"-c {args.ctx_size}: the base {base.path} has chunks of {base.n_ctx} tokens; leave -c out")
    with Progress() as progress, Estimate() as estimate, open_model(args, progress, args.kv_dtype) as model:
        result: Perplexity | Divergence
        if base is not None:
            result = compare(model, base, text, args.chunks, estimate)
        elif args.kl_base:
            result = write_base(model, text or "", Path(args.kl_base), model.n_ctx, args.chunks, estimate)
        else:
            result = perplexity(model, text or "", model.n_ctx, args.chunks, estimate)
    if args.json:
        print(json.dumps(_plain(result), indent=2))
    else:
        print(_ppl_line(result) if base is None else "\n".join(_table(result, base)))
    return 0


class Estimate:
    """The running estimate on a terminal, rewritten after each chunk; nothing where standard error is none."""

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty()
        self.began = time.monotonic()
        self.open = False

    def __call__(self, found: Perplexity, chunks: int) -> None:
        if not self.terminal:
            return
        left = found.seconds / found.chunks * (chunks - found.chunks)
        sys.stderr.write(
            f"\r\x1b[Kchunk {found.chunks}/{chunks}: PPL {found.value:.4f} ± {found.error:.4f}, "
            f"{found.tokens_per_second:.1f} tokens/s, {duration(left)} left"
        )
        sys.stderr.flush()
        self.open = True

    def __enter__(self) -> Estimate:
        return self

    def __exit__(self, *error: object) -> None:
        if self.open:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def duration(seconds: float) -> str:
    """``1h02m``, ``3m05s`` or ``7s``."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _plain(result: Perplexity | Divergence) -> dict[str, Any]:
    return dataclasses.asdict(result)


def _ppl_line(p: Any) -> str:
    return (
        f"PPL = {p.value:.4f} ± {p.error:.4f}  ({p.chunks} chunks of {p.n_ctx} tokens, {p.scored} scored, "
        f"{p.tokens_per_second:.1f} tokens/s, device {p.device})"
    )


def _table(d: Any, base: BaseFile) -> list[str]:
    """The figures of a comparison, in the order and under the names that llama.cpp's tool uses."""

    def row(name: str, mean: Mean, factor: float = 1.0, unit: str = "") -> str:
        return f"{name:<31}: {factor * mean.value:11.6f} ± {factor * mean.error:10.6f}{unit}"

    def value(name: str, number: float, factor: float = 1.0, unit: str = "") -> str:
        return f"{name:<31}: {factor * number:11.6f}{unit}"

    def shares(name: str, found: dict[float, float], factor: float = 1.0, unit: str = "") -> list[str]:
        return [
            value(f"{'Median' if share == 0.5 else f'{100 * share:.1f}%':<7} {name}", number, factor, unit)
            for share, number in found.items()
        ]

    correlation = "-" if d.correlation is None else f"{100 * d.correlation:.2f}%"
    percent: tuple[float, str] = (100.0, " %")
    return [
        f"base {base.path}: {d.ppl.chunks} of {base.chunks} chunks of {base.n_ctx} tokens, {d.ppl.scored} scored, "
        f"{d.ppl.tokens_per_second:.1f} tokens/s, device {d.ppl.device}",
        "",
        "====== Perplexity statistics ======",
        f"{'Mean PPL(Q)':<31}: {d.ppl.value:11.6f} ± {d.ppl.error:10.6f}",
        row("Mean PPL(base)", d.ppl_base),
        f"{'Cor(ln(PPL(Q)), ln(PPL(base)))':<31}: {correlation:>11}",
        row("Mean ln(PPL(Q)/PPL(base))", d.ln_ratio),
        row("Mean PPL(Q)/PPL(base)", d.ratio),
        row("Mean PPL(Q)-PPL(base)", d.difference),
        "",
        "====== KL divergence statistics ======",
        row("Mean    KLD", d.kld),
        value("Maximum KLD", d.kld_max),
        *shares("KLD", d.kld_quantiles),
        value("Minimum KLD", d.kld_min),
        "",
        "====== Token probability statistics ======",
        row("Mean    Δp", d.delta_p, *percent),
        value("Maximum Δp", d.delta_p_max, *percent),
        *shares("Δp", d.delta_p_quantiles, *percent),
        value("Minimum Δp", d.delta_p_min, *percent),
        row("RMS Δp", d.delta_p_rms, *percent),
        row("Same top p", d.same_top, *percent),
    ]
