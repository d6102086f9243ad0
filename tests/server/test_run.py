"""The server's process with real sockets over a scripted engine: start and shutdown."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from typing import Any

import httpx
import pytest

from qwen35rt.errors import ConfigError, ModelFileError
from qwen35rt.server.listen import listen
from qwen35rt.server.service import Service
from qwen35rt.server.settings import ServerSettings
from qwen35rt.tokenizer import Tokenizer
from tests.server.conftest import Start
from tests.server.fake import FakeEngine, loaded
from tests.server.live import LONG, Live, engine_of, eventually, failing

LIVEZ = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


def stream(server: Live, body: dict[str, Any], into: list[str]) -> threading.Thread:
    """Read a stream in a thread, line by line."""

    def read() -> None:
        with server.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
            into.extend(line for line in answer.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    return thread


# ------------------------------------------------------------------------------------------------------- start


def test_port_answers_before_the_model_is_loaded(tokenizer: Tokenizer) -> None:
    """/livez is 200 while loading, everything that needs the model 503; a signal then ends it with 0."""
    go = threading.Event()
    engine = FakeEngine(tokenizer)

    def open_model() -> Any:
        go.wait(20)
        return loaded(engine)

    with Live(Service(ServerSettings(), open_model), engine) as server, server.client() as client:
        assert client.get("/livez").status_code == 200
        for path in ("/readyz", "/health", "/v1/models", "/props", "/slots"):
            answer = client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_loading"), path
            assert int(answer.headers["Retry-After"]) >= 1
        assert client.get("/health").json()["status"] == "loading"
        assert server.lines == []
        go.set()
        server.ready()
        assert client.get("/readyz").status_code == 200
        server.signal()
        assert server.join() == 0


def test_livez_answers_before_the_application_is_imported(tokenizer: Tokenizer) -> None:
    """Everything else, a foreign Host too, waits for the application and is answered by it."""
    imported = threading.Event()
    engine = FakeEngine(tokenizer)
    with Live(Service(ServerSettings(), lambda: loaded(engine)), engine, imported=imported) as server:
        try:
            with server.client(headers={"X-Request-Id": "mine"}) as client:
                for answer in (client.get("/livez"), client.head("/livez")):
                    assert answer.status_code == 200
                    assert answer.headers["X-Request-Id"] == "mine"
                    assert answer.headers["Content-Length"] == "15"
                assert client.get("/livez").json() == {"status": "ok"}
            waiting = [server.connect() for _ in range(3)]
            waiting[0].sendall(LIVEZ.replace(b"localhost", b"evil.example"))
            waiting[1].sendall(LIVEZ.replace(b"livez", b"version"))
            waiting[2].sendall(LIVEZ.replace(b"GET", b"PUT"))
            for connection in waiting:
                connection.settimeout(0.1)
                with pytest.raises(TimeoutError):
                    connection.recv(1)
                connection.settimeout(30)
        finally:
            imported.set()
        for connection, status in zip(waiting, (b"403", b"200", b"405"), strict=True):
            assert connection.recv(4096).split()[1] == status
            connection.close()


def test_nothing_heavy_is_imported_before_connections_are_taken() -> None:
    code = (
        "import sys, qwen35rt.cli.serve, qwen35rt.server.listen, qwen35rt.server.run, qwen35rt.server.settings as s;"
        "s.read_settings({}, None);"
        "heavy = ('numpy', 'quart', 'werkzeug', 'prometheus_client', 'tokenizers', 'minijinja', 'gguf');"
        "print([m for m in heavy if m in sys.modules])"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert found.stdout.strip() == "[]"


def test_ready_line_has_url_model_device_and_reason(start: Start) -> None:
    server = start()
    (line,) = server.lines
    assert server.url in line
    assert "model tiny" in line
    assert "device cpu" in line


def test_signal_while_loading_ends_at_once(tokenizer: Tokenizer) -> None:
    go = threading.Event()
    try:
        with Live(Service(ServerSettings(), lambda: go.wait(20) and None), None) as server:  # type: ignore[arg-type, return-value]
            time.sleep(0.1)
            server.signal()
            assert server.join(5) == 0
        assert server.lines == ["shutting down: the model was being loaded"]
    finally:
        go.set()


def test_b90_a_model_that_cannot_be_loaded_is_raised() -> None:
    with failing(ModelFileError("model.gguf: cut off")) as server:
        server.join()
    assert isinstance(server.error, ModelFileError)
    assert server.lines == []


def test_port_in_use_is_said_plainly() -> None:
    taken = listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"):
        listen("127.0.0.1", port)
    taken.close()
    with pytest.raises(ConfigError, match="no such address"):
        listen("no-such-host.invalid", 0)
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        listen("192.0.2.1", 0)


def test_certificate_that_cannot_be_read(tokenizer: Tokenizer) -> None:
    settings = ServerSettings(ssl_cert_file="/nowhere/cert.pem", ssl_key_file="/nowhere/key.pem")
    with pytest.raises(ConfigError, match=r"--ssl-cert-file /nowhere/cert\.pem"):
        Live(Service(settings))


def test_answers_over_http(start: Start) -> None:
    """HEAD has no body, no header names the server's software, foreign hosts and origins are refused."""
    server = start()
    with server.client() as client:
        head = client.head("/v1/models")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["Content-Length"] == str(len(client.get("/v1/models").content))
        assert "server" not in head.headers
        assert client.get("/livez", headers={"Host": "evil.example"}).status_code == 403
        assert client.get("/version", headers={"Origin": "http://evil.example"}).status_code == 403
        assert client.get("/version", headers={"X-Large": "x" * 20_000}).status_code == 431
        answer = client.post("/v1/completions", json={"prompt": "hello"}).json()
        assert answer["choices"][0]["text"] == " to be"
        wrong = client.post("/v1/models", json={})
        assert (wrong.status_code, wrong.headers["Allow"]) == (405, "GET, HEAD")


def test_metrics_port_needs_no_key_and_serves_nothing_else(start: Start) -> None:
    server = start(metrics=True, api_key=("secret",))
    with server.client() as client:
        assert client.get("/metrics").status_code == 401
    page = httpx.get(server.metrics_url + "/metrics", timeout=30)
    assert page.status_code == 200
    assert "qwen35rt:info{" in page.text
    assert httpx.get(server.metrics_url + "/health", timeout=30).status_code == 404
    assert httpx.post(server.metrics_url + "/metrics", timeout=30).status_code == 405
    assert httpx.get(server.metrics_url + "/metrics", headers={"Host": "evil.example"}, timeout=30).status_code == 403


# ---------------------------------------------------------------------------------------------------- shutdown


def test_first_signal_lets_requests_end(start: Start) -> None:
    """A running stream and a queued request go on; new ones get 503; then the exit code is 0."""
    server = start(parallel=1, delay=0.03)
    engine = engine_of(server)
    engine.script = lambda plan: engine.ids(b"word ") * 30
    lines: list[str] = []
    reader = stream(server, {"prompt": "hello", "stream": True}, lines)
    eventually(lambda: len(lines) > 1)
    queued: list[httpx.Response] = []
    second = threading.Thread(
        target=lambda: queued.append(
            httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 3}, timeout=30)
        )
    )
    second.start()
    eventually(lambda: len(engine.waiting) == 1)
    with server.client() as client:
        server.signal()
        eventually(lambda: client.get("/readyz").status_code == 503)
        assert client.get("/health").json()["status"] == "draining"
        refused = client.post("/v1/completions", json={"prompt": "hello"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert client.get("/livez").status_code == 200
    assert server.join() == 0
    reader.join(5)
    second.join(5)
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(e["choices"][0]["text"] for e in events) == "word " * 30
    assert queued[0].json()["usage"]["completion_tokens"] == 3
    assert server.exits == []
    (word,) = server.lines[1:]
    many = r"shutting down, (2 requests|1 request) in flight, for at most 30 s; a second signal"
    assert re.fullmatch(many + r" \(Ctrl-C\) ends (them|it)", word)


def test_a_signal_to_an_idle_server_is_answered_by_a_line(start: Start) -> None:
    server = start()
    server.signal()
    assert server.join() == 0
    assert server.lines[1:] == ["shutting down, 0 requests in flight"]


@pytest.mark.parametrize("how", ["second signal", "timeout"])
def test_the_rest_ends_with_an_error_chunk(start: Start, how: str) -> None:
    server = start(delay=0.02, shutdown_timeout=60 if how == "second signal" else 0.2)
    engine_of(server).forever(b" to")
    lines: list[str] = []
    reader = stream(server, LONG, lines)
    eventually(lambda: len(lines) > 1)
    answers: list[httpx.Response] = []
    buffered = threading.Thread(
        target=lambda: answers.append(
            httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 100_000}, timeout=30)
        )
    )
    buffered.start()
    eventually(lambda: len(engine_of(server).running) == 2)
    began = time.monotonic()
    server.signal()
    if how == "second signal":
        time.sleep(0.1)
        assert server.code is None
        server.signal()
    assert server.join() == 0
    assert time.monotonic() - began < 3
    reader.join(5)
    buffered.join(5)
    last = json.loads(lines[-1].removeprefix("data: "))
    assert last["error"]["code"] == "shutting_down"
    assert last["choices"][0]["finish_reason"] == "error"
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "shutting_down")
    assert server.exits == []


def test_a_client_that_does_not_read_holds_the_end_up_for_a_moment_only(start: Start) -> None:
    server = start(max_stream_buffer=32 << 10)
    engine = engine_of(server)
    engine.forever(b"longer")
    blocked = server.connect(LONG, narrow=True)
    eventually(lambda: any(job.turn.paused for job in list(engine.running)), 15)
    server.signal()
    server.signal()
    assert server.join() == 0
    assert server.exits == []
    blocked.close()


def test_third_signal_ends_the_process_at_once(start: Start) -> None:
    server = start(delay=0.02)
    for _ in range(2):
        server.signal()
    server.process.received(15)
    assert server.exits[0] == 128 + 15


def test_an_engine_that_failed_for_good_ends_the_server_with_1(start: Start) -> None:
    server = start()
    engine_of(server).state = "failed"
    assert server.join() == 1
    assert any("failed" in line for line in server.lines)
