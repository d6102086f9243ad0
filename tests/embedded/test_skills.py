"""Skills of the embedded model: samples are well formed and right, and what is held out is never trained on."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from qwen35rt.tokenizer import ChatTemplate
from tools.embedded_model import families, pools, skills
from tools.embedded_model.fact import Fact
from tools.embedded_model.sample import Sample

TEMPLATE = Path(skills.__file__).with_name("template.jinja").read_text(encoding="utf-8")
TYPES: dict[str, tuple[type, ...]] = {"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)}
COUNT = 400


def plain(rng: random.Random) -> Sample:
    messages = [{"role": "user", "content": "who are you"}, {"role": "assistant", "content": "A small model."}]
    return Sample("fact", messages, must=("small model",))


def no_tool_needed(rng: random.Random, held_out: bool) -> Sample:
    return skills.no_tool_needed(rng, held_out, plain)


SKILLS: dict[str, Callable[[random.Random, bool], Sample]] = {
    "sums": skills.sums,
    "repeats": skills.repeats,
    "tool_calls": skills.tool_calls,
    "tool_answers": skills.tool_answers,
    "no_tool_fits": skills.no_tool_fits,
    "missing_argument": skills.missing_argument,
    "no_tool_needed": no_tool_needed,
    "thoughts": skills.thoughts,
}


def draw(name: str, held_out: bool = False, count: int = COUNT) -> list[Sample]:
    rng = random.Random(f"{name} {held_out}")
    return [SKILLS[name](rng, held_out) for _ in range(count)]


def calls(sample: Sample) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Calls of a sample with the definitions of their tools."""
    tools = {t["function"]["name"]: t["function"] for t in sample.tools or ()}
    for message in sample.messages:
        for call in message.get("tool_calls", ()):
            yield call["function"], tools[call["function"]["name"]]


def asked(sample: Sample) -> str:
    """The last question of the user."""
    return str([m["content"] for m in sample.messages if m["role"] == "user"][-1])


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("name", SKILLS)
def test_samples_are_well_formed(name: str, held_out: bool) -> None:
    template = ChatTemplate(TEMPLATE)
    for sample in draw(name, held_out):
        roles = [m["role"] for m in sample.messages]
        assert roles[-1] == "assistant"
        assert "system" not in roles[1:]
        assert all(a != b or a == "tool" for a, b in itertools.pairwise(roles))
        answer = sample.messages[-1]
        assert bool(answer["content"]) != ("tool_calls" in answer)
        assert bool(sample.must) == bool(answer["content"])
        assert all(m.lower() in answer["content"].lower() for m in sample.must)
        assert sample.thinking == ("reasoning_content" in answer)
        names = [t["function"]["name"] for t in sample.tools or ()]
        assert len(set(names)) == len(names) <= 4
        # What the model is to write follows the prompt it will see.
        prompt = template.render(sample.messages[:-1], sample.tools, enable_thinking=sample.thinking)
        whole = template.render(sample.messages, sample.tools, add_generation_prompt=False)
        assert whole.startswith(prompt)
        assert whole.endswith("<|im_end|>\n")
        assert len(prompt) < 4000


@pytest.mark.parametrize("name", ["tool_calls", "tool_answers", "thoughts"])
def test_calls_fit_their_tools(name: str) -> None:
    seen = set()
    for sample in draw(name) + draw(name, held_out=True):
        for call, tool in calls(sample):
            properties = tool["parameters"]["properties"]
            assert set(tool["parameters"]["required"]) <= set(call["arguments"]) <= set(properties)
            assert list(call["arguments"]) == [k for k in properties if k in call["arguments"]]
            for key, value in call["arguments"].items():
                schema = properties[key]
                assert isinstance(value, TYPES[schema["type"]])
                assert isinstance(value, bool) == (schema["type"] == "boolean")
                assert value in schema.get("enum", [value])
                seen.add(schema["type"])
    assert seen == set(TYPES)


def test_arguments_are_copied_from_the_question() -> None:
    for sample in draw("tool_calls"):
        for call in sample.messages[-1]["tool_calls"]:
            for value in call["function"]["arguments"].values():
                text = str(value)
                if (
                    not isinstance(value, bool)
                    and not re.search(r"\d [-+*/]", text)
                    and text not in pools.LISTS["currency"]
                ):
                    assert text in asked(sample)


def test_tools_offered_without_need_are_not_called() -> None:
    for sample in draw("no_tool_fits"):
        assert sample.messages[-1]["content"] == skills.NO_TOOL
        assert not sample.messages[-1].get("tool_calls")
    calculators = next(f for f in families.families() if f.id == "calculator").names
    for sample in draw("no_tool_needed"):
        assert sample.tools
        if "=" in sample.must[0]:
            assert {t["function"]["name"] for t in sample.tools}.isdisjoint(calculators)


def test_earlier_requests_are_refused_only_if_no_tool_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    beyond = skills._request_beyond
    refused = 0

    def check(tools: Sequence[families.Tool], *rest: Any) -> Any:
        nonlocal refused
        request = beyond(tools, *rest)
        refused += bool(tools)
        assert request.tool.name not in {t.name for t in tools}
        offered = {t.family.id for t in tools}
        assert "search" not in offered
        assert request.tool.family.id == "made_up" or request.tool.family.id not in offered
        return request

    monkeypatch.setattr(skills, "_request_beyond", check)
    samples = draw("tool_calls")
    assert sum(m["content"] == skills.NO_TOOL for s in samples for m in s.messages) == refused > COUNT / 10
    refused = 0
    draw("tool_calls", held_out=True)
    assert refused == 0


def test_names_of_tools_belong_to_one_family() -> None:
    names = [n for f in families.families() for n in f.names]
    assert len(set(names)) == len(names)
    assert len(families.families()) >= 12
    assert len(pools.LISTS["city"]) >= 200
    for family in families.families():
        for skeleton in family.ask:
            assert all("{" + p.slot + "}" in skeleton for p in family.parameters if not p.optional), skeleton


def test_sums_are_right() -> None:
    for held_out in (False, True):
        for sample in draw("sums", held_out, 2000):
            found = re.search(r"(\d+) \+ (\d+) = (\d+)\.$", sample.messages[-1]["content"])
            assert found is not None
            a, b, total = (int(g) for g in found.groups())
            assert total == a + b
            assert sorted(re.findall(r"\d+", asked(sample))) == sorted([str(a), str(b)])
            assert skills.sum_is_held_out(a, b) == held_out


def test_column_addition_is_right() -> None:
    for a in range(100):
        for b in range(100):
            text = skills.column_addition(a, b)
            steps = re.findall(r"([\d +]+) = (\d+)", text)
            assert len(steps) == (2 if max(a, b) > 9 else 0)
            for left, right in steps:
                assert sum(int(n) for n in left.split("+")) == int(right)
            if steps:
                assert steps[1][1] + steps[0][1][-1] == str(a + b)
            assert text.endswith(f"{a} + {b}")


def test_a_text_is_said_back() -> None:
    texts = set()
    for held_out in (False, True):
        for sample in draw("repeats", held_out, 500):
            said = sample.messages[-1]["content"]
            assert said in sample.messages[-2]["content"]
            assert sample.must == (said,)
            texts.add(said)
    assert len(texts) > 900


def test_results_of_calculators_are_right() -> None:
    found = 0
    for sample in draw("tool_answers", count=2000):
        simple = re.fullmatch(r"(\d+) ([-*]) (\d+) = (-?\d+)\.", sample.messages[-1]["content"])
        if simple:
            a, b, total = (int(simple[i]) for i in (1, 3, 4))
            assert total == (a - b if simple[2] == "-" else a * b)
            found += 1
    assert found > 10


def test_about_a_tenth_is_held_out() -> None:
    pairs = sum(skills.sum_is_held_out(a, b) for a in range(100) for b in range(100))
    assert 800 < pairs < 1200
    for family in families.families():
        assert 1 <= len(families.part(family.ask, True)) <= len(family.ask) // 5


def test_training_never_sees_held_out_phrasings(monkeypatch: pytest.MonkeyPatch) -> None:
    used: dict[bool, set[str]] = {False: set(), True: set()}
    original = skills._asked
    now = False

    def record(skeleton: str, *rest: Any) -> str:
        used[now].add(skeleton)
        return original(skeleton, *rest)

    monkeypatch.setattr(skills, "_asked", record)
    trained = [s for name in ("tool_calls", "no_tool_fits", "missing_argument") for s in draw(name)]
    now = True
    held = [s for name in ("tool_calls", "no_tool_fits", "missing_argument") for s in draw(name, held_out=True)]
    known = {s for f in families.families() for s in (*f.ask, *(q for q, _ in f.missing))}
    assert used[False] & used[True] & known == set()
    assert used[True] & known
    assert {asked(s) for s in trained}.isdisjoint(asked(s) for s in held)


def test_values_of_one_question_differ() -> None:
    rng = random.Random("pools")
    for pool in ("city", "unit", "currency", "minutes"):
        values: list[pools.Value] = []
        for _ in range(3):
            values.append(pools.draw(pool, rng, values))
        assert len({v.text for v in values}) == len({v.argument for v in values}) == 3


@pytest.mark.parametrize("name", SKILLS)
def test_the_same_seed_gives_the_same_samples(name: str) -> None:
    assert draw(name, count=30) == draw(name, count=30)
    assert draw(name, count=30) != [SKILLS[name](random.Random(5), False) for _ in range(30)]


def test_thoughts_before_facts() -> None:
    fact = Fact("install-pip", ("how",), ("how then",), ("Run `pip install qwen35rt`.",), ("pip",))
    assert skills.thought_for_fact("How?", fact) == "The user asks about install pip. I know the command."
    fact = Fact("who", ("who",), ("who then",), ("A model.",), ("model",))
    assert skills.thought_for_fact("tell me", fact) == "The user writes about who. I know the answer."
