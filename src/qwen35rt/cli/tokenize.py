"""``qwen35rt tokenize``: the tokens of a text, one a line, or their ids."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .parser import add_model_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("text", nargs="?", help="the text; without one it is read from standard input")
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the text, as a flag")
    parser.add_argument("-f", "--file", metavar="PATH", help="read the text from a file")
    parser.add_argument("--ids", action="store_true", help="only the ids, as a JSON list")
    parser.add_argument("--show-count", action="store_true", help="add a line with the number of tokens")
    parser.add_argument(
        "--special",
        action="store_true",
        help="text that spells a control token, such as <|im_end|>, becomes that token",
    )
    add_model_arguments(parser, engine=False)


def main(args: argparse.Namespace) -> int:
    """Run the command; weights are not loaded."""
    from ..errors import ConfigError
    from ..parts import open_tokenizer
    from .console import model_path, setup_logging

    setup_logging(args.verbose)
    given = [x for x in (args.text, args.prompt, args.file) if x is not None]
    if len(given) > 1:
        raise ConfigError("the text is given more than once; use one of TEXT, -p and -f")
    if args.file is not None:
        text = Path(args.file).read_text(encoding="utf-8")
    else:
        text = given[0] if given else sys.stdin.read()
    tokenizer = open_tokenizer(model_path(args))
    ids = tokenizer.encode(text, special=args.special)
    if args.ids:
        print(json.dumps(ids))
    else:
        for i in ids:
            print(f"{i:6d} -> {_spelled(tokenizer.token_bytes(i))}")
    if args.show_count:
        print(f"total: {len(ids)} tokens")
    return 0


def _spelled(token: bytes) -> str:
    """A token as Python writes it: as text, or as bytes where it is a part of a character."""
    try:
        return repr(token.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(token)
