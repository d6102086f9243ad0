"""Judges the embedded model on questions that training never saw, and prints a table.

    python -m tools.embedded_model.evaluate model.gguf [--each N] [--show]

Facts: some phrasings of each that its skeletons make and training never drew, and apart from them ("in other words")
its questions that no skeleton makes; right if the answer holds what the fact says it must. Calls: right if the answer
is one call in the form of the template, with the name and the arguments (in any order) that were asked for. An answer
that runs into the limit has no end. Greedy; exit code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import qwen35rt

from .corpus import Corpus, disguise
from .fact import Fact
from .sample import Sample

PARAMETER = re.compile(r"(<parameter=.*?</parameter>\n)", re.DOTALL)
LIMIT = 240  # tokens: far above the longest answer
# Share of right answers that the shipped model must reach.
GOALS = {"fact": 0.90, "unknown": 0.90, "tool": 0.95, "sum": 0.90, "ended": 1.0}
SKILL_QUESTIONS = 60  # of a skill for each phrasing of a fact
SKILLS = ("sum", "repeat", "tool", "tool_answer", "no_fit", "missing", "no_tool", "thought")


@dataclass
class Score:
    """Right answers of each kind, and the wrong ones as (question, wanted, got)."""

    asked: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[str, str, str, str]] = field(default_factory=list)

    def add(self, kind: str, right: bool, question: str = "", wanted: str = "", got: str = "") -> None:
        """Count one answer."""
        self.asked[kind] += 1
        self.right[kind] += right
        if not right:
            self.wrong.append((kind, question, wanted, got))

    def share(self, kind: str) -> float:
        """Right answers of a kind, 0 to 1."""
        return self.right[kind] / self.asked[kind]


def questions(corpus: Corpus, each: int, seed: int) -> Iterator[tuple[str, Sample]]:
    """(kind, conversation): ``each`` held-out phrasings of a fact and its own questions; ``each`` x 60 of a skill."""
    rng = random.Random(seed)
    for fact in corpus.facts:
        kind = "unknown" if fact in corpus.unknown else "fact"
        asked = [(kind, q) for q in _phrasings(fact, each, rng)]
        for name, question in [*asked, *((f"{kind}, in other words", q) for q in fact.held_out)]:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": fact.say[0]}]
            yield name, Sample("fact", messages, must=fact.must)
    for skill in SKILLS:
        for _ in range(SKILL_QUESTIONS * each):
            yield skill, corpus.skill_sample(skill, rng, held_out=True)


def judge(model: qwen35rt.Model, corpus: Corpus, each: int, seed: int) -> Score:
    """Ask everything."""
    score = Score()
    for kind, sample in questions(corpus, each, seed):
        completion = model.chat(
            sample.messages[:-1],
            tools=sample.tools,
            enable_thinking=sample.thinking,
            temperature=0.0,
            repeat_penalty=1.0,
            presence_penalty=0.0,
            max_tokens=LIMIT,
        )
        answer = completion.text.split("</think>")[-1].strip()
        wanted = corpus.text(sample)[1].split("</think>")[-1].removesuffix("<|im_end|>").strip()
        question = str(sample.messages[-2]["content"])
        if sample.messages[-1].get("tool_calls"):
            right = same_call(answer, wanted)
        else:
            right = all(must.lower() in answer.lower() for must in sample.must)
        score.add(kind, right, question, wanted, answer)
        score.add("ended", completion.finish_reason == "stop", question, "an end", answer)
    return score


def same_call(answer: str, wanted: str) -> bool:
    """Whether two texts are a call with the same name and values; parameters may stand in any order."""
    return re.split(PARAMETER, answer)[::2] == re.split(PARAMETER, wanted)[::2] and sorted(
        re.findall(PARAMETER, answer)
    ) == sorted(re.findall(PARAMETER, wanted))


def _phrasings(fact: Fact, each: int, rng: random.Random) -> list[str]:
    drawn = dict.fromkeys(fact.question(rng, held_out=True) for _ in range(4 * each))
    return [disguise(q, rng) for q in drawn if q not in fact.held_out][:each]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--each", type=int, default=3, help="held-out phrasings of each fact (default: 3)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--show", action="store_true", help="print wrong answers")
    args = parser.parse_args()
    with qwen35rt.load(args.model) as model:
        score = judge(model, Corpus(), args.each, args.seed)
    if args.show:
        for kind, question, wanted, got in score.wrong:
            print(f"[{kind}] {question}\n    wanted: {wanted}\n    got:    {got}")
    print("| kind | asked | right | goal |\n|---|---|---|---|")
    for kind in score.asked:
        goal = f"{GOALS[kind]:.0%}" if kind in GOALS else ""
        print(f"| {kind} | {score.asked[kind]} | {score.share(kind):.1%} | {goal} |")
    return int(any(score.share(kind) < goal for kind, goal in GOALS.items()))


if __name__ == "__main__":
    sys.exit(main())
