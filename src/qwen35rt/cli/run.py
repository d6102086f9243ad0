"""``qwen35rt run``: one prompt, one answer on standard output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .parser import add_model_arguments, add_sampling_arguments, sampling_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.description = (
        "Answers a prompt. With a model that has a chat template the prompt is a user's message; --raw continues it as "
        "plain text instead. Without a prompt it is read from standard input."
    )
    parser.add_argument("prompt", nargs="?", help="the prompt")
    parser.add_argument("-p", "--prompt", dest="prompt_flag", metavar="TEXT", help="the prompt, as a flag")
    parser.add_argument("-f", "--file", metavar="PATH", help="read the prompt from a file")
    parser.add_argument("-sys", "--system-prompt", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--raw", "-no-cnv", "--no-conversation", action="store_true", help="continue the text; no chat template"
    )
    parser.add_argument("--think", choices=("on", "off"), help="ask for reasoning or not (default: the template's way)")
    parser.add_argument("--special", action="store_true", help="also write the control tokens of the answer")
    add_sampling_arguments(parser)
    add_model_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from ..errors import ConfigError
    from .console import Progress, note, open_model, timing_line

    prompt = _prompt(args)
    if args.raw and (args.system_prompt or args.think):
        raise ConfigError("--raw uses no chat template; -sys and --think have no place in it")
    with Progress() as progress, open_model(args, progress) as model:
        options: dict[str, Any] = {
            **sampling_options(args),
            "progress": progress,
            "skip_special_tokens": not args.special,
        }
        if args.raw or not model.has_chat_template:
            if not args.raw and args.system_prompt:
                raise ConfigError("this model has no chat template, so -sys cannot be used")
            stream = model.stream(prompt, **options)
        else:
            messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
            messages.append({"role": "user", "content": prompt})
            thinking = None if args.think is None else args.think == "on"
            stream = model.chat_stream(messages, enable_thinking=thinking, **options)
        for piece in stream:
            progress.clear()
            sys.stdout.write(piece)
            sys.stdout.flush()
        if sys.stdout.isatty():
            sys.stdout.write("\n")
        note(timing_line(stream.completion))
    return 0


def _prompt(args: argparse.Namespace) -> str:
    from ..errors import ConfigError

    given = [x for x in (args.prompt, args.prompt_flag, args.file) if x is not None]
    if len(given) > 1:
        raise ConfigError("the prompt is given more than once; use one of PROMPT, -p and -f")
    if args.file is not None:
        return Path(args.file).read_text(encoding="utf-8")
    return given[0] if given else sys.stdin.read()
