"""Facts that the embedded model learns: one TOML file per area, questions as skeletons that expand to many phrasings.

Owns the syntax of the files in ``facts/``; knows nothing of tokens and training.
"""

from __future__ import annotations

import itertools
import random
import re
import tomllib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

FOLDER = Path(__file__).parent / "facts"
HELD_OUT_SHARE = 10  # one expansion in so many is never trained on
_SET = re.compile(r"<(\w+)>")
_CHOICE = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class Fact:
    """``ask``: skeletons; ``held_out``: questions that no skeleton makes; ``say``: answers; ``must``: what makes an
    answer right; ``others``: phrasings of its skeletons that belong to an earlier fact, by ``plain``."""

    id: str
    ask: tuple[str, ...]
    held_out: tuple[str, ...]
    say: tuple[str, ...]
    must: tuple[str, ...]
    others: frozenset[str] = frozenset()

    def is_held_out(self, text: str) -> bool:
        """Whether an expansion is kept out of training: fixed by its letters, so it survives changes of other facts.

        Never the first expansion of all, which is what most people ask.
        """
        text = plain(text)
        return zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0 and text != plain(next(expand(self.ask[0])))

    def question(self, rng: random.Random, held_out: bool = False) -> str:
        """A random phrasing of the skeletons: one that training sees, or one that it never sees.

        A fact whose skeletons have none that is held out gives one of its own held-out questions.
        """
        for _ in range(200):
            text = _fill(rng.choice(self.ask), rng)
            if self.is_held_out(text) == held_out and plain(text) not in self.others:
                return text
        if held_out:
            return rng.choice(self.held_out)
        raise ValueError(f"fact {self.id!r} has no phrasing of its own")


def load_facts(folder: Path = FOLDER) -> list[Fact]:
    """All facts, in the order of files and entries; a phrasing that two facts make belongs to the earlier one.

    Raises ValueError for a wrong entry, naming it.
    """
    facts = []
    for path in sorted(folder.glob("*.toml")):
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        facts += [_fact(entry, data.get("sets", {}), path.name) for entry in data["fact"]]
    twice = {f.id for f in facts if sum(g.id == f.id for g in facts) > 1}
    if twice:
        raise ValueError(f"facts named twice: {', '.join(sorted(twice))}")
    owner: dict[str, str] = {}
    for fact in facts:
        for text in {plain(text) for skeleton in fact.ask for text in expand(skeleton)}:
            owner.setdefault(text, fact.id)
    return [
        replace(f, others=frozenset(t for s in f.ask for e in expand(s) if owner[t := plain(e)] != f.id)) for f in facts
    ]


def expand(skeleton: str) -> Iterator[str]:
    """Every text of a skeleton whose sets are filled in."""
    parts = _CHOICE.split(skeleton)
    choices = [part.split("|") if i % 2 else [part] for i, part in enumerate(parts)]
    for combination in itertools.product(*choices):
        yield _tidy("".join(combination))


def plain(text: str) -> str:
    """A question without case and marks."""
    return re.sub(r"\W+", " ", text.lower()).strip()


def _fact(entry: Mapping[str, object], sets: Mapping[str, str], file: str) -> Fact:
    def texts(key: str) -> tuple[str, ...]:
        value = entry.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
            raise ValueError(f"{file}: fact {entry.get('id')!r}: '{key}' must be a list of texts")
        return tuple(value)

    unknown = set(entry) - {"id", "ask", "held_out", "say", "must"}
    if unknown or not isinstance(entry.get("id"), str):
        raise ValueError(f"{file}: fact {entry.get('id')!r}: unknown keys {sorted(unknown)}, or no id")
    fact = Fact(
        str(entry["id"]),
        tuple(_SET.sub(lambda m: "{" + sets[m[1]] + "}", text) for text in texts("ask")),
        texts("held_out"),
        texts("say"),
        texts("must"),
    )
    for say, must in itertools.product(fact.say, fact.must):
        if must.lower() not in say.lower():
            raise ValueError(f"{file}: fact {fact.id!r}: the answer lacks {must!r}: {say}")
    return fact


def _fill(skeleton: str, rng: random.Random) -> str:
    return _tidy(_CHOICE.sub(lambda m: rng.choice(m[1].split("|")), skeleton))


def _tidy(text: str) -> str:
    return re.sub(r"\s+([?.,!])", r"\1", " ".join(text.split()))
