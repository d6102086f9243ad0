"""Answers, buffered and streamed: their form, where the text ends, echo and log-probabilities (sections 5 to 8)."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from qwen35rt.engine.result import Timings
from qwen35rt.server.answer import join_timings
from qwen35rt.tokenizer import Tokenizer
from tests.server.conftest import Make, Server
from tests.server.fake import SURE, Exchange, asynchronous, started

CHUNK_KEYS = {"id", "object", "created", "model", "system_fingerprint", "choices"}
TIMING_NAMES = {
    *("cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second", "predicted_n", "predicted_ms"),
    *("predicted_per_token_ms", "predicted_per_second", "queue_ms", "ttft_ms"),
}
LOG_NAMES = ("tokens", "token_logprobs", "top_logprobs", "text_offset", "bytes")


def joined(exchange: Exchange) -> dict[str, Any]:
    """A stream put together: what the buffered answer must say (C3)."""
    assert exchange.status == 200
    assert exchange.headers["content-type"] == "text/event-stream"
    assert exchange.lines[-1] == "[DONE]"
    events = exchange.events
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for event in events:
        assert set(event) >= CHUNK_KEYS
        assert {event[k] == events[0][k] for k in ("id", "created", "model", "system_fingerprint", "object")} == {True}
        usage = event.get("usage") or usage
        for part in event["choices"]:
            whole = choices.setdefault(part["index"], {"index": part["index"], "text": "", "logprobs": None})
            assert "finish_reason" not in whole or whole["finish_reason"] is None, "a chunk after the terminal one"
            whole["text"] += part["text"]
            whole |= {k: part[k] for k in ("finish_reason", "stop_reason")}
            for name in ("prompt_token_ids", "token_ids"):
                if name in part:
                    assert name == "token_ids" or name not in whole
                    whole[name] = whole.get(name, []) + part[name]
            if part["logprobs"] is not None:
                whole["logprobs"] = whole["logprobs"] or {name: [] for name in LOG_NAMES}
                for name in LOG_NAMES:
                    whole["logprobs"][name] += part["logprobs"][name]
            if part["finish_reason"] is not None:
                assert part["text"] == ""
                assert event["seed"] is not None
                assert set(event["timings"]) == TIMING_NAMES
                assert event["on_gpu"] is False
            elif part["text"] == "":
                assert part["logprobs"] or part.get("token_ids"), "an empty chunk"
    return {"choices": [choices[i] for i in sorted(choices)], "usage": usage}


async def both(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """The buffered answer, after a look that the streamed one says the same."""
    whole = (await server.post(body)).json
    stream = joined(await server.post(body | {"stream": True}))
    assert stream["choices"] == whole["choices"], body
    assert stream["usage"] == whole["usage"]
    assert isinstance(whole, dict)
    return whole


@asynchronous
async def test_c39_c43_c44_the_buffered_answer(server: Server) -> None:
    server.engine.say(b" Paris")
    answer = await server.post({"prompt": "hello", "seed": 123, "temperature": 0})
    body = answer.json
    assert set(body) == CHUNK_KEYS | {"seed", "on_gpu", "usage", "timings"}
    assert re.fullmatch(r"cmpl-qwen35-[A-Za-z0-9]{24}", body["id"])
    assert (body["object"], body["model"], body["seed"], body["on_gpu"]) == ("text_completion", "tiny", 123, False)
    assert body["system_fingerprint"] == "qwen35rt-0.1.0-01234567-cpu"
    assert body["choices"] == [
        {"index": 0, "text": " Paris", "finish_reason": "stop", "stop_reason": None, "logprobs": None}
    ]
    assert body["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 6,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert set(body["timings"]) == TIMING_NAMES
    assert body["timings"]["predicted_n"] == 7
    ids = {(await server.post({"prompt": "a"})).json["id"] for _ in range(20)}
    assert len(ids) == 20
    one = (await server.post({"prompt": "a", "max_tokens": 1})).json["timings"]
    assert one["predicted_ms"] is None
    assert one["prompt_ms"] > 0


def test_c43_timings_of_several_turns() -> None:
    a = Timings(cache_n=1, prompt_n=10, prompt_ms=5.0, predicted_n=3, predicted_ms=20.0, queue_ms=1.0, ttft_ms=6.0)
    b = Timings(cache_n=2, prompt_n=20, prompt_ms=4.0, predicted_n=1, predicted_ms=None, queue_ms=30.0, ttft_ms=34.0)
    none = Timings(cache_n=0, prompt_n=0, prompt_ms=None, predicted_n=0, predicted_ms=None, queue_ms=None, ttft_ms=None)
    both = join_timings([a, b, none])
    assert (both.cache_n, both.prompt_n, both.predicted_n) == (3, 30, 4)
    assert (both.queue_ms, both.ttft_ms, both.prompt_ms, both.predicted_ms) == (1.0, 6.0, 5.0, 28.0)
    assert join_timings([none, none]).as_dict()["predicted_per_second"] is None


@asynchronous
async def test_b77_c31_c35_stop_strings(server: Server) -> None:
    server.engine.say(b"A", b"BC", b"DEF", b"G")
    for stop, text, reason, counted in (
        (["CDE"], "AB", "CDE", 3),
        (["CDX"], "ABCDEFG", None, 4),
        (["EF", "DE"], "ABC", "DE", 3),
        ("G", "ABCDEF", "G", 4),
        (["A"], "", "A", 1),
    ):
        body = await both(server, {"prompt": "hello", "stop": stop})
        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", reason)
        assert body["usage"]["completion_tokens"] == counted
    body = await both(server, {"prompt": "hello", "stop": ["CDE"], "include_stop_str_in_output": True})
    assert body["choices"][0]["text"] == "ABCDE"
    body = await both(server, {"prompt": "CDE", "stop": ["CDE"], "echo": True})
    assert body["choices"][0]["text"] == "CDEAB"


@asynchronous
async def test_b77_no_part_of_a_stop_is_sent(server: Server) -> None:
    server.engine.say(b"A", b"BC", b"DEF", b"G")
    stream = await server.post({"prompt": "hello", "stop": ["CDE"], "stream": True})
    assert [c["text"] for e in stream.events for c in e["choices"]] == ["A", "B", ""]
    stream = await server.post({"prompt": "hello", "stop": ["CDX"], "stream": True})
    assert [c["text"] for e in stream.events for c in e["choices"]] == ["A", "B", "CDEF", "G", ""]


@asynchronous
async def test_b79_forms_of_stop(server: Server) -> None:
    server.engine.say(b"a", b"X", b"b")
    for stop, status, text in (
        ("X", 200, "a"),
        (["X"], 200, "a"),
        ([], 200, "aXb"),
        (None, 200, "aXb"),
        ([""], 400, ""),
    ):
        for stream in (False, True):
            answer = await server.post({"prompt": "hello", "stop": stop, "stream": stream})
            assert answer.status == status
            if status == 200:
                assert (answer.text if stream else answer.json["choices"][0]["text"]) == text


@asynchronous
async def test_c30_c34_ends(server: Server, tokenizer: Tokenizer) -> None:
    server.engine.say(b"a", b"b", b"c")
    stop_id = server.engine.ids(b"c")[0]
    body = await both(server, {"prompt": "hello", "stop_token_ids": [stop_id], "logprobs": 1})
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", stop_id)
    assert (body["usage"]["completion_tokens"], choice["logprobs"]["tokens"]) == (2, ["a", "b", "c"])
    for budget, reason in ((2, "length"), (3, "length"), (4, "stop")):
        body = await both(server, {"prompt": "hello", "max_tokens": budget})
        assert body["choices"][0]["finish_reason"] == reason
    body = await both(server, {"prompt": "hello", "max_tokens": 3, "stop": ["c"]})
    assert body["choices"][0]["finish_reason"] == "stop"
    body = await both(server, {"prompt": "hello", "max_tokens": 30, "ignore_eos": True, "seed": 1})
    assert body["choices"][0]["finish_reason"] == "length"
    body = await both(server, {"prompt": "hello", "max_tokens": 30, "min_tokens": 20, "seed": 1})
    assert body["usage"]["completion_tokens"] >= 20


@asynchronous
async def test_b53_b54_characters_split_over_tokens(server: Server) -> None:
    grin = "\U0001f600".encode()
    pieces = [*(bytes([b]) for b in grin), b"\xe3", b"\x81", b"x", b" to"]
    server.engine.script = lambda plan: [i for p in pieces for i in server.engine.ids(p)]
    body = await both(server, {"prompt": "hello", "logprobs": 0})
    assert body["choices"][0]["text"] == "\U0001f600\ufffdx to"
    stream = await server.post({"prompt": "hello", "stream": True})
    parts = [c["text"] for e in stream.events for c in e["choices"]]
    assert parts[0] == "\U0001f600"
    assert "\ufffd" not in parts[0]
    for n in (1, 2, 3):
        body = await both(server, {"prompt": "hello", "max_tokens": n})
        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("\ufffd", "length")
        assert body["usage"]["completion_tokens"] == n


@asynchronous
async def test_c37_control_tokens_in_the_text(server: Server) -> None:
    index = server.engine.tokenizer.vocab.index
    ids = [index["<|vision_start|>"], index["<think>"], *server.engine.ids(b"x")]
    server.engine.script = lambda plan: ids
    assert (await both(server, {"prompt": "a"}))["choices"][0]["text"] == "<think>x"
    body = await both(server, {"prompt": "a", "skip_special_tokens": False, "logprobs": 0})
    assert body["choices"][0]["text"] == "<|vision_start|><think>x"
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 16, 23, 24]


@asynchronous
async def test_c41_token_ids(server: Server, tokenizer: Tokenizer) -> None:
    server.engine.say(b"A", b"BC", b"DEF")
    body = await both(server, {"prompt": ["hello", [70]], "return_token_ids": True, "stop": ["CDE"], "echo": True})
    for choice, ids in zip(body["choices"], (tokenizer.encode("hello"), [70]), strict=True):
        assert choice["prompt_token_ids"] == ids
        assert choice["token_ids"] == server.engine.ids(b"A", b"BC", b"DEF")


@asynchronous
async def test_b81_c48_c49_usage_in_streams(server: Server) -> None:
    for body in (
        {"prompt": "a"},
        {"prompt": "a", "max_tokens": 1},
        {"prompt": ["a", "b"]},
        {"prompt": "a", "max_tokens": 0},
    ):
        whole = (await server.post(body)).json["usage"]
        plain = await server.post(body | {"stream": True})
        with_usage = [e for e in plain.events if "usage" in e]
        assert with_usage == plain.events[-1:]
        assert with_usage[0]["usage"] == whole
        assert with_usage[0]["choices"][0]["finish_reason"]
        for value in (False, None):
            same = await server.post(body | {"stream": True, "stream_options": {"include_usage": value}})
            assert [set(e) for e in same.events] == [set(e) for e in plain.events]
        asked = await server.post(body | {"stream": True, "stream_options": {"include_usage": True}})
        *chunks, terminal, last = asked.events
        assert (last["choices"], last["usage"]) == ([], whole)
        assert terminal["usage"] == whole
        assert all(e["usage"] is None for e in chunks)
        assert asked.lines[-1] == "[DONE]"


@asynchronous
async def test_c46_the_form_of_a_stream(server: Server) -> None:
    stream = await server.post({"prompt": "a", "stream": True, "timings_per_token": True})
    assert stream.headers["cache-control"] == "no-cache"
    assert stream.headers["x-accel-buffering"] == "no"
    assert "content-length" not in stream.headers
    assert re.fullmatch(rb"(data: [^\n]+\n\n)+", stream.body)
    assert [e["timings"]["predicted_n"] for e in stream.events] == [1, 2, 3, 4, 5, 6, 7]
    final = stream.events[-1]["timings"]
    for event in stream.events:
        told = event["timings"]
        assert set(told) == TIMING_NAMES
        for name in ("cache_n", "prompt_n", "prompt_ms", "prompt_per_second", "queue_ms", "ttft_ms"):
            assert told[name] == final[name], name
        assert (told["predicted_ms"] is None) == (told["predicted_n"] == 1)
    assert final["prompt_n"] == 1
    plain = await server.post({"prompt": "a", "stream": True})
    assert ["timings" in e for e in plain.events] == [False] * (len(plain.events) - 1) + [True]


@asynchronous
async def test_c54_echo(server: Server, tokenizer: Tokenizer) -> None:
    text = "he <|im_start|>\u1e9b\u0323 x"
    body = await both(server, {"prompt": text, "echo": True})
    assert body["choices"][0]["text"] == text + " to be"
    ids = tokenizer.encode("he <|im_start|>x", special=True)
    body = await both(server, {"prompt": ids, "echo": True})
    assert body["choices"][0]["text"] == "he <|im_start|>x to be"
    stream = await server.post({"prompt": text, "echo": True, "stream": True})
    assert stream.events[0]["choices"][0]["text"] == text


@asynchronous
async def test_c54_c58_an_echoed_prompt_with_logprobs_is_the_first_chunk(server: Server, tokenizer: Tokenizer) -> None:
    """It goes out when the prompt is computed, long before the answer ends, and the answer's text follows live."""
    server.engine.forever(b"x")
    server.engine.delay = 0.005
    body = {"prompt": "hello you", "echo": True, "logprobs": 1, "max_tokens": 100, "stream": True}
    stream = await started(server.begin(body), 3)
    assert not stream.task.done()
    assert len(stream.events) < 50
    (first,), (second,), (third,) = (e["choices"] for e in stream.events[:3])
    assert (first["text"], first["finish_reason"]) == ("hello you", None)
    spelled = [tokenizer.decode([i]) for i in tokenizer.encode("hello you")]
    assert first["logprobs"]["tokens"] == spelled
    assert [value is None for value in first["logprobs"]["token_logprobs"]] == [True] + [False] * (len(spelled) - 1)
    for choice in (second, third):
        assert (choice["text"], choice["logprobs"]["tokens"]) == ("x", ["x"])
    await stream.end()
    assert stream.text == "hello you" + 100 * "x"


@asynchronous
async def test_c54_an_echoed_prompt_comes_once_where_nothing_is_drawn_or_seen(server: Server) -> None:
    server.engine.say(b"A", b"B")
    for more in ({"max_tokens": 0}, {"stop": ["AB"]}, {"max_tokens": 1, "stop": ["AB"]}):
        body = {"prompt": ["hello", "he"], "echo": True, "logprobs": 0, **more}
        await both(server, body)
        stream = await server.post(body | {"stream": True})
        for index, text in enumerate(("hello", "he")):
            parts = [c["text"] for e in stream.events for c in e["choices"] if c["index"] == index]
            assert parts[0] == text


@asynchronous
async def test_c56_evaluation_harnesses_get_prompt_plus_one(server: Server) -> None:
    for n in (1, 2, 30):
        body = await both(server, {"prompt": [70 + i for i in range(n)], "echo": True, "logprobs": 1, "max_tokens": 1})
        log = body["choices"][0]["logprobs"]
        assert {len(log[name]) for name in LOG_NAMES} == {n + 1}
        assert (log["token_logprobs"][0], log["top_logprobs"][0]) == (None, None)
        assert all(value <= 0 for value in log["token_logprobs"][1:])


@asynchronous
async def test_b86_c55_c57_logprobs(server: Server, tokenizer: Tokenizer) -> None:
    noise = server.engine._noise
    server.engine.say(b"word ", b"\xf0", b"BC")
    for k in (0, 1, 5, 20):
        answers = [
            (await both(server, {"prompt": "a", "logprobs": k, "temperature": t, "presence_penalty": 1, "seed": 1}))
            for t in (0, 2)
        ]
        logs = [a["choices"][0]["logprobs"] for a in answers]
        assert logs[0] == logs[1]
        for at, token in enumerate(server.engine.ids(b"word ", b"\xf0", b"BC")):
            row = noise[at].astype(np.float64)
            row[token] = SURE
            wanted = row - row.max() - np.log(np.exp(row - row.max()).sum())
            top = logs[0]["top_logprobs"][at]
            assert len(top) == max(k, 1)
            assert next(iter(top)) == logs[0]["tokens"][at]
            assert top[logs[0]["tokens"][at]] == logs[0]["token_logprobs"][at]
            assert logs[0]["token_logprobs"][at] == pytest.approx(wanted[token], abs=1e-4)
            assert list(top.values()) == sorted(top.values(), reverse=True)
            assert list(top.values()) == pytest.approx(np.sort(wanted)[::-1][: len(top)].tolist(), abs=1e-4)
        assert logs[0]["tokens"] == ["word ", "bytes:\\xf0", "BC", "<|im_end|>"]
        assert logs[0]["text_offset"] == [0, 5, 5, 8]
        text = answers[0]["choices"][0]["text"]
        spelled = b"".join(bytes(b) for b in logs[0]["bytes"][:-1]).decode("utf-8", "replace")
        assert spelled == text == "word \ufffdBC"


@asynchronous
async def test_c57_offsets_are_capped_at_the_text(server: Server) -> None:
    server.engine.say(b"A", b"BC", b"DEF", b"G")
    for stop, offsets in ((["CDE"], [0, 1, 2]), (["A"], [0]), (["BCDEFG"], [0, 1, 1, 1])):
        body = await both(server, {"prompt": "a", "stop": stop, "logprobs": 0})
        assert body["choices"][0]["logprobs"]["text_offset"] == offsets
    # The third token waits although text goes out with it: that is the first one's.
    server.engine.say(b"b", b"b", b"b", b"x")
    body = await both(server, {"prompt": "a", "stop": ["bbc"], "logprobs": 0})
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    server.engine.say(b"A", b"BC", b"DEF", b"G")
    body = await both(server, {"prompt": "hello", "stop": ["CDE"], "logprobs": 0, "echo": True})
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 5, 6, 7]


@asynchronous
async def test_c3_c58_streams_equal_buffered_answers(make: Make, tokenizer: Tokenizer) -> None:
    server = make(n_ctx=128)
    rng = random.Random("c3")
    pool = [*server.engine.ids(b"A", b"BC", b"DEF", b"word ", b"longer", b"a", b"b", b"c"), *range(0, 256, 5)]
    pool += [tokenizer.vocab.index[m] for m in ("<think>", "<|vision_start|>")]
    stops = ["CDE", "BC", "word", "rd l", "\ufffd", "aa", "ab", "abc", "EF", "longerlonger"]
    for _ in range(60):
        script = [rng.choice(pool) for _ in range(rng.randrange(0, 25))]
        server.engine.script = lambda plan, script=script: script  # type: ignore[misc]
        body: dict[str, Any] = {"prompt": rng.choice(["a", "hello \u00e9", [70, 71], ["x", [80]]]), "seed": 5}
        if rng.random() < 0.7:
            body["stop"] = rng.sample(stops, rng.randrange(1, 4))
        if rng.random() < 0.5:
            body["logprobs"] = rng.randrange(3)
        for name in ("echo", "return_token_ids", "include_stop_str_in_output", "ignore_eos"):
            body[name] = rng.random() < 0.3
        body["skip_special_tokens"] = rng.random() < 0.7
        body["max_tokens"] = rng.choice([0, 1, 5, 40])
        body["temperature"] = rng.choice([0, 1])
        await both(server, body)
    assert server.idle


@asynchronous
async def test_text_of_answers_is_plain_json(server: Server) -> None:
    server.engine.say(b'"', b"\\", b"\n", b"\x00", b"\r")
    body = await both(server, {"prompt": "a"})
    assert body["choices"][0]["text"] == '"\\\n\0\r'
    stream = await server.post({"prompt": "a", "stream": True})
    assert json.loads(stream.lines[2])["choices"][0]["text"] == "\n"
