"""GET /: a page for browsers; nothing yet for programs."""

from __future__ import annotations

import re

from qwen35rt.server.routes import STAGE_1
from tests.server.conftest import Make, Server
from tests.server.fake import Exchange, asynchronous

BROWSER = ("Accept", "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8")


async def get(server: Server, *headers: tuple[str, str], method: str = "GET") -> Exchange:
    return await server.begin(None, "/", method, headers).end()


@asynchronous
async def test_a_browser_gets_a_page_that_needs_nothing_else(make: Make) -> None:
    server = make(facts={"id": "a <b> & c"})
    answer = await get(server, BROWSER, ("Host", "localhost:8080"))
    text = answer.body.decode()
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-request-id"]
    assert "a &lt;b&gt; &amp; c, context 256, device cpu" in text
    assert "curl http://localhost:8080/v1/chat/completions" in text
    assert "Bearer" not in text
    assert re.findall(r"(?:src|href)=\S+", text) == ['href="data:,">']
    assert "{{" not in text
    shown = re.findall(r"<td><code>(GET|POST) (.*?)</code>", text)
    assert {(method, path) for method, paths in shown for path in paths.split(", ")} <= set(STAGE_1)
    head = await get(server, BROWSER, method="HEAD")
    assert (head.status, head.body) == (200, b"")


@asynchronous
async def test_the_page_shows_a_host_only_where_it_is_one(make: Make) -> None:
    server = make(host="0.0.0.0", port=81, api_key=("k",))
    for host in ("box.lan", "box_1.lan:8080", "[::1]:80", "xn--zzzz--.com", "a" * 64):
        text = (await get(server, BROWSER, ("Host", host))).body.decode()
        assert f"<code>http://{host}/v1</code>" in text, host
    for host in ("", "a:b", "[::1", "<b>", "a'; true '", "a/..", "a\xe9", "a:123456"):
        text = (await get(server, BROWSER, ("Host", host))).body.decode()
        assert "<code>http://localhost:81/v1</code>" in text, host
    assert (await get(server, ("Accept", "Text/HTML"))).status == 200, "types have no case"


@asynchronous
async def test_programs_are_told_that_there_is_nothing_yet(server: Server) -> None:
    for accept in ("*/*", "application/json", "text/html;q=0, */*", "text/*"):
        answer = await get(server, ("Accept", accept))
        assert (answer.status, answer.error["code"]) == (501, "not_implemented"), accept
        assert "/v1/chat/completions" in answer.error["message"]


@asynchronous
async def test_without_a_key_the_page_does_not_say_what_runs(make: Make) -> None:
    server = make(api_key=("sesame",))
    closed = (await get(server, BROWSER)).body.decode()
    assert "tiny" not in closed
    assert "An API key is needed." in closed
    assert "Authorization: Bearer KEY" in closed
    assert "Model tiny" in (await get(server, BROWSER, ("x-api-key", "sesame"))).body.decode()
    assert (await get(server)).status == 401
    assert (await get(server, BROWSER, ("Host", "evil.example"))).error["code"] == "host_not_allowed"


@asynchronous
async def test_the_page_tells_the_servers_state(server: Server) -> None:
    for state, words in (("restarting", "has failed"), ("stopped", "shutting down"), ("loading", "being loaded")):
        server.engine.state = state
        answer = await get(server, BROWSER)
        assert answer.status == 200
        assert words in answer.body.decode()
