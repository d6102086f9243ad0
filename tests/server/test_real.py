"""The whole way with a real, tiny model: file, engine, server."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quart import Quart

import qwen35rt
from qwen35rt.errors import ConfigError, ModelFileError
from qwen35rt.server.app import create_app
from qwen35rt.server.loading import open_model
from qwen35rt.server.service import Service
from qwen35rt.server.settings import ServerSettings
from tests.server.fake import Exchange, asynchronous


@pytest.fixture(scope="module")
def service(tiny_dense: Path) -> Iterator[Service]:
    settings = ServerSettings(model=str(tiny_dense), ctx_size=512, parallel=3, cache_ram=8, threads=1, device="cpu")
    service = Service(settings, lambda: open_model(settings))
    service.start()
    assert service.loaded.wait(30)
    assert service.failure is None
    yield service
    service.close()


@pytest.fixture
def app(service: Service) -> Quart:
    return create_app(service)


async def post(app: Quart, body: dict[str, Any]) -> Exchange:
    return await Exchange(app, "POST", "/v1/completions", json.dumps(body).encode()).end(30)


@asynchronous
async def test_c1_c25_answers_are_those_of_the_python_interface(app: Quart, tiny_dense: Path) -> None:
    body = {"prompt": "hello world", "max_tokens": 12, "seed": 7, "temperature": 1, "ignore_eos": True}
    answers = await asyncio.gather(*(post(app, body | {"prompt": f"hello {i}"}) for i in range(6)))
    with qwen35rt.load(tiny_dense, device="cpu", threads=1) as model:
        for i, answer in enumerate(answers):
            alone = model.generate(f"hello {i}", max_tokens=12, seed=7, temperature=1, ignore_eos=True)
            assert answer.json["choices"][0]["text"] == alone.text
    stream = await post(app, body | {"stream": True})
    assert stream.text == (await post(app, body)).json["choices"][0]["text"]


@asynchronous
async def test_c29_equal_prompts_reuse_state(app: Quart) -> None:
    body = {"prompt": [70 + i % 50 for i in range(300)], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    cold = (await post(app, body | {"cache_prompt": False})).json
    first, again = [(await post(app, body)).json for _ in range(2)]
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 300 - 64
    assert cold["choices"] == first["choices"] == again["choices"]
    assert again["timings"]["cache_n"] + again["timings"]["prompt_n"] == 300


@asynchronous
async def test_c22_a_prompt_can_be_computed_ahead(app: Quart) -> None:
    body = {"prompt": [71 + i % 40 for i in range(200)], "temperature": 0}
    warm = (await post(app, body | {"max_tokens": 0, "cache_prompt": True})).json
    assert warm["timings"]["prompt_n"] == 200
    after = (await post(app, body | {"max_tokens": 2})).json
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] >= 200 - 64
    other = (await post(app, {"prompt": [90] * 200, "max_tokens": 0})).json
    assert other["timings"]["prompt_n"] == 0


@asynchronous
async def test_c56_the_prompts_own_logprobs(app: Quart) -> None:
    answer = await post(app, {"prompt": "hello there", "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0})
    log = answer.json["choices"][0]["logprobs"]
    n = answer.json["usage"]["prompt_tokens"]
    assert len(log["tokens"]) == n + 1
    assert all(value < 0 for value in log["token_logprobs"][1:])


@asynchronous
async def test_reports(app: Quart, service: Service) -> None:
    health = await Exchange(app, "GET", "/health").end()
    assert (health.status, health.json["device"]) == (200, "cpu")
    page = (await Exchange(app, "GET", "/metrics").end()).body.decode()
    assert 'qwen35rt:generation_tokens_total{engine="0"' in page
    assert service.model.facts.n_ctx == 512
    await post(app, {"prompt": "a", "max_tokens": 1})
    snapshot = service.model.engine.snapshot()
    assert (snapshot.running, snapshot.waiting, snapshot.requests) == ((), 0, 0)


@pytest.mark.parametrize("stage", ["warm", "step", "facts", "prepare", "metrics"])
def test_a_load_that_fails_leaves_no_engine(tiny_dense: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """In an application whose process goes on, threads, pools and the file would stay with it for good."""

    def broken(*args: object) -> None:
        raise ModelFileError("made to fail")

    where = {
        "warm": "qwen35rt.tokenizer.bpe.BpeTokenizer.warm",
        "step": "qwen35rt.server.loading._first_step",
        "facts": "qwen35rt.server.loading._facts",
        "prepare": "qwen35rt.server.model.Loaded.prepare",
        "metrics": "qwen35rt.server.metrics.Metrics.loaded",
    }
    monkeypatch.setattr(where[stage], broken)
    before = set(threading.enumerate())
    settings = ServerSettings(model=str(tiny_dense), ctx_size=64, threads=1, device="cpu", cache_ram=0)
    service = Service(settings, lambda: open_model(settings))
    service.start()
    assert service.loaded.wait(30)
    assert str(service.failure) == "made to fail"
    assert not [t for t in threading.enumerate() if t.name == "qwen35rt-engine" and t not in before]
    service.close()


@asynchronous
async def test_each_step_counts_its_rows_once_the_server_is_ready(tiny_dense: Path) -> None:
    settings = ServerSettings(model=str(tiny_dense), ctx_size=512, threads=1, device="cpu", cache_ram=0)
    service = Service(settings, lambda: open_model(settings))
    service.start()
    assert await asyncio.to_thread(service.loaded.wait, 30)
    assert service.failure is None
    try:
        name = b"qwen35rt:iteration_tokens_total_sum"
        assert name not in service.metrics.text(), "the step that tries the device is not counted"
        await post(create_app(service), {"prompt": [70] * 20, "max_tokens": 3, "ignore_eos": True})
        (line,) = [line for line in service.metrics.text().splitlines() if line.startswith(name)]
        assert line.endswith(b" 22.0")
    finally:
        service.close()


def test_a_template_of_the_flags_that_is_none_ends_the_start(tiny_dense: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{% if %}")
    for settings in (ServerSettings(chat_template="{% for %}"), ServerSettings(chat_template_file=str(file))):
        with pytest.raises(ConfigError, match=r"--chat-template.*no chat template: syntax error"):
            open_model(settings, tiny_dense)


@asynchronous
async def test_a_file_whose_name_is_not_utf_8_is_served(tiny_dense: Path, tmp_path: Path) -> None:
    model = tmp_path / os.fsdecode(b"b\xffd.gguf")
    model.symlink_to(tiny_dense)
    settings = ServerSettings(model=str(model), ctx_size=512, threads=1, device="cpu", cache_ram=0)
    service = Service(settings, lambda: open_model(settings))
    service.start()
    try:
        assert await asyncio.to_thread(service.loaded.wait, 30)
        app = create_app(service)
        assert (await post(app, {"prompt": "a", "max_tokens": 1})).json["model"] == "b?d"
        for path in ("/v1/models", "/props", "/metrics", "/health"):
            answer = await Exchange(app, "GET", path).end()
            assert answer.status == 200, path
    finally:
        service.close()


@pytest.mark.parametrize("slots", [2, 4])
def test_b19_prompts_that_are_computed_in_one_step(tiny_dense: Path, slots: int) -> None:
    """50 rounds of requests at once, some with their prompt and its log-probabilities, are all answered as alone."""
    rng = random.Random(19)
    settings = ServerSettings(model=str(tiny_dense), ctx_size=256, parallel=slots, threads=1, device="cpu", cache_ram=4)
    service = Service(settings, lambda: open_model(settings))

    def body() -> dict[str, Any]:
        prompt = [70 + rng.randrange(50) for _ in range(rng.randint(1, 60))]
        scored = {"echo": True, "logprobs": rng.randrange(3)} if rng.random() < 0.4 else {}
        return {"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True, **scored}

    @asynchronous
    async def run() -> None:
        app = create_app(service)
        for number in range(50):
            bodies = [body() for _ in range(slots)]
            answers = await asyncio.gather(*(post(app, b) for b in bodies))
            assert [a.status for a in answers] == [200] * slots
            if number % 10 == 0:
                for b, a in zip(bodies, answers, strict=True):
                    assert (await post(app, b)).json["choices"][0]["text"] == a.json["choices"][0]["text"]

    service.start()
    assert service.loaded.wait(30)
    assert service.failure is None
    try:
        run()
    finally:
        service.close()
