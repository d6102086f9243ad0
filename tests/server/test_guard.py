"""What is refused before a body is read: routes, Host, Origin, keys, sizes, and in which order (C4)."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from qwen35rt.server.app import ROUTES, Route, create_app
from qwen35rt.server.model import Loaded
from qwen35rt.server.service import Service
from qwen35rt.server.settings import ServerSettings
from qwen35rt.tokenizer import Tokenizer
from tests.server.conftest import Make, Server
from tests.server.fake import Exchange, FakeEngine, asynchronous, loaded

HEALTH = ("/health", "/healthz", "/v1/health", "/ping", "/livez", "/readyz")


def concrete(route: Route) -> str:
    """A path that a route's pattern matches."""
    return route.path.replace("<path:id>", "x").replace("<id>", "0")


@asynchronous
async def test_unknown_routes_and_methods(server: Server) -> None:
    for path in ("/nope", "/v1/completions/", "/v1//completions", "/health/"):
        answer = await server.post({"prompt": "a"}, path)
        assert (answer.status, answer.error["code"]) == (404, "route_not_found"), path
        assert "location" not in answer.headers
    for method, path, allowed in (("GET", "/v1/completions", "POST"), ("DELETE", "/health", "GET, HEAD")):
        answer = await server.begin(None, path, method).end()
        assert (answer.status, answer.error["code"], answer.headers["allow"]) == (405, "method_not_allowed", allowed)
    assert (await server.begin(None, "/v1/completions", "OPTIONS").end()).status == 405


@asynchronous
async def test_web_sockets_are_refused(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Without a fault of the application, which would put a stack into the log for whoever asks."""
    sent: list[Any] = []
    coming: list[dict[str, Any]] = [{"type": "websocket.disconnect", "code": 1006}, {"type": "websocket.connect"}]

    async def receive() -> dict[str, Any]:
        return coming.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    app: Any = server.app
    scope: dict[str, Any] = {
        "type": "websocket",
        "path": "/v1/models",
        "raw_path": b"/v1/models",
        "root_path": "",
        "scheme": "ws",
    }
    scope |= {"query_string": b"", "headers": [(b"host", b"localhost")], "subprotocols": [], "http_version": "1.1"}
    scope |= {"asgi": {"spec_version": "2.3"}, "extensions": {}}
    await app(scope, receive, send)
    assert sent == [{"type": "websocket.close"}]
    assert not caplog.records


@asynchronous
async def test_head_works_where_get_does(server: Server) -> None:
    for path in HEALTH:
        answer = await server.begin(None, path, "HEAD").end()
        assert (answer.status, answer.body) == (200, b"")


@asynchronous
async def test_routes_of_later_stages_answer_501_by_name(server: Server) -> None:
    later = [r for r in ROUTES if r.handler is None]
    assert later
    for route in later:
        answer = await server.begin(None, concrete(route), route.methods[0]).end()
        assert (answer.status, answer.error["code"]) == (501, "not_implemented"), route
        assert answer.headers["x-should-retry"] == "false"
        assert route.path in answer.error["message"]


@asynchronous
async def test_every_route_but_health_needs_a_key(make: Make) -> None:
    server = make(api_key=("right", "other"))
    paths = {concrete(r): r for r in ROUTES}
    rules = {rule.rule for rule in server.app.url_map.iter_rules()}
    assert rules == {r.path for r in ROUTES}
    for path, route in paths.items():
        method = route.methods[0]
        for headers in (
            [],
            [("Authorization", "Bearer wrong")],
            [("X-Api-Key", "")],
            [("Authorization", "Basic right")],
        ):
            answer = await server.begin(b"", path, method, headers).end()
            if path in HEALTH:
                assert answer.status == 200
                assert "version" not in answer.json
            else:
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key"), path
                assert answer.headers["www-authenticate"] == "Bearer"
    bodies = set()
    for headers in ([], [("Authorization", "Bearer wrong")]):
        bodies.add((await server.post({"prompt": "a"}, headers=headers)).body)
    assert len(bodies) == 1, "a missing and a wrong key must look alike"
    for headers in ([("Authorization", "Bearer right")], [("authorization", "bearer other")], [("X-Api-Key", "other")]):
        assert (await server.post({"prompt": "a"}, headers=headers)).status == 200
    assert "version" in (await server.get("/health", headers=[("X-Api-Key", "right")])).json


@asynchronous
async def test_host_on_loopback(make: Make) -> None:
    server = make(allowed_hosts=("box.lan",))
    for host in ("localhost", "localhost:8080", "a.localhost", "127.0.0.1:1", "[::1]:80", "10.0.0.3", "BOX.lan:99"):
        assert (await server.get("/health", headers=[("Host", host)])).status == 200, host
    odd = "a..b", "a" * 64 + ".example", "xn--zzzz--.example"  # not even names
    for host in ("evil.example", "localhost.evil.example", "", "a b", "[::1", "box.lan.x:1", "localhost:x", *odd):
        answer = await server.get("/health", headers=[("Host", host)])
        assert (answer.status, answer.error["code"]) == (403, "host_not_allowed"), host
    server = make(host="0.0.0.0", api_key=("k",))
    for host in ("any.example", *odd):
        assert (await server.get("/health", headers=[("Host", host)])).status == 200, host


@asynchronous
async def test_origins(make: Make) -> None:
    server = make(cors_origins=("https://good.example",))
    for origin in ("https://evil.example", "null", "http://good.example", "https://good.example.evil", "", "http://[x"):
        for method in ("POST", "OPTIONS"):
            headers = [("Origin", origin), ("Access-Control-Request-Method", "POST")]
            answer = await server.begin({"prompt": "a"}, method=method, headers=headers).end()
            assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed"), origin
            assert not [h for h in answer.headers if h.startswith("access-control")]
        assert (await server.get("/health", headers=[("Origin", origin)])).status == 200
    for origin in ("http://localhost:3000", "http://127.0.0.1", "http://[::1]:5"):
        answer = await server.post({"prompt": "a"}, headers=[("Origin", origin)])
        assert answer.status == 200
        assert "access-control-allow-origin" not in answer.headers
    answer = await server.post({"prompt": "a"}, headers=[("Origin", "https://good.example")])
    assert answer.headers["access-control-allow-origin"] == "https://good.example"
    assert answer.headers["vary"] == "Origin"
    assert "access-control-allow-credentials" not in answer.headers


@asynchronous
async def test_preflight_needs_no_key(make: Make) -> None:
    server = make(cors_origins=("https://good.example",), api_key=("k",))
    headers = [("Origin", "https://good.example"), ("Access-Control-Request-Method", "POST")]
    answer = await server.begin(None, "/v1/completions", "OPTIONS", headers).end()
    assert answer.status == 204
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()
    assert (await server.post({"prompt": "a"}, headers=headers[:1])).status == 401
    star = make(cors_origins=("*",))
    answer = await star.post({"prompt": "a"}, headers=headers[:1])
    assert answer.headers["access-control-allow-origin"] == "*"


@asynchronous
async def test_media_types_and_encodings(server: Server) -> None:
    for kind in ("application/json", "application/json; charset=utf-8", "APPLICATION/JSON", ""):
        assert (await server.post({"prompt": "a"}, headers=[("Content-Type", kind)])).status == 200
    for name, value in (
        ("Content-Type", "text/plain"),
        ("Content-Type", "application/x-www-form-urlencoded"),
        ("Content-Encoding", "gzip"),
    ):
        answer = await server.post({"prompt": "a"}, headers=[(name, value)])
        assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")


@asynchronous
async def test_sizes_of_bodies_and_headers(make: Make) -> None:
    server = make(max_body=1000)
    body = {"prompt": "a" * 2000}
    for headers in ([("Content-Length", "2016")], [("Content-Length", "9" * 4000)], []):
        answer = await server.post(body, headers=headers)
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
    many = [(f"x-{i}", "v") for i in range(100)]
    assert (await server.post({"prompt": "a"}, headers=many)).status == 431
    assert (await server.post({"prompt": "a"}, headers=many[:99])).status == 200
    assert (await server.post({"prompt": "a"}, headers=[("x", "v" * 17_000)])).status == 431


@asynchronous
async def test_a_body_that_never_ends(make: Make) -> None:
    server = make(body_timeout=0.1)
    answer = await server.begin(b'{"prompt": ', complete=False).end()
    assert (answer.status, answer.error["code"]) == (408, "body_timeout")


@asynchronous
async def test_c4_the_first_check_that_fails_answers(make: Make) -> None:
    server = make(api_key=("k",), max_body=1000)
    server.engine.state = "restarting"
    key = ("X-Api-Key", "k")
    bad_host, big, kind = ("Host", "evil.example"), ("Content-Length", "5000"), ("Content-Type", "text/html")
    steps: list[tuple[str, str, list[tuple[str, str]], Any, str]] = [
        ("POST", "/nope", [bad_host, big, kind], b"{", "route_not_found"),
        ("PUT", "/v1/completions", [bad_host, big, kind], b"{", "method_not_allowed"),
        ("POST", "/v1/completions", [bad_host, big, kind], b"{", "host_not_allowed"),
        ("POST", "/v1/completions", [big, kind], b"{", "invalid_api_key"),
        ("POST", "/v1/completions", [key, big, kind], b"{", "request_too_large"),
        ("POST", "/v1/completions", [key, kind], b"{", "unsupported_media_type"),
        ("POST", "/v1/completions", [key], b"{", "invalid_json"),
        ("POST", "/v1/completions", [key], {"prompt": "a", "top_p": 7}, "invalid_value"),
        ("POST", "/v1/completions", [key], {"prompt": [70] * 999}, "request_too_large"),
        ("POST", "/v1/completions", [key], {"prompt": [7] * 280}, "engine_restarting"),
    ]
    for method, path, headers, body, code in steps:
        answer = await server.begin(body, path, method, headers).end()
        assert answer.error["code"] == code, (path, headers)
    server.engine.state = "ready"
    server.engine.slots, server.engine.queue = 0, 0
    assert (await server.post({"prompt": [7] * 280}, headers=[key])).error["code"] == "queue_full"
    server.engine.slots = 1
    assert (await server.post({"prompt": [7] * 280}, headers=[key])).error["code"] == "context_length_exceeded"


@asynchronous
async def test_c45_request_ids(server: Server) -> None:
    for given in ("abc-123", "x" * 128, "!~"):
        assert (await server.post({"prompt": "a"}, headers=[("X-Request-Id", given)])).headers["x-request-id"] == given
    seen = set()
    for given in ("", "x" * 129, "a b", "é", "a\x7f"):
        answer = await server.get("/nope", headers=[("X-Request-Id", given)])
        seen.add(answer.headers["x-request-id"])
        assert given not in seen
    assert len(seen) == 5


@asynchronous
async def test_too_many_open_requests(make: Make) -> None:
    server = make(max_open=2)
    server.engine.forever(b"x")
    server.engine.delay = 0.01
    first, second = server.begin({"prompt": "a", "stream": True}), server.begin({"prompt": "b", "stream": True})
    await first.until(lambda: len(first.messages) > 1)
    answer = await server.post({"prompt": "c"})
    assert (answer.status, answer.error["code"]) == (503, "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    assert (await server.get("/health")).status == 200
    for exchange in (first, second):
        exchange.leave()
        await exchange.end()


@asynchronous
async def test_c2_states(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer)
    go = threading.Event()

    def open_model() -> Loaded:
        assert go.wait(10)
        return loaded(engine)

    service = Service(ServerSettings(), open_model)
    app = create_app(service)

    async def ask(path: str = "/v1/completions", method: str = "POST") -> Exchange:
        return await Exchange(app, method, path, b'{"prompt": "a"}' if method == "POST" else b"").end()

    async def refused(code: str, status: str) -> None:
        answer = await ask()
        assert (answer.status, answer.error["code"]) == (503, code)
        assert int(answer.headers["retry-after"]) >= 1
        for path in ("/health", "/readyz"):
            health = await ask(path, "GET")
            assert (health.status, health.json["status"], health.json["error"]["code"]) == (503, status, code)
        assert (await ask("/livez", "GET")).status == 200

    async with app.test_app():
        await refused("model_loading", "loading")
        go.set()
        await asyncio.get_running_loop().run_in_executor(None, service.loaded.wait, 5)
        assert (await ask()).status == 200
        assert (await ask("/health", "GET")).json["status"] == "ok"
        for state in ("restarting", "failed"):
            engine.state = state
            await refused("engine_restarting", "degraded")
        engine.state = "ready"
        assert (await ask()).status == 200
        service.draining = True
        await refused("shutting_down", "draining")
    bare = Service(ServerSettings())
    bare.start()
    answer = await Exchange(create_app(bare), "POST", "/v1/completions", b'{"prompt": "a"}').end()
    assert (answer.status, answer.error["code"]) == (503, "no_model")
    bare.close()


def test_a_model_that_cannot_be_loaded_is_kept_as_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Loaded:
        raise RuntimeError("broken")

    service = Service(ServerSettings(), fail)
    service.start()
    assert service.loaded.wait(5)
    assert str(service.failure) == "broken"
    assert service.state == "no_model"
    service.close()
