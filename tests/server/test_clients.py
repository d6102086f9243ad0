"""The public client library against this server."""

from __future__ import annotations

import asyncio
import re
import warnings
from typing import Any

import httpx
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import openai

from tests.server.conftest import Make, Server
from tests.server.fake import asynchronous, eventually


def client_of(app: Any, **options: Any) -> openai.AsyncOpenAI:
    """The library over the ASGI interface."""
    transport = httpx.ASGITransport(app=app)
    http: Any = httpx.AsyncClient(transport=transport, base_url="http://localhost")
    return openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key="k", http_client=http, **{"max_retries": 0, **options}
    )


@asynchronous
async def test_the_openai_client_reads_answers(server: Server) -> None:
    async with client_of(server.app) as client:
        answer = await client.completions.create(model="m", prompt="hello", max_tokens=4, logprobs=2, echo=True)
        assert answer.choices[0].text == "hello to "
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.total_tokens == 5
        assert answer.choices[0].logprobs is not None
        assert answer.choices[0].logprobs.tokens == ["hello", " ", "t", "o", " "]
        assert answer.model_extra is not None
        assert answer.model_extra["on_gpu"] is False


@asynchronous
async def test_the_openai_client_reads_streams(server: Server) -> None:
    async with client_of(server.app) as client:
        text, usage = "", None
        stream = await client.completions.create(
            model="m", prompt=["a", "b"], stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            text += "".join(c.text for c in chunk.choices if c.index == 1)
            usage = chunk.usage or usage
        assert text == " to be"
        assert usage is not None
        assert usage.completion_tokens == 12


@asynchronous
async def test_the_openai_client_understands_errors(server: Server) -> None:
    async with client_of(server.app, max_retries=2) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="m", prompt="a", temperature=9)
        assert (caught.value.param, caught.value.code) == ("temperature", "invalid_value")
        with pytest.raises(openai.InternalServerError) as refused:
            await client.embeddings.create(model="m", input="a")
        assert refused.value.status_code == 501
    text = server.service.metrics.text().decode()
    assert re.search(r'requests_total\{endpoint="/v1/embeddings",.*status="501"\} 1.0', text), "it was repeated"


@pytest.mark.parametrize("n", [4, pytest.param(1000, marks=pytest.mark.long)])
def test_the_openai_client_comes_again_until_it_is_served(make: Make, n: int) -> None:
    """C65: many ask at once, more than slots and queue hold. The library obeys Retry-After; nobody is left out."""
    slots, queue = (4, 64) if n >= 1000 else (1, 1)
    server = make(parallel=slots, queue=queue)
    server.engine.delay = 0.005
    server.engine.script = lambda plan: server.engine.ids(b"x") * (plan.ids[0] % 5 + 1)

    @asynchronous
    async def run() -> None:
        async with client_of(server.app, max_retries=200, timeout=600) as client:
            asked = [client.completions.create(model="tiny", prompt=[i % 256]) for i in range(n)]
            answers = await asyncio.gather(*asked)
        for i, answer in enumerate(answers):
            assert answer.choices[0].text == "x" * (i % 256 % 5 + 1)
        await eventually(lambda: server.counts().get(("success", "200")) == n)
        assert server.counts()["failure", "503"] >= n - slots - queue
        assert server.idle

    run()
