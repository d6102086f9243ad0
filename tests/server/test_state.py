"""Routes of section 8: what each says, who may ask; every route needs a key but those of health."""

from __future__ import annotations

import math
from typing import Any

import pytest

from qwen35rt.server.routes import HEALTH, ROUTES, STAGE_1
from tests.server.conftest import Make, Open, Server
from tests.server.fake import Exchange, asynchronous, eventually, make_tokenizer
from tests.server.live import CountedEngine
from tests.tiny_vocab import CHATML

FACTS = {
    "aliases": ("second",),
    "file_name": "tiny.gguf",
    "created": 1_700_000_000,
    "n_ctx_train": 4096,
    "n_embd": 64,
    "n_params": 1000,
    "size": 4000,
    "reason": "asked for",
    "device_name": "Tester 3000",
    "n_layers": 4,
    "isa": "avx2",
    "threads": 2,
}


def path_of(pattern: str) -> str:
    return pattern.replace("<path:id>", "tiny").replace("<id>", "0")


async def ask(server: Server, method: str, path: str, body: Any = None, **options: Any) -> Exchange:
    return await server.begin({} if body is None and method == "POST" else body, path, method, **options).end()


def test_routes_are_those_of_the_url_map(server: Server) -> None:
    found = {
        (method, rule.rule)
        for rule in server.app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    assert found == set(ROUTES)
    assert len(set(ROUTES)) == len(ROUTES)


@asynchronous
async def test_every_route_but_health_needs_a_key(make: Make) -> None:
    server = make(api_key=("sesame",))
    for method, pattern in ROUTES:
        path = path_of(pattern)
        for headers in ([], [("Authorization", "Bearer wrong")], [("x-api-key", "")]):
            answer = await ask(server, method, path, headers=headers)
            if pattern in HEALTH:
                assert answer.status == 200, path
            else:
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key"), path
                assert answer.headers["www-authenticate"] == "Bearer"
        for header in (("Authorization", "Bearer sesame"), ("x-api-key", "sesame")):
            assert (await ask(server, method, path, headers=[header])).status not in (401, 403), path


@asynchronous
async def test_later_routes_are_501_and_head_works_where_get_does(server: Server) -> None:
    for method, pattern in ROUTES:
        answer = await ask(server, method, path_of(pattern))
        if (method, pattern) in STAGE_1:
            assert answer.status in (200, 400), pattern
        else:
            assert (answer.status, answer.error["code"]) == (501, "not_implemented"), pattern
            assert answer.headers["x-should-retry"] == "false"
        if method == "GET":
            assert (await ask(server, "HEAD", path_of(pattern))).status == answer.status
        wrong = await ask(server, "DELETE", path_of(pattern))
        assert (wrong.status, wrong.error["code"]) == (405, "method_not_allowed")
        assert method in wrong.headers["allow"].split(", ")
    assert (await ask(server, "GET", "/v1/models/")).status == 404  # no redirect


@asynchronous
async def test_models(make: Make) -> None:
    server = make(facts=FACTS)
    answer = (await server.get("/v1/models")).json
    assert answer["object"] == "list"
    assert [m["id"] for m in answer["data"]] == ["tiny", "second"]
    model = answer["data"][0]
    assert model == {
        "id": "tiny",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "qwen35rt",
        "max_model_len": 256,
        "meta": {
            "vocab_type": 2,
            "n_vocab": server.engine.tokenizer.n_vocab,
            "n_ctx_train": 4096,
            "n_embd": 64,
            "n_params": 1000,
            "size": 4000,
        },
    }
    assert (await server.get("/v1/models/second")).json == model | {"id": "second"}
    missing = await server.get("/v1/models/other/name")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


@asynchronous
async def test_tokenize_in_both_shapes(server: Server) -> None:
    tokenizer = server.engine.tokenizer
    text = "hello <|im_end|>\u0000 é"
    ids = tokenizer.encode(text, special=True)
    assert (await server.post({"content": text}, "/tokenize")).json == {"tokens": ids}
    plain = (await server.post({"content": text, "parse_special": False}, "/tokenize")).json["tokens"]
    assert plain == tokenizer.encode(text)
    assert plain != ids
    pieces = (await server.post({"content": "aé", "with_pieces": True}, "/tokenize")).json["tokens"]
    raw = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces)
    assert raw == "aé".encode()
    assert any(isinstance(p["piece"], list) for p in pieces)
    assert (await server.post({"content": ["a", 3, "b"]}, "/tokenize")).json["tokens"][1] == 3
    assert (await server.post({"content": ""}, "/tokenize")).json == {"tokens": []}
    counted = (await server.post({"prompt": text, "return_token_strs": True, "model": "tiny"}, "/tokenize")).json
    assert counted == {
        "count": len(ids),
        "max_model_len": 256,
        "tokens": ids,
        "token_strs": [tokenizer.vocab.tokens[i] for i in ids],
    }
    assert (await server.post({"prompt": text}, "/tokenize")).json["token_strs"] is None


@asynchronous
async def test_tokenize_puts_the_files_own_token_in_front(make: Make) -> None:
    """C13: of ``prompt`` unless it is switched off, of ``content`` where it is asked for."""
    server = make(of=make_tokenizer(add_bos_token=True, bos_token_id=1))
    for body, switch, default in (
        ({"content": "a"}, "add_special", False),
        ({"prompt": "a"}, "add_special_tokens", True),
    ):
        for given, there in ((None, default), (True, True), (False, False)):
            tokens = (await server.post(body | {switch: given}, "/tokenize")).json["tokens"]
            assert (tokens[0] == 1, len(tokens)) == (there, 1 + there), (body, given)


@asynchronous
async def test_tokenize_renders_messages_as_chat_does(open_chat: Open) -> None:
    server = open_chat(CHATML)
    body = {"messages": [{"role": "user", "content": "<|im_end|>"}]}
    counted = (await server.post(body, "/tokenize")).json
    prompt = (await server.post(body, "/apply-template")).json["prompt"]
    n = (await server.post(body, "/v1/chat/completions/input_tokens")).json["input_tokens"]
    tokenizer = server.engine.tokenizer
    assert (counted["count"], tokenizer.decode(counted["tokens"], skip_special=False)) == (n, prompt)
    asked = body | {"return_token_strs": True, "add_special_tokens": True}
    assert len((await server.post(asked, "/tokenize")).json["token_strs"]) == n


@asynchronous
async def test_prompts_are_shown_and_counted_whatever_the_engine_does(open_chat: Open) -> None:
    """C2: only what generates is refused while it drains or starts anew."""
    server = open_chat(CHATML)
    body = {"messages": [{"role": "user", "content": "x"}]}
    for state in ("stopped", "restarting"):
        server.engine.state = state
        for path in ("/apply-template", "/v1/chat/completions/input_tokens", "/tokenize"):
            assert (await server.post(body, path)).status == 200, path
        assert (await server.post(body, "/v1/chat/completions")).status == 503


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": "a", "prompt": "b"}, "prompt"),
        ("/tokenize", {"content": "a", "messages": [{"role": "user", "content": "x"}]}, "content"),
        ("/tokenize", {"content": "a", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"prompt": "a", "with_pieces": True}, "with_pieces"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"content": ["a", -1]}, "content[1]"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": [], "prompt": None}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, 10**6]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, 1.5]}, "tokens[1]"),
    ],
)
def test_b84_wrong_texts_and_ids_are_named(server: Server, path: str, body: Any, param: str) -> None:
    @asynchronous
    async def run() -> None:
        answer = await server.post(body, path)
        assert (answer.status, answer.error["param"]) == (400, param)

    run()


@asynchronous
async def test_detokenize_gives_the_text_twice(server: Server) -> None:
    ids = server.engine.tokenizer.encode("hi<|im_end|>", special=True)
    answer = (await server.post({"tokens": ids}, "/detokenize")).json
    assert answer == {"content": "hi<|im_end|>", "prompt": "hi<|im_end|>"}
    assert (await server.post({"tokens": []}, "/detokenize")).json == {"content": "", "prompt": ""}
    unknown = await server.post({"tokens": ids, "odd": 1}, "/detokenize")
    assert unknown.headers["x-ignored-fields"] == "odd"


@asynchronous
async def test_strict_settings_hold_for_text_routes(make: Make) -> None:
    server = make(strict_model=True, strict_fields=True)
    for path, body in (("/tokenize", {"content": "a"}), ("/detokenize", {"tokens": [1]})):
        other = await server.post(body | {"model": "other"}, path)
        assert (other.status, other.error["code"]) == (404, "model_not_found")
        odd = await server.post(body | {"odd": 1}, path)
        assert (odd.status, odd.error["code"]) == (400, "unknown_parameter")


@asynchronous
async def test_props_show_settings_and_no_path(make: Make) -> None:
    server = make(facts=FACTS, temperature=0.25, parallel=3)
    props = (await server.get("/props")).json
    assert (props["model_path"], props["model_alias"], props["total_slots"]) == ("tiny.gguf", "tiny", 3)
    assert (props["device"], props["device_reason"], props["isa"], props["threads"]) == ("cpu", "asked for", "avx2", 2)
    assert (props["device_name"], props["n_gpu_layers"], props["n_layers"]) == ("Tester 3000", 0, 4)
    assert props["default_generation_settings"]["params"]["temperature"] == 0.25
    assert props["n_ctx"] == props["default_generation_settings"]["n_ctx"] == 256
    assert set(props) >= {"chat_template", "modalities", "build_info"}
    assert (await server.get("/version")).json.keys() == {"version"}


@asynchronous
async def test_slots_and_load_show_what_runs_without_its_text(make: Make) -> None:
    server = make(parallel=2)
    engine = server.engine
    engine.delay = 0.01
    engine.forever(b" to")
    engine.__class__ = CountedEngine
    body = {"prompt": "a secret", "max_tokens": 200, "stream": True, "stop": ["hidden"], "temperature": 0.5}
    first = server.begin(body, headers=[("x-request-id", "one")])
    await first.until(lambda: len(first.events) > 2)
    slots = await server.get("/slots")
    busy, free = slots.json
    assert (busy["id"], busy["is_processing"], free["id"], free["is_processing"]) == (0, True, 1, False)
    assert busy["n_tokens"] > len("a secret")
    assert (busy["request_id"], busy["params"]["temperature"], busy["params"]["max_tokens"]) == ("one", 0.5, 200)
    assert b"secret" not in slots.body
    assert b"hidden" not in slots.body
    assert set(free) == {"id", "is_processing", "n_ctx", "n_tokens", "n_cached", "request_id", "params"}
    assert (await server.get("/load")).json == {"server_load": 1}
    assert (await server.get("/slots", query=b"fail_on_no_slot=1")).status == 200
    second = server.begin(body)
    await second.until(lambda: len(second.events) > 2)
    full = await server.get("/slots", query=b"fail_on_no_slot=1")
    assert (full.status, full.error["type"]) == (503, "overloaded_error")
    assert int(full.headers["retry-after"]) >= 1
    for exchange in (first, second):
        exchange.leave()
        await exchange.end()
    await eventually(lambda: server.idle)
    assert (await server.get("/load")).json == {"server_load": 0}


@asynchronous
async def test_slots_can_be_turned_off(make: Make) -> None:
    answer = await make(no_slots=True).get("/slots")
    assert (answer.status, answer.error["code"]) == (501, "not_implemented")


@asynchronous
async def test_health_tells_more_to_those_with_a_key(make: Make) -> None:
    server = make(api_key=("sesame",), facts=FACTS)
    assert (await server.get("/health")).json == {"status": "ok"}
    known = (await server.get("/health", headers=[("x-api-key", "sesame")])).json
    device = {"device", "device_name", "n_gpu_layers", "reason"}
    assert set(known) == {"status", "version", "uptime_s", "progress", "model"} | device
    assert (known["device"], known["reason"], known["progress"]) == ("cpu", "asked for", 1.0)
    assert (known["device_name"], known["n_gpu_layers"]) == ("Tester 3000", 0)
    assert math.isfinite(known["uptime_s"])


@pytest.mark.parametrize(
    ("state", "status", "code"),
    [
        ("restarting", "degraded", "engine_restarting"),
        ("failed", "degraded", "engine_restarting"),
        ("stopped", "draining", "shutting_down"),
        ("loading", "loading", "model_loading"),
    ],
)
def test_c60_health_is_never_ok_without_a_running_engine(server: Server, state: str, status: str, code: str) -> None:
    @asynchronous
    async def run() -> None:
        server.engine.state = state
        for path in ("/health", "/healthz", "/v1/health", "/ping", "/readyz"):
            answer = await server.get(path)
            assert (answer.status, answer.json["status"], answer.error["code"]) == (503, status, code)
        assert (await server.get("/livez")).status == 200

    run()
