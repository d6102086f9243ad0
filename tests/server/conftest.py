"""Servers over a scripted engine, for texts and for chats."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
from quart import Quart

from qwen35rt.plan import Plan
from qwen35rt.server.app import create_app
from qwen35rt.server.service import Service
from qwen35rt.server.settings import ServerSettings
from qwen35rt.tokenizer import ChatTemplate, Tokenizer
from tests.server.chat_server import HI, PATH, add_up, without_ids
from tests.server.chat_templates import QWEN
from tests.server.fake import Exchange, FakeEngine, loaded, make_tokenizer
from tests.server.live import Live, live


@dataclass
class Server:
    """An application and what it stands on."""

    app: Quart
    service: Service
    engine: FakeEngine

    def begin(
        self,
        body: Any = None,
        path: str = "/v1/completions",
        method: str = "POST",
        headers: Iterable[tuple[str, str]] = (),
        **options: Any,
    ) -> Exchange:
        """Send a request; ``body`` is JSON or bytes."""
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        return Exchange(self.app, method, path, raw, headers, **options)

    async def post(self, body: Any = None, path: str = "/v1/completions", **options: Any) -> Exchange:
        """The whole answer to a request."""
        return await self.begin(body, path, **options).end()

    async def get(self, path: str, **options: Any) -> Exchange:
        """The whole answer to GET."""
        return await self.begin(None, path, "GET", **options).end()

    def counts(self) -> dict[tuple[str, str], float]:
        """(outcome, status) -> requests of /v1/completions."""
        found = {}
        for metric in self.service.metrics._registry.collect():
            for sample in metric.samples:
                if sample.name == "qwen35rt:requests_total" and sample.labels["endpoint"] == "/v1/completions":
                    found[sample.labels["outcome"], sample.labels["status"]] = sample.value
        return found

    @property
    def idle(self) -> bool:
        """Nothing is held any more."""
        return not (self.engine.places or self.engine.running or self.engine.waiting)


@dataclass
class ChatServer(Server):
    """Requests go to the chat route; ``messages`` may be left out."""

    async def ask(self, path: str = PATH, /, **body: Any) -> Exchange:
        return await self.post({"messages": [HI], **body}, path)

    async def both(self, **body: Any) -> dict[str, Any]:
        """The same question buffered and streamed, which must say the same; -> the buffered choice."""
        answer = await self.ask(**body, seed=1)
        assert answer.status == 200, answer.body
        choice: dict[str, Any] = answer.json["choices"][0]
        stream = await self.ask(**body, seed=1, stream=True)
        assert (stream.status, stream.lines[-1]) == (200, "[DONE]")
        told = add_up(stream.events)
        assert without_ids(told) == without_ids(choice)
        assert stream.events[-1]["usage"] == answer.json["usage"]
        return choice

    async def refused(self, **body: Any) -> dict[str, Any]:
        """The error, which must be an ordinary answer in a stream too (C50)."""
        errors = [await self.ask(**body, **({"stream": True} if stream else {})) for stream in (False, True)]
        assert [e.status for e in errors] == [400, 400], (body, errors[0].body)
        assert errors[0].error == errors[1].error
        return errors[0].error

    @property
    def plan(self) -> Plan:
        """Of the last turn."""
        return self.engine.submitted[-1]

    def text(self, ids: Any = None) -> str:
        """The last prompt, tags spelled."""
        return self.engine.tokenizer.decode(self.plan.ids if ids is None else ids, skip_special=False)

    def script(self, text: str) -> None:
        """Say this to every prompt, its tags as the model's own tokens."""
        ids = self.engine.tokenizer.encode(text)
        self.engine.script = lambda plan: ids


S = TypeVar("S", bound=Server)
Make = Callable[..., Server]
Open = Callable[..., ChatServer]
Start = Callable[..., Live]


class Servers:
    """Opens servers; ``ending`` closes them."""

    def __init__(self, ending: ExitStack) -> None:
        self._ending = ending

    def open(
        self,
        kind: type[S],
        tokenizer: Tokenizer,
        template: str | None,
        n_ctx: int,
        facts: dict[str, Any] | None = None,
        **settings: Any,
    ) -> S:
        """A server whose model is loaded. ``template``: None where the model has none; ``facts`` of the model."""
        chosen = ServerSettings(**settings)
        engine = FakeEngine(tokenizer, chosen.parallel, chosen.queue_places)
        self._ending.callback(engine.stop)
        model = loaded(engine, n_ctx, **(facts or {}))
        model = replace(model, template=None if template is None else ChatTemplate(template))
        service = Service(chosen, lambda: model)
        self._ending.callback(service.close)
        app = create_app(service)
        service.start()
        assert service.loaded.wait(5)
        assert service.failure is None
        return kind(app, service, engine)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture
def servers() -> Iterator[Servers]:
    with ExitStack() as ending:
        yield Servers(ending)


@pytest.fixture
def make(servers: Servers, tokenizer: Tokenizer) -> Make:
    """Build servers: the model's context, ``facts`` of it, settings by name, ``of`` another tokenizer."""

    def build(*, of: Tokenizer | None = None, n_ctx: int = 256, **options: Any) -> Server:
        return servers.open(Server, of or tokenizer, None, n_ctx, **options)

    return build


@pytest.fixture
def server(make: Make) -> Server:
    return make()


@pytest.fixture
def open_chat(servers: Servers, tokenizer: Tokenizer) -> Open:
    """Build chat servers: the model's template and context, ``facts`` of it, settings by name."""

    def build(template: str | None = QWEN, n_ctx: int = 1024, **options: Any) -> ChatServer:
        return servers.open(ChatServer, tokenizer, template, n_ctx, **options)

    return build


@pytest.fixture
def chat(open_chat: Open) -> ChatServer:
    return open_chat()


@pytest.fixture
def start(tokenizer: Tokenizer) -> Iterator[Start]:
    """Start servers; ends them after the test."""
    running: list[Live] = []

    def begin(**options: Any) -> Live:
        found = live(tokenizer, **options).__enter__()
        running.append(found)
        return found.ready()

    yield begin
    for server in running:
        server.__exit__(None, None, None)
