"""A server over a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from quart import Quart

from qwen35rt.server.app import create_app
from qwen35rt.server.service import Service
from qwen35rt.server.settings import ServerSettings
from qwen35rt.tokenizer import Tokenizer
from tests.server.fake import Exchange, FakeEngine, loaded, make_tokenizer


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


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


Make = Callable[..., Server]


@pytest.fixture
def make(tokenizer: Tokenizer) -> Iterator[Make]:
    """Build servers: settings by name, ``facts`` of the model."""
    engines: list[FakeEngine] = []
    services: list[Service] = []

    def build(*, facts: dict[str, Any] | None = None, of: Tokenizer | None = None, **settings: Any) -> Server:
        chosen = ServerSettings(**settings)
        engine = FakeEngine(of or tokenizer, chosen.parallel, chosen.queue_places)
        service = Service(chosen, lambda: loaded(engine, **(facts or {})))
        engines.append(engine)
        services.append(service)
        app = create_app(service)
        service.start()
        assert service.loaded.wait(5)
        assert service.failure is None
        return Server(app, service, engine)

    yield build
    for service in services:
        service.close()
    for engine in engines:
        engine.close()


@pytest.fixture
def server(make: Make) -> Server:
    return make()
