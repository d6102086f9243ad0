"""``qwen35rt chat``: a conversation in the terminal. Ctrl-C stops an answer, not the program."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from .parser import add_model_arguments, add_sampling_arguments, nearest, sampling_options

if TYPE_CHECKING:
    from ..api import Model
    from .console import Progress

COMMANDS = {
    "/help": "this list",
    "/clear": "forget the conversation, keep the system message",
    "/system TEXT": "set the system message (without TEXT: none) and forget the conversation",
    "/think on|off": "ask for reasoning or not, from the next answer on",
    "/regen": "answer the last message once more",
    "/exit": "leave (also Ctrl-D)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    lines = "; ".join(f"{name}: {text}" for name, text in COMMANDS.items())
    parser.description = f"Talk with a model. {lines}. A line that ends with a backslash goes on in the next one."
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the first message")
    parser.add_argument("-sys", "--system-prompt", metavar="TEXT", help="the system message")
    parser.add_argument("--think", choices=("on", "off"), help="ask for reasoning or not (default: the template's way)")
    add_sampling_arguments(parser)
    add_model_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from ..errors import ConfigError
    from .console import Progress, note, open_model

    with Progress() as progress, open_model(args, progress) as model:
        if not model.has_chat_template:
            raise ConfigError("this model has no chat template; use 'qwen35rt run --raw'")
        options = sampling_options(args)
        # An answer may take what the context has left: in a conversation nobody wants it cut at a default.
        options.setdefault("max_tokens", -1)
        thinking = None if args.think is None else args.think == "on"
        chat = Chat(model, options, progress, args.system_prompt, thinking)
        note("type a message, /help for commands, Ctrl-D to leave")
        if args.prompt:
            chat.handle(args.prompt)
        for line in _lines():
            if not chat.handle(line):
                break
    return 0


class Chat:
    """The conversation so far and what the commands change."""

    def __init__(
        self, model: Model, options: dict[str, Any], progress: Progress, system: str | None, thinking: bool | None
    ) -> None:
        self.model, self.options, self.progress = model, options, progress
        self.system, self.thinking = system, thinking
        self.messages: list[dict[str, Any]] = []

    def handle(self, line: str) -> bool:
        """Obey a command or answer a message; -> False to leave."""
        from .console import note

        text = line.strip()
        if not text:
            return True
        if not text.startswith("/"):
            self.messages.append({"role": "user", "content": text})
            self._answer()
            return True
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        if name in ("/exit", "/quit", "/bye"):
            return False
        if name == "/help":
            for command, what in COMMANDS.items():
                note(f"  {command:<14} {what}")
        elif name == "/clear":
            self.messages.clear()
            note("the conversation is forgotten")
        elif name == "/system":
            self.system = rest or None
            self.messages.clear()
            note("system message set, conversation forgotten" if rest else "no system message, conversation forgotten")
        elif name == "/think" and rest in ("on", "off"):
            self.thinking = rest == "on"
            note(f"reasoning {rest}")
        elif name == "/think":
            note("write /think on or /think off")
        elif name == "/regen":
            self._again()
        else:
            known = [c.split()[0] for c in COMMANDS]
            note(f"unknown command '{name}'{nearest(name, known)}; /help lists them")
        return True

    def _again(self) -> None:
        from .console import note

        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if self.messages:
            self._answer()
        else:
            note("there is no message to answer yet")

    def _answer(self) -> None:
        from ..errors import Qwen35Error
        from .console import note, timing_line

        head = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*head, *self.messages]
        try:
            with _interruptible() as interrupted:
                stream = self.model.chat_stream(
                    messages,
                    enable_thinking=self.thinking,
                    progress=self.progress,
                    cancelled=lambda: bool(interrupted),
                    **self.options,
                )
                for piece in stream:
                    self.progress.clear()
                    sys.stdout.write(piece)
                    sys.stdout.flush()
        except Qwen35Error as e:
            self.progress.clear()
            self.messages.pop()
            note(f"qwen35rt: error: {e} (the message was dropped)")
            return
        self.progress.clear()
        sys.stdout.write("\n")
        sys.stdout.flush()
        self.messages.append(self._message(messages, stream.completion.text))
        note(timing_line(stream.completion))

    def _message(self, messages: list[dict[str, Any]], text: str) -> dict[str, Any]:
        """The answer as a message; one that was stopped while it reasoned has no content yet."""
        given: dict[str, Any] = {} if self.thinking is None else {"enable_thinking": self.thinking}
        if "</think>" not in text and self.model.render(messages, **given).rstrip().endswith("<think>"):
            return {"role": "assistant", "content": "", "reasoning_content": text}
        return {"role": "assistant", "content": text}


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """While open, the first Ctrl-C is noted in the list; a second one interrupts the program."""
    seen: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _lines() -> Iterator[str]:
    """Messages from standard input; on a terminal with a prompt and line editing."""
    from .console import note

    terminal = sys.stdin.isatty()
    if terminal:
        with suppress(ImportError):
            import readline  # gives input() its line editing and history

            # In the C locale it would take the bytes of other letters for commands, and drop them.
            readline.parse_and_bind("set input-meta on")
            readline.parse_and_bind("set convert-meta off")
            readline.parse_and_bind("set output-meta on")
    parts: list[str] = []
    while True:
        try:
            line = _line("... " if parts else "> ", terminal)
        except KeyboardInterrupt:
            parts.clear()
            note("\n(/exit or Ctrl-D leaves)")
            continue
        if line is None:
            if parts:
                yield "\n".join(parts)
            return
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        yield "\n".join([*parts, line])
        parts.clear()


def _line(prompt: str, terminal: bool) -> str | None:
    if terminal and sys.stdout.isatty():
        try:
            return input(prompt)
        except EOFError:
            return None
    if terminal:  # standard output is a file or a pipe: it gets the answers only
        sys.stderr.write(prompt)
        sys.stderr.flush()
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None
