"""Flags that several commands share, and a parser whose errors name the nearest flag. Imports nothing heavy."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn


def nearest(word: str, known: Iterable[str]) -> str:
    """', did you mean ...?' if a known word is close, else an empty text."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.55)
    return f", did you mean '{close[0]}'?" if close else ""


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors; flags cannot be abbreviated, so that new flags never change old scripts."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, formatter_class=_Formatter)

    # Typed as the namespace that every caller uses.
    def parse_args(self, args: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        """Parse, or print one line and raise SystemExit(2)."""
        found, rest = self.parse_known_args(list(args))
        wrong = next((a for a in rest if a.startswith("-")), rest[0] if rest else None)
        if wrong is not None and wrong.startswith("-"):
            flag = wrong.split("=")[0]
            self.error(f"unknown flag '{flag}'{nearest(flag, self._option_string_actions)}")
        if wrong is not None:
            self.error(f"'{wrong}' was not expected; quote a text that holds spaces")
        return found

    def error(self, message: str) -> NoReturn:
        """One line on standard error, exit code 2."""
        print(f"qwen35rt: error: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


class _Formatter(argparse.HelpFormatter):
    """Adds defaults to help lines that do not state one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help
        if text and action.default not in (None, False, argparse.SUPPRESS, ()) and "default" not in text:
            text += " (default: %(default)s)"
        return text


def whole(low: int, high: int = 2**31 - 1) -> _Number:
    """An argparse type: a whole number in a range."""
    return _Number(int, low, high)


def real(low: float, high: float) -> _Number:
    """An argparse type: a number in a range; NaN is in none."""
    return _Number(float, low, high)


def layers(text: str) -> int | str:
    """An argparse type: a number of layers for the GPU."""
    return "all" if text == "all" else int(whole(-1)(text))


def filled(text: str) -> str:
    """An argparse type: a text that is not empty, as that of an unset variable in a script is."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; name a model, or leave it out")
    return text


class _Number:
    def __init__(self, kind: type[int] | type[float], low: float, high: float) -> None:
        self.kind, self.low, self.high = kind, low, high

    def __call__(self, text: str) -> int | float:
        what = "a whole number" if self.kind is int else "a number"
        try:
            value = self.kind(text)
        except ValueError:
            value = None
        if value is None or not self.low <= value <= self.high:
            raise argparse.ArgumentTypeError(f"'{text}' is not {what} from {self.low} to {self.high}")
        return value


def add_model_arguments(parser: argparse.ArgumentParser, engine: bool = True, ctx_size: str | None = None) -> None:
    """-m and -hf; with ``engine`` also what load() takes. ``ctx_size``: the help of -c where it means more."""
    g = parser.add_argument_group("model")
    g.add_argument(
        "-m",
        "--model",
        type=filled,
        metavar="PATH",
        help="GGUF file, any part of a split one, or a folder that holds one",
    )
    g.add_argument(
        "-hf",
        "--hf-repo",
        type=filled,
        metavar="USER/REPO[:QUANT]",
        help="download from Hugging Face, or use the copy from before; QUANT defaults to Q4_K_M, then Q8_0",
    )
    g.add_argument("--hf-file", metavar="NAME", help="the file of the repository, in place of QUANT")
    parser.add_argument("-v", "--verbose", action="store_true", help="show log lines, and where an error came from")
    if not engine:
        return
    g.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, cuda or reference (NumPy, slow)")
    add_layers_argument(g)
    g.add_argument(
        "-t", "--threads", type=whole(1, 1024), metavar="N", help="CPU threads (default: the cores that may be used)"
    )
    g.add_argument("--isa", metavar="LEVEL", help="CPU instruction level; doctor lists them (default: the best)")
    g.add_argument(
        "-c",
        "--ctx-size",
        type=whole(0),
        metavar="N",
        help=ctx_size or "context in tokens, 0: the model's own (default: 4096)",
    )
    g.add_argument(
        "-b", "--batch-size", type=whole(1, 65536), metavar="N", help="tokens of one prefill step (default: 512)"
    )


def add_layers_argument(group: argparse._ActionsContainer) -> None:
    """-ngl."""
    group.add_argument(
        "-ngl",
        "--n-gpu-layers",
        "--gpu-layers",
        type=layers,
        metavar="N",
        help="first layers on the GPU, the rest on the CPU; 0: none, -1 or all: all (default: all, if a GPU works)",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """The sampling flags of llama.cpp. Absent ones take the model file's value, else the default."""
    g = parser.add_argument_group("sampling (default: the model file's value, else the one named)")
    g.add_argument(
        "-n",
        "--predict",
        "--n-predict",
        type=whole(-1),
        metavar="N",
        help="tokens to generate at most, -1: to the end of the context",
    )
    g.add_argument(
        "-s", "--seed", type=whole(-1, 2**63 - 1), metavar="N", help="random seed, -1: a fresh one (default: -1)"
    )
    g.add_argument("--temp", "--temperature", type=real(0, 2), metavar="X", help="0 is greedy (default: 0.7)")
    g.add_argument("--top-k", type=whole(-1), metavar="N", help="0 or -1: off (default: 40)")
    g.add_argument("--top-p", type=real(0, 1), metavar="X", help="1: off (default: 1)")
    g.add_argument("--min-p", type=real(0, 1), metavar="X", help="0: off (default: 0)")
    g.add_argument("--repeat-penalty", type=real(1e-6, 10), metavar="X", help="1: off (default: 1)")
    g.add_argument(
        "--repeat-last-n", type=whole(-1), metavar="N", help="tokens that it looks at, -1: all (default: 64)"
    )
    g.add_argument("--presence-penalty", type=real(-2, 2), metavar="X", help="default: 0")
    g.add_argument("--frequency-penalty", type=real(-2, 2), metavar="X", help="default: 0")
    g.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; can be given 16 times")
    g.add_argument("--ignore-eos", action="store_true", help="never end before the limit")


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of Model.stream and Model.chat; absent flags are left out."""
    named = {
        "max_tokens": args.predict,
        "seed": args.seed,
        "temperature": args.temp,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "repeat_penalty": args.repeat_penalty,
        "repeat_last_n": args.repeat_last_n,
        "presence_penalty": args.presence_penalty,
        "frequency_penalty": args.frequency_penalty,
        "stop": args.stop,
        "ignore_eos": args.ignore_eos or None,
    }
    return {name: value for name, value in named.items() if value is not None}
