"""What the embedded model learns beside facts: sums, saying texts back, calls of tools, answers from them, thoughts.

Each function gives one random Sample. The same seed gives the same samples. With ``held_out`` the phrasings, and the
pairs of sums, are those that training never uses.
"""

from __future__ import annotations

import random
import tomllib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .fact import Fact
from .families import Family, Tool, call, families, made_up_family, offer, part, result, values_for
from .pools import MADE_UP_SHARE, Value, draw, made_up_word
from .sample import Sample

NO_TOOL = "I have no tool for that."
ASKS: dict[str, list[str]] = tomllib.loads((Path(__file__).parent / "asks.toml").read_text(encoding="utf-8"))
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Use the tools.",
    "Answer briefly.",
    "Be short and exact.",
)
REFUSED_SHARE = 0.25  # of earlier requests in training
PREFIXES = ("please ", "hey, ", "hi, ", "ok, ", "hello, ", "now ", "so, ")


@dataclass(frozen=True)
class _Request:
    """A question that a tool answers."""

    tool: Tool
    values: Mapping[str, Value]
    skeleton: str

    @property
    def call(self) -> dict[str, Any]:
        return call(self.tool, self.values)

    @property
    def thought(self) -> str:
        arguments = self.call["function"]["arguments"]
        return (
            f"The tool {self.tool.name} fits: " + ", ".join(f"{k} is {_spelled(v)}" for k, v in arguments.items()) + "."
        )

    def text(self, rng: random.Random) -> str:
        return _asked(self.skeleton, {slot: v.text for slot, v in self.values.items()}, rng)


def sums(rng: random.Random, held_out: bool = False) -> Sample:
    """a + b with 0 to 99 each; held out are every tenth pair and some phrasings (those in half of the samples)."""
    return _sum(rng, held_out, thinking=False)


def repeats(rng: random.Random, held_out: bool = False) -> Sample:
    """A text to say back: words that make no sense together, so that only copying gives them."""
    pieces = []
    for _ in range(rng.choice((1, 1, 2, 3, 4))):
        pool = rng.choice(("words", "words", "title", "city", "person", "number", "code", "made_up"))
        pieces.append(made_up_word(rng) if pool == "made_up" else draw(pool, rng).text)
    text = " ".join(pieces)
    skeleton = rng.choice(part(ASKS["repeat"], held_out))
    messages = [*_system(rng, 0.06), _user(_asked(skeleton, {"x": text}, rng)), _assistant(text)]
    return Sample("repeat", messages, must=(text,))


def tool_calls(rng: random.Random, held_out: bool = False) -> Sample:
    """One to four tools, one of which fits; now and then behind an earlier turn."""
    return _call(rng, held_out, thinking=False)


def tool_answers(rng: random.Random, held_out: bool = False) -> Sample:
    """A call and the tool's result; the answer is one sentence with its values."""
    return _answer(rng, held_out, thinking=False)


def no_tool_fits(rng: random.Random, held_out: bool = False) -> Sample:
    """A request for a tool that is not offered."""
    return _no_fit(rng, held_out, thinking=False)


def missing_argument(rng: random.Random, held_out: bool = False) -> Sample:
    """A request for a tool without a value that the tool needs: the answer asks for it."""
    return _missing(rng, held_out, thinking=False)


def no_tool_needed(rng: random.Random, held_out: bool, plain: Callable[[random.Random], Sample]) -> Sample:
    """Tools are offered, but the question is one of ``plain`` (facts, small talk) or a sum: answered as without them.

    Samples of ``plain`` must have no tools. A sum is never asked where a calculator is offered.
    """
    is_sum = rng.random() < 0.25
    sample = _sum(rng, held_out, thinking=False) if is_sum else plain(rng)
    tools = _others(rng, rng.randint(1, 3), ("calculator",) if is_sum else ())
    return replace(sample, kind="no_tool", tools=_definitions(tools))


def thoughts(rng: random.Random, held_out: bool = False) -> Sample:
    """A sum or a case with tools in thinking mode: the answer has reasoning of one or two short sentences."""
    make = rng.choices((_sum, _call, _answer, _no_fit, _missing), (45, 30, 10, 8, 7))[0]
    return make(rng, held_out, thinking=True)


def thought_for_fact(question: str, fact: Fact) -> str:
    """Reasoning before a fact's answer."""
    topic = fact.id.replace("-", " ")
    known = "the command" if any("`qwen35rt " in s or "`pip " in s for s in fact.say) else "the answer"
    verb = "asks" if question.rstrip().endswith("?") else "writes"
    return f"The user {verb} about {topic}. I know {known}."


def sum_is_held_out(a: int, b: int) -> bool:
    """Whether a pair is kept from training."""
    return zlib.crc32(f"{a}+{b}".encode()) % 10 == 0


def column_addition(a: int, b: int) -> str:
    """The steps of adding two numbers below 100, ones first; without the result."""
    if max(a, b) < 10:
        return f"{a} + {b}"
    ones = a % 10 + b % 10
    carry = ones // 10
    tens = a // 10 + b // 10 + carry
    return (
        f"{a} + {b}: ones {a % 10} + {b % 10} = {ones}, tens {a // 10} + {b // 10}{' + 1' * carry} = {tens}, "
        f"so {a} + {b}"
    )


def _sum(rng: random.Random, held_out: bool, thinking: bool) -> Sample:
    question, a, b = _sum_question(rng, held_out)
    head = [*_system(rng, 0.06), *_history(rng, 0.12)]
    steps = f"{column_addition(a, b)} = {a + b}."
    answer = _assistant(f"{a} + {b} = {a + b}.", steps) if thinking else _assistant(steps)
    return Sample("sum", [*head, _user(question), answer], None, thinking, (f"= {a + b}.",))


def _sum_question(rng: random.Random, held_out: bool) -> tuple[str, int, int]:
    while True:
        a, b = (rng.randint(0, rng.choice((9, 99, 99, 99))) for _ in range(2))
        if sum_is_held_out(a, b) == held_out:
            break
    skeleton = rng.choice(part(ASKS["sum"], held_out and rng.random() < 0.5))
    return _asked(skeleton, {"a": str(a), "b": str(b)}, rng), a, b


def _call(rng: random.Random, held_out: bool, thinking: bool) -> Sample:
    request = _request(_pick(rng), rng, held_out)
    tools = _offered(rng, request, 2)
    head = [*_system(rng, 0.12), *_earlier(tools, rng, held_out)]
    if len(head) < 2 and all(t.family.id != "calculator" for t in tools):
        head += _history(rng, 0.08)
    answer = _assistant("", request.thought if thinking else "", [request.call])
    return Sample("tool", [*head, _user(request.text(rng)), answer], _definitions(tools), thinking)


def _answer(rng: random.Random, held_out: bool, thinking: bool) -> Sample:
    request = _request(_pick(rng), rng, held_out)
    tools = _offered(rng, request, 2)
    called = _assistant("", request.thought if thinking else "", [request.call])
    content, sentence, must = result(request.tool, request.values, rng)
    said = _assistant(sentence, "The tool has answered. I say it in a sentence." if thinking else "")
    messages = [*_system(rng, 0.12), _user(request.text(rng)), called, {"role": "tool", "content": content}, said]
    return Sample("tool_answer", messages, _definitions(tools), thinking, must or (sentence,))


def _no_fit(rng: random.Random, held_out: bool, thinking: bool) -> Sample:
    request = _request_beyond((), rng, held_out)
    others = _others(rng, rng.randint(1, 3), (request.tool.family.id, "search"), request.tool)  # a search fits all
    bare = rng.random() < 0.2 and request.tool.family.id not in ("made_up", "calculator") and not thinking
    answer = _assistant(NO_TOOL, "None of the tools does that." if thinking else "")
    earlier = [] if bare else _earlier(others, rng, held_out)
    messages = [*_system(rng, 0.12), *earlier, _user(request.text(rng)), answer]
    return Sample("no_fit", messages, None if bare else _definitions(others), thinking, ("no tool",))


def _missing(rng: random.Random, held_out: bool, thinking: bool) -> Sample:
    family = rng.choice([f for f in families() if part(f.missing, held_out)])
    skeleton, back = rng.choice(part(family.missing, held_out))
    tool = offer(family, rng)
    tools = [tool, *_others(rng, rng.randint(0, 2), (family.id, "search"))]
    rng.shuffle(tools)
    thought = f"The tool {tool.name} fits, but a value is missing. I ask for it." if thinking else ""
    messages = [*_system(rng, 0.12), _user(_asked(skeleton, {}, rng)), _assistant(back, thought)]
    return Sample("missing", messages, _definitions(tools), thinking, (back,))


def _pick(rng: random.Random) -> Family:
    return made_up_family(rng) if rng.random() < MADE_UP_SHARE else rng.choice(families())


def _request(family: Family, rng: random.Random, held_out: bool) -> _Request:
    tool = offer(family, rng)
    return _ask_of(tool, rng, held_out)


def _request_beyond(tools: Sequence[Tool], rng: random.Random, held_out: bool) -> _Request:
    """A request that none of the tools fits; half of those beside a made-up tool are for one that is like it."""
    offered = {t.family.names[0] for t in tools}
    made_up = [t.family for t in tools if t.family.id == "made_up"]
    while True:
        family = made_up_family(rng, made_up[0]) if made_up and rng.random() < 0.5 else _pick(rng)
        if family.names[0] in offered:
            continue
        request = _request(family, rng, held_out)
        # A sum needs no calculator.
        if family.id != "calculator" or "+" not in str(request.values["expression"].argument):
            return request


def _ask_of(tool: Tool, rng: random.Random, held_out: bool) -> _Request:
    absent = ["{" + p.slot + "}" for p in tool.family.parameters if p.slot not in tool.parameters]
    skeleton = rng.choice([s for s in part(tool.family.ask, held_out) if not any(a in s for a in absent)])
    return _Request(tool, values_for(tool, skeleton, rng), skeleton)


def _offered(rng: random.Random, request: _Request, most: int) -> list[Tool]:
    """The tool asked for among up to ``most`` others."""
    count = rng.choices(range(most + 1), (30, 35, 22, 13)[: most + 1])[0]
    tools = [request.tool, *_others(rng, count, (request.tool.family.id,), request.tool)]
    rng.shuffle(tools)
    return tools


def _definitions(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    return [t.definition for t in tools]


def _others(rng: random.Random, count: int, barred: Sequence[str], near: Tool | None = None) -> list[Tool]:
    """Tools of families other than ``barred``, of different names; near a made-up tool also one that is like it."""
    pool = [f for f in families() if f.id not in barred]
    chosen = rng.sample(pool, count)
    made_up = near.family if near is not None and near.family.id == "made_up" else None
    for i in range(count):
        if rng.random() < (0.5 if made_up else MADE_UP_SHARE):
            chosen[i] = made_up_family(rng, made_up)
    taken = {made_up.names[0]} if made_up else set()
    kept = []
    for family in chosen:
        if family.names[0] not in taken:
            kept.append(offer(family, rng))
            taken.add(family.names[0])
    if count and not kept:
        kept.append(offer(rng.choice(pool), rng))
    return kept


def _earlier(tools: Sequence[Tool], rng: random.Random, held_out: bool) -> list[dict[str, Any]]:
    """Earlier requests for the tools offered. Often in training: one list of tools then teaches several calls.

    Some are for a tool that is not offered, unless there is a search, which fits nearly everything.
    """
    messages: list[dict[str, Any]] = []
    searches = any(t.family.id == "search" for t in tools)
    if rng.random() < (0.1 if held_out else 0.6):
        for _ in range(1 if held_out else rng.randint(1, 4)):
            if held_out or searches or rng.random() >= REFUSED_SHARE:
                messages += _exchange(_ask_of(rng.choice(tools), rng, held_out), rng)
            else:
                request = _request_beyond(tools, rng, held_out)
                messages += [_user(request.text(rng)), _assistant(NO_TOOL)]
    return messages


def _exchange(request: _Request, rng: random.Random) -> list[dict[str, Any]]:
    """An earlier request with its result and answer."""
    content, sentence, _ = result(request.tool, request.values, rng)
    tool = {"role": "tool", "content": content}
    return [_user(request.text(rng)), _assistant("", "", [request.call]), tool, _assistant(sentence)]


def _history(rng: random.Random, share: float) -> list[dict[str, Any]]:
    """In a share of the cases an earlier turn: a sum of those trained on."""
    if rng.random() >= share:
        return []
    question, a, b = _sum_question(rng, held_out=False)
    return [_user(question), _assistant(f"{column_addition(a, b)} = {a + b}.")]


def _system(rng: random.Random, share: float) -> list[dict[str, Any]]:
    return [{"role": "system", "content": rng.choice(SYSTEMS)}] if rng.random() < share else []


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str, thought: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = list(calls)
    return message


def _asked(skeleton: str, texts: Mapping[str, str], rng: random.Random) -> str:
    """A question with its values, which stay as they are: only words of the skeleton change case."""
    body = skeleton.removesuffix("?")
    end = "?" if body != skeleton and rng.random() < 0.6 else ""
    if body == skeleton and not body.endswith("}") and body[-1].isalpha() and rng.random() < 0.15:
        end = rng.choice((".", " please", ", thanks"))
    if rng.random() < 0.08 and not body.startswith("{"):
        body = rng.choice(PREFIXES) + body
    if rng.random() < 0.5 and not body.startswith("{"):
        body = body[0].upper() + body[1:]
    return body.format(**texts) + end


def _spelled(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
