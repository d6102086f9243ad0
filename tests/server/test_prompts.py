"""Prompts, their tokens, budget and seed (completions.md, sections 3 and 4)."""

from __future__ import annotations

from typing import Any

import pytest

from qwen35rt.tokenizer import Tokenizer
from tests.server.conftest import Make, Server
from tests.server.fake import asynchronous, make_tokenizer

NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
INTEGERS = ("top_k", "max_tokens", "seed", "min_tokens", "logprobs", "repeat_last_n")
ODD = ("NaN", "Infinity", "-Infinity", "1e308", "1e999", '"1"', "true", "[]", "{}", "9" * 5000)


@asynchronous
async def test_c13_c14_prompts_are_tokenised_as_they_are(server: Server, tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\n<think> hello"
    for special in (True, False):
        await server.post({"prompt": text, "parse_special": special, "max_tokens": 1})
        assert server.engine.submitted[-1].ids == tuple(tokenizer.encode(text, special=special))
    await server.post({"prompt": text, "max_tokens": 1})
    assert server.engine.submitted[-1].ids == tuple(tokenizer.encode(text, special=True))
    assert tokenizer.encode(text, special=True) != tokenizer.encode(text)


@asynchronous
async def test_c13_the_beginning_token_stands_before_text_only(make: Make) -> None:
    tokenizer = make_tokenizer(add_bos_token=True, bos_token_id=1)
    server = make(of=tokenizer)
    prompts: list[tuple[Any, bool]] = [("ab", True), ([70, 71], False), ([[70, "ab"]], False), ([["ab", 70]], True)]
    for prompt, bos in prompts:
        await server.post({"prompt": prompt, "max_tokens": 1})
        assert (server.engine.submitted[-1].ids[0] == 1) == bos, prompt
    answer = await server.post({"prompt": "", "max_tokens": 1})
    assert answer.error["code"] == "empty_prompt"


@asynchronous
async def test_c15_several_prompts_are_independent(server: Server, tokenizer: Tokenizer) -> None:
    server.engine.script = lambda plan: tokenizer.encode(f"{len(plan.ids)}!" * len(plan.ids))
    prompts: list[Any] = ["a", "bcd", [70, 71], [72, "zz", 73], "e"]
    whole = await server.post({"prompt": prompts, "logprobs": 1, "echo": True})
    assert [c["index"] for c in whole.json["choices"]] == [0, 1, 2, 3, 4]
    for prompt, choice in zip(prompts, whole.json["choices"], strict=True):
        alone = await server.post({"prompt": [prompt], "logprobs": 1, "echo": True})
        assert alone.json["choices"][0] | {"index": choice["index"]} == choice
    usage = whole.json["usage"]
    assert usage["prompt_tokens"] == 1 + 3 + 2 + 4 + 1
    assert whole.json["timings"]["predicted_n"] == usage["completion_tokens"] + 5
    assert len({plan.seed for plan in server.engine.submitted[:5]}) == 1


@asynchronous
async def test_c15_prompts_share_one_place(make: Make) -> None:
    server = make(parallel=1, queue=0)
    assert (await server.post({"prompt": ["a"] * 20})).status == 200
    assert server.idle


@asynchronous
async def test_c16_b84_empty_prompts(server: Server) -> None:
    empty: list[Any] = ["", None, [], [[]], ["a", ""], ["a", []]]
    for prompt in empty:
        answer = await server.post({"prompt": prompt})
        assert (answer.status, answer.error["code"]) == (400, "empty_prompt"), prompt
    assert (await server.post({})).error["code"] == "empty_prompt"
    assert (await server.post({"prompt": ["a", ""]})).error["param"] == "prompt[1]"
    assert server.idle


@asynchronous
async def test_c16_b84_ids_outside_the_vocabulary_are_named(server: Server, tokenizer: Tokenizer) -> None:
    for bad in (-1, tokenizer.n_vocab, 2**40):
        assert (await server.post({"prompt": [1, 2, bad]})).error["param"] == "prompt[2]"
        assert (await server.post({"prompt": ["a", [5, bad]]})).error["param"] == "prompt[1][1]"
    assert (await server.post({"prompt": [0, tokenizer.n_vocab - 1]})).status == 200


@asynchronous
async def test_c16_a_tokeniser_fault_is_not_an_empty_prompt(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(text: str, special: bool = False) -> list[int]:
        raise ValueError("ranks are broken")

    with monkeypatch.context() as patched:
        patched.setattr(server.engine.tokenizer, "encode", fail)
        answer = await server.post({"prompt": "a"})
    assert (answer.status, answer.error["code"]) == (500, "tokenizer_error")
    assert "ranks are broken" in answer.error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert server.idle


@asynchronous
async def test_c17_texts_too_long_by_their_size_are_not_tokenised(
    server: Server, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    calls = []
    encode = tokenizer.encode

    def counted(text: str, special: bool = False) -> list[int]:
        calls.append(text)
        return encode(text, special)

    monkeypatch.setattr(tokenizer, "encode", counted)
    longest = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.n_vocab))
    assert server.service.model.longest_token == longest
    answer = await server.post({"prompt": "x" * longest * 256})
    assert answer.error["n_prompt_tokens"] == 256
    assert "at least 256 tokens" in answer.error["message"]
    answer = await server.post({"prompt": "é" * longest * 1024})
    assert "at least 512 tokens" in answer.error["message"]
    assert calls == []
    # Precomposed and decomposed text: the bound never exceeds the true number.
    for text in ("<|vision_start|>" * 200, "\u1fbe\u0308\u0301" * 200, "\u212a" * 200):
        assert server.service.model.fewest_tokens(text) <= len(encode(text, True))


@asynchronous
async def test_b83_c18_prompts_as_long_as_the_context_are_refused_whole(server: Server) -> None:
    server.engine.forever(b"x")
    answer = await server.post({"prompt": [70] * 255})
    assert answer.json["choices"][0]["finish_reason"] == "length"
    assert answer.json["usage"]["completion_tokens"] == 1
    for n in (256, 1000):
        for stream in (False, True):
            answer = await server.post({"prompt": [70] * n, "stream": stream})
            error = answer.error
            assert (answer.status, error["type"]) == (400, "exceed_context_size_error")
            assert (error["code"], error["n_prompt_tokens"], error["n_ctx"]) == ("context_length_exceeded", n, 256)
            assert str(n) in error["message"]
            assert "256" in error["message"]
            assert "not truncated" in error["message"]
    assert (await server.post({"prompt": "ab " * 200})).error["n_prompt_tokens"] >= 256
    assert server.idle


@asynchronous
async def test_c22_no_tokens_are_asked_for(server: Server) -> None:
    answer = await server.post({"prompt": "abc", "max_tokens": 0})
    choice = answer.json["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert answer.json["usage"]["completion_tokens"] == 0
    assert answer.json["timings"]["predicted_ms"] is None
    assert answer.json["on_gpu"] is False
    answer = await server.post({"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 0})
    choice = answer.json["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]


@asynchronous
async def test_c26_c27_seeds(server: Server) -> None:
    plain = {"prompt": "a", "temperature": 1, "max_tokens": 12}
    server.engine.script = lambda plan: []  # SURE lands on the end-of-turn token, which is banned here:
    body = plain | {"ignore_eos": True, "top_k": 0}
    answers = [(await server.post(body)).json for _ in range(2)]
    assert answers[0]["seed"] != answers[1]["seed"]
    assert answers[0]["choices"][0]["text"] != answers[1]["choices"][0]["text"]
    assert all(0 <= a["seed"] < 2**53 for a in answers)
    again = (await server.post(body | {"seed": answers[0]["seed"]})).json
    assert again["choices"] == answers[0]["choices"]
    assert (await server.post(body | {"seed": -1})).json["seed"] >= 0
    two = (await server.post(body | {"prompt": ["a", "a"], "seed": 3})).json["choices"]
    assert two[0]["text"] == two[1]["text"]


@asynchronous
async def test_b84_a_large_text_does_not_hurt(server: Server) -> None:
    answer = await server.post({"prompt": "hello " * 1_700_000})
    assert answer.error["code"] == "context_length_exceeded"
    answer = await server.post({"prompt": "a", "x": ["y"] * 2_000_000})
    assert answer.status == 200


@asynchronous
async def test_c29_c41_what_a_plan_is_told(server: Server) -> None:
    await server.post({"prompt": "a", "cache_prompt": False, "skip_special_tokens": False})
    plan = server.engine.submitted[-1]
    assert (plan.cache, plan.skip_special, plan.include_stop, plan.prompt_logprobs) == (False, False, False, False)
    await server.post({"prompt": "a", "include_stop_str_in_output": True, "echo": True, "logprobs": 1})
    plan = server.engine.submitted[-1]
    assert (plan.cache, plan.skip_special, plan.include_stop, plan.prompt_logprobs) == (True, True, True, True)
