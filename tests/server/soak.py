"""Eight clients that ask a server with a real model for a time: whole answers, streams, chats, clients that leave.

The long form: ``python -m tests.server.soak --hours 2 [MODEL.gguf]``; without a model a tiny one answers. Figures go to
standard output each minute; the exit code is 1 after a failure or where the process has grown.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from qwen35rt.server.loading import make_service
from qwen35rt.server.run import spare_collector
from qwen35rt.server.settings import ServerSettings
from tests.fixtures import write_tiny
from tests.server.chat_templates import QUIET
from tests.server.live import Live, eventually

GROWTH = 5 << 20  # bytes that a process may grow by after the first quarter of the time


@dataclass
class Soak:
    """What was seen. ``growth``: bytes after the first quarter of the time."""

    answered: int = 0
    left: int = 0
    growth: int = 0
    failures: list[str] = field(default_factory=list)


def soak(model: Path, seconds: float, clients: int = 8, tell: Callable[[str], object] = lambda line: None) -> Soak:
    """Serve ``model`` to so many clients; all of them ask something else all the time."""
    settings = ServerSettings(model=str(model), device="cpu", parallel=4, cache_ram=16)
    found = Soak()
    end = time.monotonic() + seconds
    with Live(make_service(settings, str(model))) as server:
        server.ready(300)
        spare_collector()
        threads = [threading.Thread(target=_client, args=(server, i, end, found)) for i in range(clients)]
        for thread in threads:
            thread.start()
        before, next_word = 0, time.monotonic() + 60
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.05)
            if not before and end - time.monotonic() < 0.75 * seconds:
                before = _memory()
            if time.monotonic() > next_word:
                next_word += 60
                tell(f"{found.answered} answered, {found.left} left, {_memory() >> 20} MiB, {found.failures[:3]}")
        snapshot = server.service.model.engine.snapshot
        eventually(lambda: not snapshot().requests and not server.service.pace.running and not server.open, 30)
        found.growth = _memory() - before
    return found


def _memory() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def _client(server: Live, number: int, end: float, found: Soak) -> None:
    rng = random.Random(number)
    try:
        with server.client() as client:
            while time.monotonic() < end:
                _ask(client, rng, found)
    except Exception as e:
        found.failures.append(f"client {number}: {e!r}")


def _ask(client: httpx.Client, rng: random.Random, found: Soak) -> None:
    """One request, which must be answered as asked."""
    kind = rng.choice(("whole", "stream", "chat", "leave"))
    text = "".join(rng.choice("abc de\n") for _ in range(rng.randint(1, 200)))
    n = rng.randint(1, 24)
    body: dict[str, Any] = {"max_tokens": n, "ignore_eos": True, "stream": kind in ("stream", "leave")}
    if kind == "chat":
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": text}]
    else:
        path, body["prompt"] = "/v1/completions", text
    if kind == "leave":
        with client.stream("POST", path, json=body | {"max_tokens": 3000}) as answer:
            next(answer.iter_lines())
        found.left += 1
        return
    answered = client.post(path, json=body)
    complete = answered.text.endswith("data: [DONE]\n\n") or f'"completion_tokens":{n},' in answered.text
    if answered.status_code != 200 or not complete:
        found.failures.append(f"{kind}: {answered.status_code} {answered.text[:200]}")
    found.answered += 1


def main() -> int:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("model", nargs="?", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or write_tiny(Path(folder) / "tiny.gguf", metadata={"tokenizer.chat_template": QUIET})
        found = soak(model, 3600 * args.hours, tell=lambda line: print(line, flush=True))
    print(found)
    return int(bool(found.failures) or found.growth > GROWTH)


if __name__ == "__main__":
    sys.exit(main())
