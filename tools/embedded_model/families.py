"""Kinds of tools and one tool of a kind as a request offers it: names, schema, calls, results.

Owns which phrasings are held out. Made-up tools (``made_up_family``) teach that a tool's definition is to be read.
"""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from .pools import LISTS, Value, draw, schema

T = TypeVar("T")

_MADE_UP = (
    "{verb} {thing} {a}",
    "{verb} the {thing} {a}",
    "I want to {verb} the {thing} {a}",
    "can you {verb} {thing} {a}?",
    "{verb} the {thing} with the {kind} {a}",
    "use {tool} with {a}",
    "{tool} {a}",
    "I need you to {verb} {thing} {a}",
    "call {tool}: {key} is {a}",
    "{thing} {a}: {verb} it",
    "would you {verb} the {thing} {a}?",
    "please {verb} the {thing} whose {kind} is {a}",
)


@dataclass(frozen=True)
class Form:
    """Names that a parameter may have, and the pool of its values."""

    names: tuple[str, ...]
    pool: str


@dataclass(frozen=True)
class Parameter:
    """A parameter by its slot in questions."""

    slot: str
    about: tuple[str, ...]
    forms: tuple[Form, ...]
    optional: bool = False


@dataclass(frozen=True)
class Family:
    """A kind of tool: how it is named and described, asked for, and what is said of its result."""

    id: str
    names: tuple[str, ...]
    about: tuple[str, ...]
    ask: tuple[str, ...]
    missing: tuple[tuple[str, str], ...]  # a question that lacks a value, and what is asked back
    result: Mapping[str, str]  # spellings of a key, separated by "|" -> pool
    answer: str
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class Tool:
    """A tool of a family with its chosen names. ``parameters``: slot -> name and pool, in the order of its schema."""

    family: Family
    name: str
    parameters: Mapping[str, tuple[str, str]]
    definition: dict[str, Any]  # OpenAI's shape


def part(items: Sequence[T], held_out: bool) -> list[T]:
    """Phrasings to train on, or the seventh of them that is held out."""
    return [item for i, item in enumerate(items) if (i % 7 == 3) == held_out]


@cache
def families() -> tuple[Family, ...]:
    """The families of families.toml."""
    text = (Path(__file__).parent / "families.toml").read_text(encoding="utf-8")
    return tuple(_family(table) for table in tomllib.loads(text)["family"])


def made_up_family(rng: random.Random, near: Family | None = None) -> Family:
    """A tool such as cancel_order; ``near``: shares one of its two words with that made-up family."""
    verb, thing = rng.choice(LISTS["verb"]), rng.choice(LISTS["object"])
    if near is not None:
        old_verb, old_thing = near.names[0].split("_")
        verb, thing = (old_verb, thing) if rng.random() < 0.5 else (verb, old_thing)
    name = f"{verb}_{thing}"
    kinds = [
        (f"{thing}_id", "number"),
        ("id", "number"),
        ("code", "code"),
        ("name", "person"),
        ("title", "title"),
        ("city", "city"),
    ]
    first, second = rng.sample(kinds, 2)
    two = rng.random() < 0.35 and {first[1], second[1]} != {"number"}
    words = {"verb": verb, "thing": thing, "tool": name, "key": first[0], "kind": _spoken(first[0]), "a": "{a}"}
    ask = [skeleton.format(**words) for skeleton in _MADE_UP]
    if two:
        tails = [f"{link} {_spoken(second[0])} {{b}}" for link in (",", " with", " and")]
        ask = [s.removesuffix("?") + tails[i % 3] + ("?" if s.endswith("?") else "") for i, s in enumerate(ask)]
    slots = [("a", first), ("b", second)][: 1 + two]
    parameters = tuple(Parameter(s, (f"The {_spoken(n)}",), (Form((n,), pool),)) for s, (n, pool) in slots)
    about = (f"{verb.capitalize()} one {thing}.", f"Tool to {verb} the {thing}.")
    answer = f"The status of {thing} {{a}} is {{status}}."
    return Family("made_up", (name,), about, tuple(ask), (), {"status|state": "status"}, answer, parameters)


def offer(family: Family, rng: random.Random) -> Tool:
    """A tool of the family with random names, with or without its optional parameters."""
    name = rng.choice(family.names)
    if rng.random() < 0.03 and family.id != "made_up":  # whose questions may name the tool
        head, *rest = name.split("_")
        name = head + "".join(w.capitalize() for w in rest)
    chosen = [p for p in family.parameters if not p.optional or rng.random() < 0.5]
    if rng.random() < 0.05:
        rng.shuffle(chosen)
    parameters: dict[str, tuple[str, str]] = {}
    properties: dict[str, Any] = {}
    described = rng.random() < 0.2
    for p in chosen:
        form = rng.choice(p.forms)
        key = rng.choice([n for n in form.names if n not in properties])
        parameters[p.slot] = key, form.pool
        properties[key] = schema(form.pool)
        if described:
            properties[key]["description"] = rng.choice(p.about)
    required = [parameters[p.slot][0] for p in chosen if not p.optional]
    inner = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": rng.choice(family.about), "parameters": inner}
    if rng.random() < 0.03:
        del function["description"]
    if rng.random() < 0.05:  # clients differ in the order of keys
        function, function["parameters"] = _shuffled(function, rng), _shuffled(inner, rng)
    return Tool(family, name, parameters, {"type": "function", "function": function})


def values_for(tool: Tool, skeleton: str, rng: random.Random) -> dict[str, Value]:
    """Values of the slots of a question."""
    values: dict[str, Value] = {}
    for slot, (_, pool) in tool.parameters.items():
        if "{" + slot + "}" in skeleton:
            values[slot] = draw(pool, rng, list(values.values()))
    return values


def call(tool: Tool, values: Mapping[str, Value]) -> dict[str, Any]:
    """A call of the tool in OpenAI's shape, with a mapping of arguments in the order of the schema."""
    arguments = {key: values[slot].argument for slot, (key, _) in tool.parameters.items() if slot in values}
    return {"type": "function", "function": {"name": tool.name, "arguments": arguments}}


def result(tool: Tool, values: Mapping[str, Value], rng: random.Random) -> tuple[str, str, tuple[str, ...]]:
    """What a tool gives back as text, the sentence that answers with it, and what that sentence must hold."""
    if rng.random() < 0.06:
        error = rng.choice(("not found", "no connection", "timeout", "access denied", "service is down", "bad request"))
        return json.dumps({"error": error}), f"The tool failed: {error}.", (error,)
    texts = {slot: value.text for slot, value in values.items()}
    raw: dict[str, Any] = {}
    must = []
    for names, pool in tool.family.result.items():
        name = names.split("|")[0]
        if pool == "value":
            value = _evaluate(str(values["expression"].argument))
            texts["expression"] = str(values["expression"].argument)
        else:
            value = draw(pool, rng)
        raw[rng.choice(names.split("|"))] = value.argument
        texts[name] = value.text
        must += [value.text] if "{" + name + "}" in tool.family.answer else []
    content = json.dumps(raw, ensure_ascii=False)
    if rng.random() < 0.2:
        content = ", ".join(str(v) for v in raw.values())
    return content, tool.family.answer.format(**texts), tuple(must)


def _evaluate(expression: str) -> Value:
    try:
        number = round(float(eval(expression, {"__builtins__": {}})), 2)  # our own digits and operators
    except ZeroDivisionError:
        number = 0.0
    exact = int(number) if number == int(number) else number
    return Value(str(exact), exact)


def _spoken(name: str) -> str:
    return "id" if name.endswith("id") else name


def _shuffled(table: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    return dict(rng.sample(list(table.items()), len(table)))


def _family(table: Mapping[str, Any]) -> Family:
    parameters = tuple(
        Parameter(
            p["slot"],
            tuple(p["about"]),
            tuple(Form(tuple(f["names"]), f["pool"]) for f in p["forms"]),
            p.get("optional", False),
        )
        for p in table["parameter"]
    )
    missing = tuple((question, back) for question, back in table["missing"])
    names, about, ask = (tuple(table[key]) for key in ("names", "about", "ask"))
    return Family(table["id"], names, about, ask, missing, table["result"], table["answer"], parameters)
