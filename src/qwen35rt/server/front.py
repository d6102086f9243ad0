"""Stands before the application until that is imported: /livez is answered at once, everything else waits for it."""

from __future__ import annotations

import asyncio

from .hosts import Hosts
from .record import Asgi, Message, Receive, Record, Send
from .settings import ServerSettings

_LIVE = b'{"status":"ok"}'


class Front:
    """ASGI application for HTTP. ``use`` gives it the one that it stands for."""

    def __init__(self, settings: ServerSettings) -> None:
        self._hosts = Hosts(settings)
        self._app: Asgi | None = None
        self._there = asyncio.Event()

    def use(self, app: Asgi) -> None:
        """From now on ``app`` answers, also what has waited."""
        self._app = app
        self._there.set()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if self._app is None:
            if self._asks_life(scope):
                await _answer(scope, send)
                return
            await self._there.wait()
        assert self._app is not None
        await self._app(scope, receive, send)

    def _asks_life(self, scope: Message) -> bool:
        """Whether this is a question for /livez that the application would answer with 200."""
        if scope["type"] != "http" or scope["path"] != "/livez" or scope["method"] not in ("GET", "HEAD"):
            return False
        host = next((value for name, value in scope["headers"] if name == b"host"), b"")
        return self._hosts.allowed(host.decode("latin-1"))


async def _answer(scope: Message, send: Send) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(_LIVE)).encode()),
        (b"x-request-id", Record(scope).id.encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else _LIVE})
