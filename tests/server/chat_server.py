"""A chat server over the scripted engine, and what clients make of its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from quart import Quart

from qwen35rt.plan import Plan
from qwen35rt.server.app import create_app
from qwen35rt.server.service import Service
from qwen35rt.server.settings import ServerSettings
from qwen35rt.tokenizer import ChatTemplate, Tokenizer
from tests.server.chat_templates import QWEN
from tests.server.conftest import Server
from tests.server.fake import Exchange, FakeEngine, loaded

PATH = "/v1/chat/completions"
HI = {"role": "user", "content": "Hi"}
Open = Callable[..., "ChatServer"]


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


def add_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The choice that the chunks of a stream make."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    end: dict[str, Any] = {}
    for choice in (c for e in events for c in e["choices"]):
        delta = choice["delta"]
        for key in ("role", "content", "reasoning", "reasoning_content"):
            if key in delta:
                message[key] = message.get(key, "") + delta[key]
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if choice["finish_reason"] is not None:
            end = {key: choice[key] for key in ("finish_reason", "stop_reason", "index", "logprobs")}
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return {"message": message, **end}


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    message = dict(choice["message"])
    if "tool_calls" in message:
        message["tool_calls"] = [{k: v for k, v in call.items() if k != "id"} for call in message["tool_calls"]]
    return {**choice, "message": message}


@contextmanager
def opened(tokenizer: Tokenizer) -> Iterator[Open]:
    """Build servers: ``template`` (None: the model has none), ``n_ctx``, ``facts``, settings by name."""
    engines: list[FakeEngine] = []
    services: list[Service] = []

    def build(
        template: str | None = QWEN, n_ctx: int = 1024, facts: dict[str, Any] | None = None, **settings: Any
    ) -> ChatServer:
        chosen = ServerSettings(**settings)
        engine = FakeEngine(tokenizer, chosen.parallel)
        model = loaded(engine, n_ctx, **(facts or {}))
        model = replace(model, template=None if template is None else ChatTemplate(template))
        service = Service(chosen, lambda: model)
        engines.append(engine)
        services.append(service)
        app: Quart = create_app(service)
        service.start()
        assert service.loaded.wait(5)
        assert service.failure is None
        return ChatServer(app, service, engine)

    yield build
    for service in services:
        service.close()
    for engine in engines:
        engine.stop()
