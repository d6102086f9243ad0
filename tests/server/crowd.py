"""Many clients at once, in this process or in one of their own: a server that shares its interpreter with its clients
keeps them from sending what it waits for."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """``data``: all of it; ``first``, ``seconds``: to its first byte, and to its end."""

    data: bytes
    first: float
    seconds: float


async def ask(port: int, body: dict[str, Any], leave_after: float | None = None) -> Answer:
    """One request on a connection of its own; nothing comes back of one that is left."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    began = time.monotonic()
    writer.write(head.encode() + raw)
    try:
        if leave_after is not None:
            await asyncio.sleep(leave_after)
            writer.transport.abort()
            return Answer(b"", 0.0, 0.0)
        data = await reader.read(1)
        first = time.monotonic() - began
        data += await reader.read()
        return Answer(data, first, time.monotonic() - began)
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


def together(work: Iterable[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """Run all at once, in this process."""

    async def run() -> list[Answer]:
        return await asyncio.gather(*work)

    return asyncio.run(run())


def crowd(port: int, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
    """The same in a process of its own; a connection that breaks gives what came of its answer."""
    made = subprocess.run(
        [sys.executable, __file__, str(port)], input=json.dumps(bodies), capture_output=True, text=True, check=True
    )
    return [Answer(data.encode(), *times) for data, *times in json.loads(made.stdout)]


async def _ask(port: int, body: dict[str, Any]) -> Answer:
    try:
        return await ask(port, body)
    except OSError as e:
        return Answer(f"lost: {e!r}".encode(), 0.0, 0.0)


def _main() -> None:
    port, bodies = int(sys.argv[1]), json.load(sys.stdin)
    found = together(_ask(port, body) for body in bodies)
    json.dump([(a.data.decode(), a.first, a.seconds) for a in found], sys.stdout)


if __name__ == "__main__":
    _main()
