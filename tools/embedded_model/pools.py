"""Random values for questions to tools: a text as a user writes it and the argument it stands for.

A few are made up, so that a model learns to copy what it has never seen.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE = tomllib.loads((Path(__file__).parent / "pools.toml").read_text(encoding="utf-8"))
LISTS: dict[str, list[str]] = {
    name: [w for w in text.replace("\n", "").split("|") if w] for name, text in _FILE["lists"].items()
}
UNITS: list[list[str]] = [line.split("|") for line in _FILE["units"].values()]

MADE_UP_SHARE = 0.05
SCHEMAS: dict[str, dict[str, Any]] = {
    "minutes": {"type": "integer"},
    "sides": {"type": "integer"},
    "count": {"type": "integer"},
    "number": {"type": "integer"},
    "amount": {"type": "number"},
    "switch": {"type": "boolean"},
    "state": {"type": "string", "enum": ["on", "off"]},
    "scale": {"type": "string", "enum": ["celsius", "fahrenheit"]},
}
_OPERATORS = {"+": ("plus", "+"), "-": ("minus", "-"), "*": ("times", "x"), "/": ("divided by", "/")}
_MONEY = {"USD": "dollars", "EUR": "euros", "GBP": "pounds", "JPY": "yen", "CHF": "francs", "INR": "rupees"}


@dataclass(frozen=True)
class Value:
    """``text`` as it stands in a question; ``argument`` as it is passed to a tool or comes from one."""

    text: str
    argument: Any


def schema(pool: str) -> dict[str, Any]:
    """JSON schema of the arguments of a pool; a fresh copy."""
    return dict(SCHEMAS.get(pool, {"type": "string"}))


def draw(pool: str, rng: random.Random, taken: Sequence[Value] = ()) -> Value:
    """A value of a pool, unlike those ``taken`` before."""
    while True:
        value = _draw(pool, rng, taken)
        if all(value.text != v.text and value.argument != v.argument for v in taken):
            return value


def made_up_word(rng: random.Random) -> str:
    """A word that no text holds, of one to four syllables."""
    syllables = rng.choices((1, 2, 3, 4), (1, 4, 3, 1))[0]
    onsets = [*"bcdfghjklmnprstvwxyz", "br", "ch", "dr", "fl", "gr", "kl", "pr", "sh", "st", "th", "tr", "qu"]
    codas = ["", "", "", "n", "r", "s", "l", "m", "t", "x", "nd", "rk", "ck"]
    return "".join(rng.choice(onsets) + rng.choice("aeiou") + rng.choice(codas) for _ in range(syllables))


def _draw(pool: str, rng: random.Random, taken: Sequence[Value]) -> Value:
    if pool in ("minutes", "count", "sides", "number", "degrees"):
        top = {"minutes": 180, "count": 20, "sides": rng.choice((6, 20, 100, 1000)), "number": 99999, "degrees": 39}
        number = rng.randint({"degrees": -9, "sides": 2}.get(pool, 1), top[pool])
        return Value(str(number), number)
    if pool in ("amount", "price"):
        return _amount(rng, decimals=0.7 if pool == "price" else 0.25)
    if pool == "switch":
        on = rng.random() < 0.5
        return Value("on" if on else "off", on)
    if pool == "currency":
        code = rng.choice(LISTS["currency"])
        return Value(_MONEY.get(code, code) if rng.random() < 0.3 else code, code)
    if pool == "expression":
        return _expression(rng)
    text = _text(pool, rng, taken)
    return Value(text, text)


def _text(pool: str, rng: random.Random, taken: Sequence[Value]) -> str:
    made_up = rng.random() < MADE_UP_SHARE
    if pool in ("state", "scale"):
        return str(rng.choice(SCHEMAS[pool]["enum"]))
    if pool == "unit":
        # Units of one question convert into each other.
        group = next((g for g in UNITS for v in taken if v.text in g), None) or rng.choice(UNITS)
        return str(rng.choice(group))
    if pool == "time":
        return f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
    if pool == "code":
        letters = "".join(rng.choice("ABCDEFGHKLMNPQRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
        return letters + rng.choice(("-", "", "_")) + str(rng.randint(1, 9999))
    if pool == "title":
        return _title(rng, made_up)
    if pool == "text":
        message = rng.choice(LISTS["message"])
        if rng.random() < 0.7:
            message += " " + rng.choice(LISTS["message_end"])
        return f"{message} {made_up_word(rng)}" if made_up else message
    if pool == "words":
        words = rng.choices(LISTS["word"], k=rng.randint(1, 6))
        if made_up:
            words[rng.randrange(len(words))] = rng.choice((made_up_word(rng), str(rng.randint(1, 99))))
        return " ".join(words)
    if pool in ("query", "label") and rng.random() < 0.6:
        words = rng.choices(LISTS["adjective"] + LISTS["noun"], k=rng.randint(1, 3))
        return " ".join([made_up_word(rng), *words[1:]] if made_up else words)
    if pool in ("city", "person", "room") and made_up:
        text = made_up_word(rng)
        return text if pool == "room" else text.capitalize()
    text = rng.choice(LISTS["topic" if pool == "query" else pool])
    return text.lower() if pool in ("city", "person", "language") and rng.random() < 0.15 else text


def _title(rng: random.Random, made_up: bool) -> str:
    first, second = rng.choice(LISTS["adjective"]), rng.choice(LISTS["noun"])
    other = made_up_word(rng) if made_up else rng.choice(LISTS["noun"])
    text = rng.choice(
        (f"{first} {other}", f"the {first} {second}", f"{other} of the {second}", f"{second} {other}", other)
    )
    return text.title() if rng.random() < 0.75 else text


def _amount(rng: random.Random, decimals: float) -> Value:
    number: float = rng.randint(1, rng.choice((10, 100, 1000, 10000)))
    if rng.random() < decimals:
        number = round(number + rng.randint(1, 99) / rng.choice((10, 100)), 2)
    number = int(number) if number == int(number) else number
    return Value(str(number), number)


def _expression(rng: random.Random) -> Value:
    a, b, c = (rng.randint(1, rng.choice((9, 99, 999))) for _ in range(3))
    one, two = rng.choice("+-*/"), rng.choice("+-*/")
    shape = rng.random()
    if shape < 0.12:
        text = rng.choice((f"({a} {one} {b}) {two} {c}", f"{a} {one} {b} {two} {c}"))
        return Value(text, text)
    text = f"{a} {one} {b}"
    if shape < 0.3:
        return Value(text.replace(" ", ""), text)
    return Value(f"{a} {rng.choice(_OPERATORS[one])} {b}" if shape < 0.6 else text, text)
