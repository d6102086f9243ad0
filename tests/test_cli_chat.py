"""``qwen35rt chat``: the conversation, its commands, and Ctrl-C."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from qwen35rt import load
from qwen35rt.cli import chat, console, main

from .fixtures import write_script

ON = ["--device", "reference"]


@pytest.fixture
def script(tmp_path: Path) -> str:
    return str(write_script(tmp_path / "script.gguf", [b"one ", b"two ", b"three"]))


def feed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_chat_keeps_the_conversation(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, "hi\nand\\\nmore\n/regen\n/clear\nhi\n/hlep\n/exit\nnever\n")
    assert main(["chat", "-m", script, *ON, "-sys", "be brief"]) == 0
    out, err = capsys.readouterr()
    assert out == "one two three\n" * 4
    prompts = [int(line.split()[1]) for line in err.splitlines() if line.startswith("[prompt")]
    first, second, regen, cleared = [p + c for p, c in zip(prompts, _cached(err), strict=True)]
    assert first < second == regen
    assert cleared == first
    assert _cached(err)[2] > first  # the state before the answer was kept
    assert "did you mean '/help'?" in err


def _cached(err: str) -> list[int]:
    lines = [line for line in err.splitlines() if line.startswith("[prompt")]
    return [int(line.split("(")[1].split()[0]) if "more from cache" in line else 0 for line in lines]


def test_chat_commands_change_the_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = (
        "{% for m in messages %}<{{m.role}}>{{m.content}}{% endfor %}"
        "{% if enable_thinking is defined %}[{{enable_thinking}}]{% endif %}"
    )
    path = write_script(tmp_path / "s.gguf", [b"ok"], chat_template=template)
    with console.Progress() as progress, load(path, device="reference") as model:
        talk = chat.Chat(model, {}, progress, None, None)
        seen: list[str] = []
        whole = model.chat_stream

        def spy(messages: Any, **options: Any) -> Any:
            seen.append(model.render(messages, enable_thinking=options["enable_thinking"]))
            return whole(messages, **options)

        model.chat_stream = spy  # type: ignore[method-assign]
        for line in ("a", "/think on", "b", "/system sys", "c", "/regen", "/think", "/system", "d", ""):
            assert talk.handle(line)
        assert not talk.handle("/exit")
    assert seen == [
        "<user>a[None]",
        "<user>a<assistant>ok<user>b[True]",
        "<system>sys<user>c[True]",
        "<system>sys<user>c[True]",
        "<user>d[True]",
    ]


def test_chat_error_drops_the_message_and_goes_on(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, "hi\n" + "x" * 200 + "\nhi\n")
    assert main(["chat", "-m", script, *ON, "-c", "120"]) == 0
    out, err = capsys.readouterr()
    assert out == "one two three\n" * 2
    assert "the context holds 120" in err


def test_chat_answer_stopped_inside_reasoning_is_no_content(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<{{m.role}}>{{m.content}}{% endfor %}"
        "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
    )
    path = write_script(tmp_path / "s.gguf", [b"hm ", "</think>", b"ok"], chat_template=template)
    with console.Progress() as progress, load(path, device="reference") as model:
        cut = chat.Chat(model, {"max_tokens": 1}, progress, None, None)
        cut.handle("a")
        assert cut.messages[-1] == {"role": "assistant", "content": "", "reasoning_content": "hm "}
        whole = chat.Chat(model, {}, progress, None, None)
        whole.handle("a")
        assert whole.messages[-1] == {"role": "assistant", "content": "hm </think>ok"}


def test_a_terminal_of_the_c_locale_takes_every_letter(script: str) -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"LC_ALL": "C"}
    args = [sys.executable, "-m", "qwen35rt", "chat", "-m", script, *ON]
    written = b""
    with subprocess.Popen(args, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=environment) as process:
        os.close(theirs)
        with suppress(OSError):  # the end of a terminal
            for line in ("日本é\n", "\x04"):
                while not written.endswith(b"> "):
                    written += os.read(ours, 4096)
                os.write(ours, line.encode())
                written += os.read(ours, 1)
        assert process.wait(30) == 0
    os.close(ours)
    assert b"one two three" in written


def test_ctrl_c_stops_the_answer_not_the_chat(script: str) -> None:
    args = [sys.executable, "-m", "qwen35rt", "chat", "-m", script, *ON, "--ignore-eos"]
    with subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"hi\n")
        process.stdin.flush()
        assert os.read(process.stdout.fileno(), 3) == b"one"
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.stdin.write(b"/clear\n/exit\n")
        process.stdin.close()
        err = process.stderr.read().decode()
        assert process.wait(60) == 0
    assert "ended by cancelled" in err
    assert "the conversation is forgotten" in err
