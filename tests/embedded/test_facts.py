"""What the embedded model says is true of the program: every command, flag, route and name that its facts speak of."""

from __future__ import annotations

import importlib
import random
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import qwen35rt
from qwen35rt.api import Model
from qwen35rt.cli import COMMANDS
from qwen35rt.cli.chat import COMMANDS as CHAT_COMMANDS
from qwen35rt.cli.parser import Parser
from qwen35rt.config import Environment
from qwen35rt.formats import FORMATS
from qwen35rt.server.settings import ServerSettings
from tools.embedded_model import fact as module
from tools.embedded_model.fact import Fact, expand, load_facts, plain

ROOT = Path(__file__).resolve().parents[2]
FACTS = load_facts()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def parser_of(command: str) -> Parser:
    name = "qwen35rt.bench.command" if command == "bench" else f"qwen35rt.cli.{command}"
    parser = Parser(prog=command, description="")
    importlib.import_module(name).add_arguments(parser)
    return parser


FLAGS = {command: set(parser_of(command)._option_string_actions) | {"--help"} for command in COMMANDS}
ANY_FLAG = set().union(*FLAGS.values()) | {"--version"}


def spans() -> Iterator[tuple[str, str]]:
    """(fact id, text in backticks) of every answer."""
    for fact in FACTS:
        for say in fact.say:
            for span in re.findall(r"`([^`]+)`", say):
                yield fact.id, span


def untrue(span: str) -> str | None:
    """What is wrong with a span, or None."""
    if match := re.fullmatch(r"(?:qwen35rt|python -m qwen35rt) (.+)", span):
        command, *rest = shlex.split(match[1])
        if command in ("--help", "--version") or command == "COMMAND":
            return None
        if command not in COMMANDS:
            return f"no command {command}"
        unknown = [w for w in rest if re.match(r"--?[a-z]", w) and w not in FLAGS[command]]
        return f"{command} has no flag {unknown[0]}" if unknown else None
    if re.match(r"--?[a-z]", span):
        flag = span.split()[0]
        return None if flag in ANY_FLAG else f"no flag {flag}"
    if match := re.match(r"/(help|clear|system|think|regen|exit)\b", span):
        return None if any(match[0] == c.split()[0] for c in CHAT_COMMANDS) else f"no chat command {match[0]}"
    if match := re.match(r"(?:(GET|POST) )?(/[a-z/0-9_-]+)$", span):
        return route_fault(match[1], match[2])
    if span.startswith("QWEN35RT_"):
        known = {f"QWEN35RT_{f.name.upper()}" for f in (*fields(Environment), *fields(ServerSettings))}
        return None if span in known else f"no variable {span}"
    if match := re.match(r"pip install .*\[(\w+)\]", span):
        return None if match[1] in EXTRAS else f"no extra {match[1]}"
    if match := re.match(r"(model|qwen35rt)\.(\w+)\b", span):
        owner = Model if match[1] == "model" else qwen35rt
        return None if match[2] == "gguf" or hasattr(owner, match[2]) else f"no {match[0]}"
    if re.fullmatch(r"I?Q\d\w*", span):
        return None if span in {f.name for f in FORMATS} | {"Q4_K_M"} else f"no format {span}"
    return None


def route_fault(method: str | None, path: str) -> str | None:
    """Routes of the server, with or without a method."""
    routes = importlib.import_module("qwen35rt.server.routes").ROUTES
    methods = {m for m, p in routes if p == path}
    return None if methods and (method is None or method in methods) else f"no route {method or ''} {path}"


@pytest.mark.parametrize(("fact", "span"), sorted(set(spans())))
def test_answers_speak_of_what_the_program_has(fact: str, span: str) -> None:
    assert untrue(span) is None


@pytest.mark.parametrize(
    "span",
    [
        "qwen35rt walk",
        "qwen35rt run --fly",
        "--fly",
        "/v1/nothing",
        "DELETE /health",
        "QWEN35RT_FLY",
        "pip install qwen35rt[fly]",
        "model.fly()",
        "Q9_K",
    ],
)
def test_false_answers_would_be_found(span: str) -> None:
    if span == "DELETE /health":
        span = "POST /health"
    assert untrue(span) is not None


def test_facts_are_well_formed_and_apart() -> None:
    owner: dict[str, Fact] = {}
    for fact in FACTS:
        own = {t for s in fact.ask for e in expand(s) if (t := plain(e)) not in fact.others}
        assert own, fact.id
        for text in own:
            assert owner.setdefault(text, fact) is fact
    for fact in FACTS:
        for question in fact.held_out:
            assert plain(question) not in owner or owner[plain(question)].is_held_out(question), question


def test_training_never_draws_a_held_out_phrasing() -> None:
    rng = random.Random(5)
    for fact in FACTS:
        for _ in range(20):
            question = fact.question(rng)
            assert not fact.is_held_out(question)
            assert question not in fact.held_out
        assert not fact.is_held_out(next(expand(fact.ask[0])))
        held = fact.question(rng, held_out=True)
        assert fact.is_held_out(held) or held in fact.held_out


def test_wrong_entries_are_named(tmp_path: Path) -> None:
    good = '[[fact]]\nid = "a"\nask = ["x"]\nheld_out = ["y"]\nsay = ["z"]\nmust = ["z"]\n'
    (tmp_path / "a.toml").write_text(good)
    assert load_facts(tmp_path) == [Fact("a", ("x",), ("y",), ("z",), ("z",))]
    for wrong in (good.replace('must = ["z"]', 'must = ["q"]'), good.replace("ask", "asks"), good + good):
        (tmp_path / "a.toml").write_text(wrong)
        with pytest.raises(ValueError, match="fact"):
            load_facts(tmp_path)


def test_folder_of_facts_is_the_one_beside_the_module() -> None:
    assert Path(module.__file__).with_name("facts") == module.FOLDER
