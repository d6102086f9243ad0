"""What the embedded model is trained and judged on: conversations drawn from facts and skills, as text and as tokens.

Owns the mixture and the disguises of questions; knows nothing of the model.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from qwen35rt.tokenizer.chat import ChatTemplate

from . import skills
from .fact import Fact, load_facts
from .sample import Sample
from .vocabulary import MARKERS

TEMPLATE = Path(__file__).with_name("template.jinja")
# Weight of each kind in training. Facts of unknown.toml stand for everything else, so they have a weight of their own.
# Saying a text back is short and teaches the copying that calls need.
MIXTURE = {
    "fact": 1.25,
    "unknown": 0.16,
    "sum": 0.12,
    "repeat": 0.36,
    "tool": 0.6,
    "tool_answer": 0.03,
    "no_fit": 0.2,
    "missing": 0.06,
    "no_tool": 0.05,
    "thought": 0.05,
}
WITH_TOOLS = ("tool", "tool_answer", "no_fit", "missing", "no_tool", "thought")
ASSISTANT = re.compile(r"(?<=<\|im_start\|>assistant\n)(.*?<\|im_end\|>)", re.DOTALL)
MARKER = re.compile("|".join(map(re.escape, MARKERS)))
SKILLS = {
    "sum": skills.sums,
    "repeat": skills.repeats,
    "tool": skills.tool_calls,
    "tool_answer": skills.tool_answers,
    "no_fit": skills.no_tool_fits,
    "missing": skills.missing_argument,
    "thought": skills.thoughts,
}
_SYSTEM = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are the embedded model of qwen35rt.",
    "Be polite and short.",
)


@dataclass(frozen=True)
class Example:
    """Token ids of a conversation. ``answers``: where the assistant speaks, as (first token, one behind the end)."""

    ids: list[int]
    answers: list[tuple[int, int]]


class Corpus:
    """Draws conversations. ``held_out``: phrasings, numbers and names that training never sees."""

    def __init__(self, facts: list[Fact] | None = None) -> None:
        self.facts = load_facts() if facts is None else facts
        self.known = [f for f in self.facts if not f.id.startswith("unknown")]
        self.unknown = [f for f in self.facts if f.id.startswith("unknown")]
        self.template = ChatTemplate(TEMPLATE.read_text(encoding="utf-8"))

    def draw(self, rng: random.Random, early: bool = False) -> Sample:
        """A conversation for training; ``early``: seldom one with tools, whose prompts are long."""
        kind = rng.choices(list(MIXTURE), list(MIXTURE.values()))[0]
        if early and kind in WITH_TOOLS and rng.random() < 0.8:
            kind = "fact"
        if kind in ("fact", "unknown"):
            known = self.known if kind == "fact" else self.unknown
            sample = self.fact_sample(rng.choices(known, [len(f.ask) for f in known])[0], rng)
        else:
            sample = self.skill_sample(kind, rng)
        return self._with_context(sample, rng)

    def skill_sample(self, kind: str, rng: random.Random, held_out: bool = False) -> Sample:
        """A conversation that shows one skill."""
        if kind == "no_tool":
            return skills.no_tool_needed(rng, held_out, partial(self._plain, held_out=held_out))
        return SKILLS[kind](rng, held_out)

    def fact_sample(
        self, fact: Fact, rng: random.Random, held_out: bool = False, thinking: bool | None = None
    ) -> Sample:
        """A question for a fact and its answer. ``thinking`` None: one in eight has a thought before the answer."""
        question = disguise(fact.question(rng, held_out), rng)
        answer: dict[str, Any] = {"role": "assistant", "content": rng.choice(fact.say)}
        if thinking is None:
            thinking = rng.random() < 0.125
        if thinking:
            answer["reasoning_content"] = skills.thought_for_fact(question, fact)
        messages = [{"role": "user", "content": question}, answer]
        return Sample("fact", messages, thinking=thinking, must=fact.must)

    def text(self, sample: Sample) -> tuple[str, str]:
        """-> the prompt as the template writes it, and what the model has to write."""
        prompt = self.template.render(sample.messages[:-1], sample.tools, enable_thinking=sample.thinking)
        whole = self.template.render(sample.messages, sample.tools, add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise ValueError(f"the template does not extend its prompt: {prompt!r} and {whole!r}")
        return prompt, whole[len(prompt) :].rstrip("\n")

    def example(self, sample: Sample, tokenizer: Tokenizer, most: int | None = None) -> Example:
        """Token ids; prompt and answer are tokenised apart, as when the model runs. ``most``: of the answer."""
        prompt, answer = self.text(sample)
        ids: list[int] = []
        answers: list[tuple[int, int]] = []
        for i, piece in enumerate(ASSISTANT.split(prompt)):  # every second piece is an earlier answer
            start = len(ids)
            ids += tokenizer.encode(piece, add_special_tokens=False).ids
            answers += [(start, len(ids))] * (i % 2)
        start = len(ids)
        ids += tokenizer.encode(answer, add_special_tokens=False).ids[:most]
        return Example(ids, [*answers, (start, len(ids))])

    def texts(self, count: int, seed: int) -> Iterator[str]:
        """Text for the tokenizer: training conversations as the template writes them, without its markers."""
        rng = random.Random(seed)
        for fact in self.facts:
            for _ in range(10):
                yield from fact.say
        for _ in range(count):
            yield from MARKER.split("".join(self.text(self.draw(rng))))

    def _plain(self, rng: random.Random, held_out: bool) -> Sample:
        return self.fact_sample(rng.choice(self.facts), rng, held_out, thinking=False)

    def _with_context(self, sample: Sample, rng: random.Random) -> Sample:
        """Some conversations have a system message or earlier turns, which the answer must not be led astray by."""
        messages = list(sample.messages)
        if sample.tools is None and rng.random() < 0.08:
            for _ in range(rng.choice((1, 1, 2))):
                at = 1 if messages[0]["role"] == "system" else 0
                messages[at:at] = self._plain(rng, held_out=False).messages
        if messages[0]["role"] != "system" and rng.random() < 0.1:
            messages.insert(0, {"role": "system", "content": rng.choice(_SYSTEM)})
        return replace(sample, messages=messages)


def disguise(question: str, rng: random.Random) -> str:
    """Write a question as people do: capital or not, with or without its mark, now and then with a slip."""
    if rng.random() < 0.5:
        question = question[:1].upper() + question[1:]
    elif rng.random() < 0.2:
        question = question.lower()
    if question.endswith("?") and rng.random() < 0.3:
        question = question[:-1]
    elif question[-1:].isalnum() and rng.random() < 0.3:
        question += rng.choice("?.?")
    if rng.random() < 0.06 and len(question) > 12:
        at = rng.randrange(4, len(question) - 2)
        if question[at : at + 2].isalpha():
            swapped = question[at + 1] + question[at]
            question = question[:at] + rng.choice((swapped, question[at])) + question[at + 2 :]
    if rng.random() < 0.05:
        question = rng.choice(("Please: ", "Hi, ", "Hello! ", "Quick question: ")) + question
    return question
