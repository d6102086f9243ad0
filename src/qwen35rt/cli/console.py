"""What commands print besides their text: progress, status lines, timings. All of it goes to standard error."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..api import Model
    from ..backends.base import KvType
    from ..engine.result import Completion


def note(text: str) -> None:
    """A line about what is going on."""
    print(text, file=sys.stderr, flush=True)


def setup_logging(verbose: bool) -> None:
    """Warnings, or with ``verbose`` all log lines, as ``qwen35rt: ...`` on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("qwen35rt: %(levelname)s: %(message)s"))
    logger = logging.getLogger("qwen35rt")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.DEBUG if verbose else logging.WARNING)


class Progress:
    """``progress(stage, done, total)``: a bar on a terminal, else a line every few seconds; nothing if it is quick."""

    DELAY_S, TERMINAL_S, LOG_S = 0.5, 0.1, 5.0

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty()
        self.stage = ""
        self.began = self.shown = 0.0
        self.open = False

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self.stage:
            self.clear()
            self.stage, self.began, self.shown = stage, now, 0.0
        if self.shown:
            wait = self.TERMINAL_S if self.terminal else self.LOG_S
        else:
            wait = self.DELAY_S if self.terminal else self.LOG_S
        if now - (self.shown or self.began) < wait:
            return
        self.shown = now
        share = done / total if total else 0.0
        text = f"{stage}: {done}/{total} ({share:.0%})" if total else f"{stage} ..."
        if self.terminal:
            bar = "#" * round(24 * share)
            sys.stderr.write(f"\r\x1b[K{text} [{bar:<24}]" if total else f"\r\x1b[K{text}")
            sys.stderr.flush()
            self.open = True
        else:
            note(text)

    def clear(self) -> None:
        """Take the bar away, before other text is written."""
        if self.open:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        self.open, self.stage = False, ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.clear()


def model_path(args: argparse.Namespace) -> Path | None:
    """The file that -m or -hf names, downloaded if need be; None: the embedded model."""
    from ..errors import ConfigError

    if args.model and args.hf_repo:
        raise ConfigError("-m and -hf name two models; give one")
    if args.hf_file and not args.hf_repo:
        raise ConfigError("--hf-file needs -hf USER/REPO")
    if args.hf_repo:
        from .hub import fetch

        return fetch(args.hf_repo, args.hf_file)
    return Path(args.model) if args.model else None


def open_model(args: argparse.Namespace, progress: Progress, kv_dtype: KvType = "f16") -> Model:
    """Load the model that the flags name and say in one line what was loaded and where it runs."""
    from ..api import load

    setup_logging(args.verbose)
    path = model_path(args)
    if path is None:
        note("no model was named: using the embedded one, which knows this package only (-m FILE, -hf USER/REPO)")
    began = time.perf_counter()
    model = load(
        path,
        device=args.device,
        threads=args.threads,
        isa=args.isa,
        n_ctx=args.ctx_size,
        n_batch=args.batch_size,
        kv_dtype=kv_dtype,
        progress=progress,
        n_gpu_layers=args.n_gpu_layers,
    )
    progress.clear()
    note(
        f"{model.path.name}: {model.description}, context {model.n_ctx}, {model.device_description}, "
        f"loaded in {time.perf_counter() - began:.2f} s"
    )
    return model


def rate(value: float | None) -> str:
    """A speed, or a dash where the phase did not happen."""
    return "-" if value is None else f"{value:.2f} tokens/s"


def timing_line(c: Completion) -> str:
    """Counts, speeds and where the turn ran, on one line."""
    t = c.timings
    cached = f" ({t.cache_n} more from cache)" if t.cache_n else ""
    return (
        f"[prompt {t.prompt_n} tokens{cached}, {rate(t.prompt_per_second)} | "
        f"generated {t.predicted_n} tokens, {rate(t.predicted_per_second)} | "
        f"ended by {c.finish_reason} | on_gpu {str(c.on_gpu).lower()}]"
    )
