"""The command line: finds the command, runs it, turns errors into one line and an exit code.

Only this package and bench print. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence

from .parser import Parser, nearest

COMMANDS: dict[str, str] = {
    "run": "answer a prompt, or continue a text with --raw",
    "chat": "talk with a model in the terminal",
    "serve": "serve a model over HTTP, as OpenAI's API",
    "info": "show a model file's metadata and tensors",
    "tokenize": "show the tokens of a text",
    "convert": "make a GGUF file from a Hugging Face checkpoint",
    "quantize": "make a model file smaller: other formats for its matrices",
    "bench": "measure speed, with the flags of llama-bench",
    "perplexity": "judge a model by the text that it predicts, or compare it with another",
    "imatrix": "measure what the inputs of a model's matrices are like, for quantising",
    "doctor": "show what this machine offers and what works",
}
EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def help_text() -> str:
    """The text of ``qwen35rt --help``."""
    lines = [
        "usage: qwen35rt COMMAND [flags]",
        "",
        "Runs Qwen3.5-family GGUF models on CPUs and NVIDIA GPUs.",
        "",
        "commands:",
        *(f"  {name:<10} {text}" for name, text in COMMANDS.items()),
        "",
        "flags:",
        "  -h, --help    this text; 'qwen35rt COMMAND --help' lists the flags of a command",
        "  --version     the version",
        "",
        "Text goes to standard output, everything else to standard error.",
        "Without -m or -hf the small model that comes with the package is used.",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; -> exit code: 0, 1 (failed), 2 (wrong usage), 130 (interrupted)."""
    args = list(sys.argv[1:] if argv is None else argv)
    _open_streams()
    try:
        code = _command(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has gone, as in "| head". Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except SystemExit as e:  # argparse: --help, or an error that it has printed
        return e.code if isinstance(e.code, int) else EXIT_USAGE
    except Exception as e:
        return _failed(e, verbose="-v" in args or "--verbose" in args)


def _open_streams() -> None:
    """Standard streams that the caller has closed (``>&-``), for which Python has None, are those of /dev/null: else
    files that are opened later would get their numbers, and lines for standard error would go to standard output."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # open until the end
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a Latin-1 terminal is no reason to break an answer off


def _command(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if args[0] == "--version":
        from .. import __version__

        print(f"qwen35rt {__version__}")
        return 0
    name = args[0]
    if name not in COMMANDS:
        what = "flag" if name.startswith("-") else "command"
        print(
            f"qwen35rt: error: unknown {what} '{name}'{nearest(name, COMMANDS)}; see qwen35rt --help", file=sys.stderr
        )
        return EXIT_USAGE
    if name == "bench":
        from ..bench.command import main as bench

        return bench(args[1:])
    module = importlib.import_module(f".{name}", __name__)
    parser = Parser(prog=f"qwen35rt {name}", description=COMMANDS[name][0].upper() + COMMANDS[name][1:] + ".")
    module.add_arguments(parser)
    return int(module.main(parser.parse_args(args[1:])))


def _failed(error: Exception, verbose: bool) -> int:
    """One line on standard error; the traceback only with --verbose."""
    from ..errors import Qwen35Error

    if verbose:
        import traceback

        traceback.print_exception(error)
    if isinstance(error, Qwen35Error):
        text = str(error)
    elif isinstance(error, (OSError, UnicodeDecodeError, MemoryError)):
        text = str(error) or type(error).__name__
    else:
        text = f"internal error, {type(error).__name__}: {error} (--verbose shows where)"
    print("qwen35rt: error: " + " ".join(text.split()), file=sys.stderr)
    return EXIT_ERROR
