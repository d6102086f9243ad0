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
    """``data``: all of it; ``first``, ``seconds``: to its first byte, and to its end; ``between``: the 99th percentile
    of the seconds between the events of a stream."""

    data: bytes
    first: float
    seconds: float
    between: float = 0.0


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
        pieces, times = [await reader.read(1)], [time.monotonic()]
        first, gaps = times[0] - began, [0.0]
        while piece := await reader.read(1 << 16):
            pieces.append(piece)
            if n := piece.count(b"\n\n"):
                times.append(time.monotonic())
                gaps += [times[-1] - times[-2], *[0.0] * (n - 1)]  # events that come together come at once
        between = sorted(gaps[2:] or gaps)[-1 - len(gaps) // 100]  # the first comes behind its prompt
        return Answer(b"".join(pieces), first, time.monotonic() - began, between)
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
    json.dump([(a.data.decode(), *a[1:]) for a in found], sys.stdout)


if __name__ == "__main__":
    _main()
