"""Ids of a chat prompt and the positions that later prompts share (B01, C29)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from qwen35rt.config import ENGINE
from qwen35rt.tokenizer import ChatTemplate, Tokenizer, build_tokenizer, read_chat_template

from ..fixtures import TinySpec, tiny_metadata
from ..tiny_vocab import CHATML, tiny_vocab

LONG = "You answer in few words and never in verse, whatever the weather is."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer(tiny_metadata(TinySpec(), tiny_vocab(320), CHATML))


@pytest.fixture(scope="module")
def real(oracle: Path) -> tuple[ChatTemplate, Tokenizer]:
    """A template that writes reasoning and refuses conversations without a user."""
    from qwen35rt.model.gguf_file import open_gguf

    with open_gguf(oracle / "models" / "nano.f32.gguf") as file:
        tokenizer = build_tokenizer(file.metadata)
        template = read_chat_template(file.metadata, tokenizer.vocab)
    assert template is not None
    return template, tokenizer


def talk(turns: int, system: str | None = LONG, seed: int = 1) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for i in range(turns):
        words = " ".join(rng.choices(["hello", "the", "rain", "<|im_end|>", "é😀", "<think>"], k=rng.randint(1, 9)))
        messages.append({"role": "user", "content": f"{i} {words}"})
        messages.append({"role": "assistant", "content": f"answer {i} {words}"})
    return messages[:-1]


@pytest.mark.parametrize("system", [LONG, None])
def test_positions_are_the_ends_of_messages_and_of_the_system_prompt(tokenizer: Tokenizer, system: str | None) -> None:
    template = ChatTemplate(CHATML)
    messages = talk(4, system)
    ids, positions = template.chat_prompt(tokenizer, messages)
    assert ids == template.render_ids(tokenizer, messages)
    wanted = set()
    for n in [*range(len(messages), len(messages) - ENGINE.keep_messages, -1), *([1] if system else [])]:
        before = template.render_ids(tokenizer, messages[:n], add_generation_prompt=False)
        assert ids[: len(before)] == before
        wanted.add(len(before))
    assert positions == sorted(wanted)


def test_the_head_of_another_conversation_is_shared(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(CHATML)
    first, positions = template.chat_prompt(tokenizer, talk(9, seed=1))
    other, _ = template.chat_prompt(tokenizer, talk(2, seed=2))
    at = positions[0]
    assert first[:at] == other[:at]
    assert at >= ENGINE.keep_least
    assert len(positions) == ENGINE.keep_messages + 1


@pytest.mark.parametrize("template", ["{% for m in messages %}<{{m.role}}>{{m.content}}{% endfor %}!", "fixed", ""])
def test_templates_without_control_tokens(tokenizer: Tokenizer, template: str) -> None:
    made = ChatTemplate(template)
    messages = talk(2)
    ids, positions = made.chat_prompt(tokenizer, messages)
    assert ids == made.render_ids(tokenizer, messages)
    assert positions == sorted(set(positions))
    assert all(0 < at <= len(ids) for at in positions)


@pytest.mark.parametrize("thinking", [True, False])
def test_b01_real_template(real: tuple[ChatTemplate, Tokenizer], thinking: bool) -> None:
    """The next turn shares all but the last message with what was kept, also where reasoning is left out of it."""
    template, tokenizer = real
    tools = [{"type": "function", "function": {"name": "f", "description": LONG, "parameters": {"type": "object"}}}]
    for given in (None, tools):
        for n in range(1, 5):
            now, later = talk(n), talk(n + 1)
            ids, positions = template.chat_prompt(tokenizer, now, given, enable_thinking=thinking)
            assert ids == template.render_ids(tokenizer, now, given, enable_thinking=thinking)
            following = template.render_ids(tokenizer, later, given, enable_thinking=thinking)
            before = template.render_ids(tokenizer, now, given, add_generation_prompt=False, enable_thinking=thinking)
            assert positions[-1] == len(before)
            assert following[: len(before)] == before
            head = positions[0]
            other = template.render_ids(tokenizer, talk(1, seed=5), given, enable_thinking=thinking)
            assert other[:head] == ids[:head]
            assert head >= ENGINE.keep_least


def test_the_work_is_bounded_however_long_the_conversation(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate(CHATML)
    encoded: list[int] = []
    inner = type(tokenizer).encode

    def counted(self: Tokenizer, text: str, special: bool = False) -> list[int]:
        encoded.append(len(text))
        return inner(self, text, special)

    monkeypatch.setattr(type(tokenizer), "encode", counted)
    template.chat_prompt(tokenizer, talk(150))
    assert sum(encoded) < 1.3 * len(template.render(talk(150)))
