"""HTTP/2: the same answers, limits and ends as over HTTP/1.1."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from qwen35rt.server.http2 import Http2
from qwen35rt.tokenizer import Tokenizer
from tests.server.live import Live, engine_of, eventually, live

h2 = pytest.importorskip("h2.connection", reason="h2 is not installed")


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[Live]:
    with live(tokenizer, max_body=100_000, write_timeout=0.7) as found:
        yield found.ready()


def client_of(server: Live, **options: object) -> httpx.Client:
    return httpx.Client(base_url=server.url, http1=False, http2=True, timeout=30, **options)  # type: ignore[arg-type]


def test_a_completion_and_a_stream(server: Live) -> None:
    with client_of(server) as client:
        answer = client.post("/v1/completions", json={"prompt": "hello"})
        assert answer.http_version == "HTTP/2"
        assert answer.json()["choices"][0]["text"] == " to be"
        with client.stream("POST", "/v1/completions", json={"prompt": "hello", "stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert stream.headers["content-type"] == "text/event-stream"
        assert lines[-1] == "data: [DONE]"
        assert client.get("/livez", headers={"Host": "evil.example"}).status_code == 403
        assert client.post("/v1/completions", json={"prompt": ["x"] * 50, "stream": True, "max_tokens": 9}).is_success
    eventually(lambda: server.counts() == {("success", "200"): 3})


def test_what_is_refused_leaves_the_connection_usable(server: Live) -> None:
    with client_of(server) as client:
        for _ in range(2):
            refused = client.post("/v1/completions", content=b"x" * 200_000)
            assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
        assert client.get("/version", headers={"X-Large": "x" * 20_000}).status_code == 431
        assert client.get("/livez").is_success


def ask(connection: Any, body: dict[str, Any]) -> bytes:
    """What a client of its own making sends for a completion on stream 1."""
    raw = json.dumps(body).encode()
    authority = (":authority", "localhost")
    connection.send_headers(1, [(":method", "POST"), (":path", "/v1/completions"), (":scheme", "http"), authority])
    connection.send_data(1, raw, end_stream=True)
    return bytes(connection.data_to_send())


def test_b21_a_stream_that_is_reset_frees_its_slot(tokenizer: Tokenizer) -> None:
    """The connection goes on."""
    with live(tokenizer, delay=0.005) as server:
        server.ready()
        assert server.engine is not None
        server.engine.forever(b"x")
        connection = h2.H2Connection()
        connection.initiate_connection()
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw:
            raw.sendall(ask(connection, {"prompt": "x", "stream": True, "max_tokens": 100_000}))
            eventually(lambda: len(server.engine.running) == 1)  # type: ignore[union-attr]
            connection.reset_stream(1)
            raw.sendall(connection.data_to_send())
            eventually(lambda: server.counts() == {("cancelled", "499"): 1})
            eventually(lambda: server.idle)


def test_priorities_of_a_thousand_streams_end_nothing(server: Live) -> None:
    """Of streams that never begin, and in a request's head of one that does not exist."""
    engine_of(server).forever(b"x")
    engine_of(server).delay = 0.002
    connection = h2.H2Connection()
    connection.initiate_connection()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw:
        raw.sendall(ask(connection, {"prompt": "x", "stream": True, "max_tokens": 300}))
        eventually(lambda: bool(engine_of(server).running))
        for number in range(5, 2305, 2):
            connection.prioritize(number, weight=1, depends_on=number + 4000)
        raw.sendall(connection.data_to_send())
        eventually(lambda: server.counts() == {("success", "200"): 1})
    eventually(lambda: server.idle and not server.open)


def test_a_fault_in_a_connection_ends_it_and_its_requests(
    server: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a client sends that the library does not expect: nothing of it stays, and the server can end."""

    async def fail(protocol: object, event: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Http2, "_priority_updated", fail)
    engine_of(server).forever(b"x")
    engine_of(server).delay = 0.005
    connection = h2.H2Connection()
    connection.initiate_connection()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw:
        raw.sendall(ask(connection, {"prompt": "x", "max_tokens": 100_000}))
        eventually(lambda: len(engine_of(server).running) == 1)
        connection.prioritize(5)
        raw.sendall(connection.data_to_send())
        while raw.recv(4096):
            pass
    eventually(lambda: server.idle and not server.open)
    eventually(lambda: len(asyncio.all_tasks(server.loop)) == 1)  # that of the server
    assert server.counts() == {("cancelled", "499"): 1}
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("tokens", [1, 100_000], ids=["its end", "its middle"])
def test_c53_a_client_that_opens_no_window_is_given_up(server: Live, tokens: int) -> None:
    """It has sent all that it has to, and takes neither body nor end of its answer; little is held for it."""
    assert server.engine is not None
    server.engine.forever(b"x")
    connection = h2.H2Connection()
    connection.initiate_connection()
    connection.update_settings({4: 0})  # no byte of a body
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw:
        raw.sendall(ask(connection, {"prompt": "x", "stream": True, "max_tokens": tokens}))
        eventually(lambda: bool(server.counts()), 20)
        eventually(lambda: server.idle)
        status = ("success", "200") if tokens == 1 else ("cancelled", "499")
        assert server.counts() == {status: 1}


def test_over_tls_by_alpn(tokenizer: Tokenizer, tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate with")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {cert}"
    )
    subprocess.run([openssl, *command.split()], check=True, capture_output=True)
    trust = ssl.create_default_context(cafile=str(cert))
    with live(tokenizer, ssl_cert_file=str(cert), ssl_key_file=str(key)) as server:
        server.ready()
        for http2 in (True, False):
            with httpx.Client(base_url=server.url, http2=http2, verify=trust, timeout=30) as client:
                answer = client.post("/v1/completions", json={"prompt": "hello"})
                assert answer.http_version == ("HTTP/2" if http2 else "HTTP/1.1")
                assert answer.json()["choices"][0]["text"] == " to be"
