"""Clients that leave, do not read or are slow, on real sockets over a scripted engine."""

from __future__ import annotations

import time

import httpx
import pytest

from tests.server.conftest import Start
from tests.server.live import LONG, engine_of, eventually, read_events, reset

LIVEZ = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("kind", ["stream", "buffered", "waiting"])
def test_b21_b15_a_client_that_is_killed_frees_its_slot(start: Start, kind: str) -> None:
    server = start(parallel=1, delay=0.01)
    engine = engine_of(server)
    engine.forever(b" to")
    first = server.connect(LONG | {"stream": kind != "buffered"})
    if kind != "buffered":
        read_events(first, 3)
    eventually(lambda: len(engine.running) == 1)
    if kind == "waiting":
        second = server.connect({"prompt": "x"})
        eventually(lambda: len(engine.waiting) == 1)
        reset(second)
        eventually(lambda: not engine.waiting, 1)
        assert len(engine.running) == 1
    reset(first)
    eventually(lambda: server.idle, 1.5)
    engine.say(b" be")
    assert httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 4}, timeout=30).is_success
    assert server.counts()["cancelled", "499"] == (2 if kind == "waiting" else 1)


def test_c53_a_client_that_does_not_read_is_given_up_and_slows_nobody(start: Start) -> None:
    server = start(parallel=2, write_timeout=0.7, max_stream_buffer=32 << 10)
    engine = engine_of(server)
    engine.forever(b"longer")
    blocked = server.connect(LONG, narrow=True)
    eventually(lambda: any(j.turn.paused for j in engine.running), 15)
    answer = httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 8}, timeout=30)
    assert answer.json()["usage"]["completion_tokens"] == 8
    eventually(lambda: server.idle, 5)
    eventually(lambda: server.counts().get(("cancelled", "499")) == 1)
    blocked.close()


def test_idle_connections_and_slow_headers_are_closed(start: Start) -> None:
    """60 idle and 20 half-sent ones: requests are served meanwhile, and the connections end after --keep-alive."""
    server = start(keep_alive=1.0)
    idle = [server.connect() for _ in range(60)]
    slow = [server.connect() for _ in range(20)]
    for connection in slow:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: loc")
    with server.client() as client:
        assert client.post("/v1/completions", json={"prompt": "x"}).is_success
    began = time.monotonic()
    for connection in [*idle, *slow]:
        connection.settimeout(10)
        assert b"200" not in connection.recv(100)
        connection.close()
    assert time.monotonic() - began < 8


def test_time_in_which_the_server_is_held_up_is_no_silence_of_its_clients(start: Start) -> None:
    """A connection whose client was about to ask outlives a stop of the event loop that is longer than --keep-alive;
    a request that came within the stop is answered too."""
    server = start(keep_alive=0.5)
    late, early = server.connect(), server.connect()
    with server.client() as client:
        assert client.get("/livez").is_success  # both are accepted by now
        server.loop.call_soon_threadsafe(time.sleep, 1.5)
        early.sendall(LIVEZ)
        assert early.recv(4096).startswith(b"HTTP/1.1 200")
        late.sendall(LIVEZ)
        assert late.recv(4096).startswith(b"HTTP/1.1 200")
        for connection in (early, late):
            assert connection.recv(4096) == b"", "it is closed when nothing comes"
            connection.close()


def test_slow_body_is_408(start: Start) -> None:
    server = start(body_timeout=0.3)
    connection = server.connect()
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in answer.lower()
    connection.close()
    eventually(lambda: server.counts() == {("failure", "408"): 1})


def test_an_answer_that_does_not_wait_for_the_body_says_that_the_connection_ends(start: Start) -> None:
    """One to a whole request says nothing of the kind, and the next request is answered too."""
    server = start()
    connection = server.connect()
    whole = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: {}\r\nContent-Length: 2\r\n\r\n"
    for kind, status in (("text/plain", b"415"), ("application/json", b"400")):
        connection.sendall(whole.format(kind).encode() + b"{}")
        answer = connection.recv(4096)
        assert answer.split()[1] == status
        assert b"connection:" not in answer.lower()
    connection.sendall(whole.format("text/plain").encode())  # and no body
    answer = b""
    while piece := connection.recv(4096):
        answer += piece
    connection.close()
    assert answer.split()[1] == b"415"
    assert b"\r\nconnection: close\r\n" in answer.lower()
    assert b'"code":"unsupported_media_type"' in answer
