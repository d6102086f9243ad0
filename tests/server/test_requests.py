"""What a request may say: fields, types, ranges, prompts (completions.md, sections 2 to 4)."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import psutil
import pytest

from qwen35rt.errors import QueueFull
from qwen35rt.server.body import depth_over, read_object
from qwen35rt.server.errors import InvalidJson
from qwen35rt.server.fields import INERT, LATER, SECOND
from tests.server.conftest import Make, Server
from tests.server.fake import Exchange, asynchronous

NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
INTEGERS = ("top_k", "max_tokens", "seed", "min_tokens", "logprobs", "repeat_last_n")
ODD = ("NaN", "Infinity", "-Infinity", "1e308", "1e999", '"1"', "true", "[]", "{}", "9" * 5000)


def raw(name: str, value: str) -> bytes:
    """A body with one field spelled in JSON text."""
    return f'{{"prompt": "a", "max_tokens": 2, "{name}": {value}}}'.encode()


@asynchronous
async def test_b76_c9_odd_numbers_are_refused_by_name(server: Server) -> None:
    for name in (*NUMBERS, *INTEGERS):
        for value in ODD:
            answer = await server.post(raw(name, value))
            assert (answer.status, answer.error["param"]) == (400, name), (name, value, answer.body)
            assert answer.error["type"] == "invalid_request_error"
            assert len(answer.error["message"]) < 200
        assert (await server.post(raw(name, "null"))).status == 200
    assert (await server.post({"prompt": "a"})).status == 200


@asynchronous
async def test_b76_odd_numbers_deep_inside_are_found(server: Server) -> None:
    for value in ("NaN", "Infinity", "1e999"):
        answer = await server.post(raw("logit_bias", f'{{"3": 1, "5": {value}}}'))
        assert (answer.status, answer.error["param"]) == (400, "logit_bias.5")
    answer = await server.post(raw("stop_token_ids", "[1, NaN]"))
    assert answer.error["param"] == "stop_token_ids[1]"


OUTSIDE: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.1],
    "top_p": [-0.1, 1.1],
    "min_p": [-0.1, 1.1],
    "top_k": [-2, 1.5],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1, 10.5],
    "repeat_penalty": [0, 11],
    "repeat_last_n": [-2],
    "max_tokens": [-1, 2**31, 2**63, 10**30],
    "max_completion_tokens": [-1, 2**31],
    "n_predict": [-2, 2**31],
    "seed": [-2, 2**63],
    "stop": [[""], "", ["x"] * 17, ["x" * 257], [1], 1, [None], ["x"] * 100_000],
    "stop_token_ids": [[-1], [10**9], ["1"], [1] * 129, 1],
    "min_tokens": [-1, 3],
    "logit_bias": [{"-1": 1}, {"x": 1}, {"1e9": 1}, {"99999": 1}, {"1": 101}, {"1": True}, {"1": "2"}, [[1]], [1], "a"],
    "logprobs": [-1, 21, True],
    "ignore_eos": [1, "true"],
    "echo": [1],
    "stream": ["true", 1],
    "stream_options": [{"include_usage": True}, 1, []],
    "cache_prompt": ["no"],
    "parse_special": [0],
    "skip_special_tokens": [0],
    "include_stop_str_in_output": [1],
    "return_token_ids": [1],
    "timings_per_token": [1],
    "model": [1],
    "prompt": [1, 1.5, True, {}, [1.5], [None], [[None]], [True], [{}], [[[1]]], [1, "a"]],
}


async def _quick(server: Server, body: Any) -> Exchange:
    """An answer that took less than 0.1 s of work, once in three: the collector may come in between, to all that other
    tests have left, and other threads count as well."""
    for _ in range(3):
        began = time.process_time()
        answer = await server.post(body)
        seconds = time.process_time() - began
        if seconds < 0.1:
            return answer
    pytest.fail(f"{seconds} s for {str(body)[:100]}")


@pytest.mark.parametrize("name", OUTSIDE)
@asynchronous
async def test_c9_c11_values_outside_are_refused_by_name(server: Server, name: str) -> None:
    for value in OUTSIDE[name]:
        answer = await _quick(server, {"prompt": "a", "max_tokens": 2, name: value})
        assert answer.status == 400, (name, value)
        assert answer.error["param"].split("[")[0].split(".")[0] == name, (name, value, answer.error)
        assert answer.error["code"] == "invalid_value"
    assert server.idle
    assert server.engine.submitted == []


@asynchronous
async def test_c9_edges_are_taken(server: Server) -> None:
    edges: dict[str, list[Any]] = {
        "temperature": [0, 2, 1e-6],
        "top_p": [0, 1],
        "min_p": [0, 1],
        "top_k": [-1, 0, 1, 10**30],
        "presence_penalty": [-2, 2],
        "repetition_penalty": [0.001, 10],
        "repeat_last_n": [-1, 0, 10**30],
        "seed": [-1, 0, 2**63 - 1],
        "logprobs": [0, 20],
        "stop_token_ids": [[], [0, 300]],
        "logit_bias": [{}, [], {"5": False}, [[5, -100]], {"5": 100.0}],
        "min_tokens": [0, 2],
        "max_completion_tokens": [2],
        "ignore_eos": [True],
    }
    for name, values in edges.items():
        for value in values:
            assert (await server.post({"prompt": "a", "max_tokens": 2, name: value})).status == 200, (name, value)


@asynchronous
async def test_c30_min_tokens_up_to_the_number_that_may_come(server: Server) -> None:
    """Of the request, else the default one; -1 has no end."""
    for fields in ({"min_tokens": 257}, {"min_tokens": 4, "max_tokens": 3}, {"min_tokens": 4, "n_predict": 0}):
        answer = await server.post({"prompt": "a", **fields})
        assert (answer.status, answer.error["param"]) == (400, "min_tokens"), fields
    for fields in ({"min_tokens": 256}, {"min_tokens": 3, "max_tokens": 3}, {"min_tokens": 4, "n_predict": -1}):
        assert (await server.post({"prompt": "a", **fields})).status == 200, fields


@asynchronous
async def test_limits_of_lists_are_those_of_the_flags(make: Make) -> None:
    """Both where no model is needed and where the plan is made."""
    flags = {"max_stops": 17, "max_stop_token_ids": 2, "max_logit_bias": 1, "max_logprobs": 21}
    server = make(**flags)
    fields: dict[str, list[Any]] = {
        "stop": [[f"{i}," for i in range(17)], [f"{i}," for i in range(18)]],
        "stop_token_ids": [[1, 2], [1, 2, 3]],
        "logit_bias": [{"1": 1}, {"1": 1, "2": 1}],
        "logprobs": [21, 22],
    }
    for name, (legal, beyond) in fields.items():
        assert (await server.post({"prompt": "a", name: legal})).status == 200, name
        answer = await server.post({"prompt": "a", name: beyond})
        assert (answer.status, answer.error["param"]) == (400, name)


@asynchronous
async def test_c9_two_names_of_one_field(server: Server) -> None:
    assert (await server.post({"prompt": "a", "max_tokens": 3, "n_predict": 3})).status == 200
    for name, first in SECOND.items():
        answer = await server.post({"prompt": "a", first: 2, name: 3})
        assert (answer.status, answer.error["param"]) == (400, name)
    answer = await server.post({"prompt": "a", "repeat_penalty": 99})
    assert answer.error["param"] == "repeat_penalty"
    answer = await server.post({"prompt": "a", "n_predict": "3"})
    assert answer.error["param"] == "n_predict"


@asynchronous
async def test_c20_n_predict_to_the_end_of_the_context(server: Server) -> None:
    server.engine.forever(b"x")
    answer = await server.post({"prompt": "a", "n_predict": -1})
    assert answer.json["usage"]["total_tokens"] == 256
    assert answer.json["choices"][0]["finish_reason"] == "length"
    answer = await server.post({"prompt": "a", "max_tokens": 262_000})
    assert answer.json["usage"]["total_tokens"] == 256


@asynchronous
async def test_c7_later_fields_are_refused_unless_neutral(server: Server) -> None:
    neutral = {"n": 1, "best_of": 1, "suffix": "", "lora": [], "response_format": {"type": "text"}, "typical_p": 1.0}
    assert (await server.post({"prompt": "a", **neutral})).status == 200
    assert (await server.post({"prompt": "a", **dict.fromkeys(LATER)})).status == 200
    for name in LATER:
        for value in ([7], {"a": 1}, "zzz", 3, True):
            answer = await server.post({"prompt": "a", name: value})
            if answer.status != 200:
                assert (answer.status, answer.error["code"]) == (400, "unsupported_parameter"), name
                assert answer.error["param"] == name
            else:
                pytest.fail(f"{name}={value} had no effect")
    answer = await server.post({"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}})
    assert answer.error["param"] == "stream_options.continuous_usage_stats"
    assert server.engine.submitted[2:] == []


@asynchronous
async def test_c7_fields_without_effect_are_not_reported(server: Server) -> None:
    answer = await server.post({"prompt": "a", **dict.fromkeys(INERT, "x")})
    assert answer.status == 200
    assert "x-ignored-fields" not in answer.headers


@asynchronous
async def test_c8_unknown_fields_are_named(server: Server, make: Make) -> None:
    answer = await server.post({"prompt": "a", "colour\r\nx: y": 1, "b.c-d_e": 2, "é": 3})
    assert answer.status == 200
    assert answer.headers["x-ignored-fields"] == "colourxy, b.c-d_e"
    many = await server.post({"prompt": "a", **{f"f{i:03}" + "y" * 100: i for i in range(100)}})
    names = many.headers["x-ignored-fields"].split(", ")
    assert len(names) == 16
    assert {len(n) for n in names} == {64}
    strict = make(strict_fields=True)
    answer = await strict.post({"prompt": "a", "colour": 1})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "unknown_parameter", "colour")
    assert (await strict.post({"prompt": "a", "user": "u", "n": 1})).status == 200


@asynchronous
async def test_c10_request_then_flag_then_file_then_table(make: Make) -> None:
    server = make(temperature=0.5, facts={"metadata": {"general.sampling.temp": 0.9, "general.sampling.top_k": 7}})
    await server.post({"prompt": "a"})
    await server.post({"prompt": "a", "temperature": 0.1, "top_k": 3})
    first, second = (plan.params for plan in server.engine.submitted)
    assert (first.temperature, first.top_k, first.top_p) == (0.5, 7, 1.0)
    assert (second.temperature, second.top_k) == (0.1, 3)
    assert [p.budget for p in server.engine.submitted] == [255, 255]
    server = make(max_tokens_default=9)
    await server.post({"prompt": "a"})
    assert server.engine.submitted[0].budget == 9


@asynchronous
async def test_c11_hostile_bodies(server: Server) -> None:
    await server.post({"prompt": "a"})
    before = psutil.Process().memory_info().rss
    deep = b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"
    bodies = {
        deep: "invalid_json",
        b'{"prompt": "a", "x": ' + b'{"a":' * 10_000: "invalid_json",
        json.dumps({"prompt": "a", "stop": ["x"] * 100_000}).encode(): "invalid_value",
        json.dumps({"prompt": "a", "n": 10**9}).encode(): "unsupported_parameter",
        json.dumps({"prompt": "a", "max_tokens": 2**63}).encode(): "invalid_value",
        json.dumps({"prompt": "a", "logit_bias": {"-1": 1}}).encode(): "invalid_value",
        json.dumps({"prompt": "a", "logit_bias": {str(i): 1 for i in range(5000)}}).encode(): "invalid_value",
        json.dumps({"prompt": ["a"] * 1025}).encode(): "invalid_value",
        json.dumps({"prompt": "a", "temperature": 10**400}).encode(): "invalid_value",
        b'{"prompt": "' + b"\\" * 100_001: "invalid_json",
        b"[" * 1_000_000: "invalid_json",
        b'{"a": "' + b'\\"' * 500_000: "invalid_json",
    }
    for body, code in bodies.items():
        answer = await _quick(server, body)
        assert (answer.status, answer.error["code"]) == (400, code), body[:60]
        assert len(answer.body) < 2_400
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert (await server.post({"prompt": "a"})).status == 200


@asynchronous
async def test_bodies_that_are_no_json_object(server: Server) -> None:
    for body in (b"", b"{", b"[1]", b'"a"', b"null", b'{"prompt": "a"} x', b'{"prompt": "\xff"}', b"{'prompt': 1}"):
        answer = await server.post(body)
        assert (answer.status, answer.error["code"]) == (400, "invalid_json"), body
    for text in (b"\\ud800", b"\\udc00\\ud800", b"\xed\xa0\x80"):
        answer = await server.post(b'{"prompt": "' + text + b'"}')
        assert (answer.status, answer.error["code"]) == (400, "invalid_json")
    assert (await server.post({"prompt": "a\0b"})).status == 200
    assert server.engine.submitted[-1].ids == tuple(server.engine.tokenizer.encode("a\0b"))


def test_c11_depth_counts_brackets_outside_strings_only() -> None:
    assert not depth_over(b'{"a": "' + b"[" * 1000 + b'"}', 64)
    assert not depth_over(b'{"a": "\\"' + b"[" * 1000 + b'"}', 64)
    assert not depth_over(b"[" + b"[]," * 5000 + b"1]", 64)
    assert not depth_over(b"[" * 64 + b"]" * 64, 64)
    assert depth_over(b"[" * 65 + b"]" * 65, 64)
    assert depth_over(b'["\\\\", ' + b"[" * 64 + b"]" * 65, 64)
    assert depth_over(b" " * 3_000_000 + b"[" * 65, 64)
    assert read_object(b'{"a":' * 64 + b"1" + b"}" * 64)
    with pytest.raises(InvalidJson):
        read_object(b'{"a":' * 65 + b"1" + b"}" * 65)


@asynchronous
async def test_c12_any_model_name_is_echoed_unless_strict(server: Server, make: Make) -> None:
    answer = await server.post({"prompt": "a", "model": "gpt-x"})
    assert (answer.json["model"], answer.headers["x-model-id"]) == ("gpt-x", "tiny")
    assert (await server.post({"prompt": "a"})).json["model"] == "tiny"
    strict = make(strict_model=True, facts={"aliases": ("nick",)})
    answer = await strict.post({"prompt": "a", "model": "gpt-x"})
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    for name in ("tiny", "nick"):
        assert (await strict.post({"prompt": "a", "model": name})).status == 200
    assert strict.idle


@asynchronous
async def test_c12_another_name_is_logged_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    server = make(facts={"aliases": ("nick",)})
    caplog.set_level(logging.INFO, "qwen35rt.server.service")
    for name in ("any", "tiny", "any", "nick", "other", "any"):
        assert (await server.post({"prompt": "a", "model": name})).status == 200
    names = [r.args[0] for r in caplog.records if isinstance(r.args, tuple) and "names the model" in r.msg]
    assert names == ["any", "other"]
    assert all(r.levelno < logging.WARNING for r in caplog.records)


@asynchronous
async def test_a_place_is_given_back_on_refusal(make: Make) -> None:
    server = make(parallel=1, queue=0)
    bodies: list[dict[str, Any]] = [{"prompt": [70] * 300}, {"prompt": [9999]}, {"prompt": [[]]}]
    for body in bodies:
        assert (await server.post(body)).status == 400
    server.engine.refuse = QueueFull("full")
    assert (await server.post({"prompt": "a"})).error["code"] == "queue_full"
    server.engine.refuse = None
    assert (await server.post({"prompt": "a"})).status == 200
