"""An engine without a model: real turns on scripted tokens; and a client that speaks ASGI."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec

import numpy as np

from qwen35rt.backends.base import StepReport
from qwen35rt.engine.engine import EngineSnapshot, Sink
from qwen35rt.engine.turn import Turn
from qwen35rt.errors import Cancelled, EngineStopped, QueueFull, Qwen35Error
from qwen35rt.plan import Plan
from qwen35rt.server.model import Loaded, ModelFacts
from qwen35rt.tokenizer import Tokenizer, build_tokenizer
from tests.tiny_vocab import spell, tiny_vocab

P = ParamSpec("P")
EXTRA = ("BC", "DEF", "word ", "longer", "\U0001f600")
REPORT = StepReport({"cpu": 1}, 0.0, 1)
SURE = 40.0  # logit of a scripted token; the others are drawn from a normal distribution


def asynchronous(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that runs in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def make_tokenizer(**changes: Any) -> Tokenizer:
    """The tiny vocabulary and a few longer tokens."""
    vocab = tiny_vocab(None, [spell(t.encode()) for t in EXTRA])
    metadata = {
        "model": "gpt2",
        "pre": "qwen35",
        "tokens": list(vocab.tokens),
        "token_type": list(vocab.types),
        "merges": list(tiny_merges()),
        "eos_token_id": vocab.id("<|im_end|>"),
        "add_bos_token": False,
        **changes,
    }
    return build_tokenizer({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})


def tiny_merges() -> tuple[str, ...]:
    from tests.tiny_vocab import MERGES

    return MERGES


class FakePlace:
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self.turns = 0
        engine.places.add(self)

    def release(self) -> None:
        self._engine.places.discard(self)


@dataclass(eq=False)
class Job:
    turn: Turn
    index: int
    sink: Sink
    engine: FakeEngine
    script: Iterator[int]
    place: FakePlace
    draws: int = 0
    request_id: str = ""

    def cancel(self) -> None:
        self.turn.cancelled = True
        self.engine.notify()

    def pause(self) -> None:
        self.turn.paused = True

    def resume(self) -> None:
        self.turn.paused = False
        self.engine.notify()


class FakeEngine:
    """``slots`` turns at a time, a token each per step of ``delay`` seconds. ``script``: plan -> ids, then the end;
    ``fault``: (turn, tokens drawn) -> an error that ends it, or None."""

    def __init__(self, tokenizer: Tokenizer, slots: int = 4, queue: int = 64) -> None:
        self.tokenizer, self.slots, self.queue = tokenizer, slots, queue
        self.places: set[FakePlace] = set()
        self.state = "ready"
        self.delay = 0.0
        self.script: Callable[[Plan], Iterable[int]] = lambda plan: self.ids(b" to", b" be")
        self.fault: Callable[[Turn, int], Qwen35Error | None] = lambda turn, n: None
        self.submitted: list[Plan] = []
        self.steps = 0
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.refuse: Qwen35Error | None = None
        self._noise = np.random.default_rng(7).normal(size=(16, tokenizer.n_vocab)).astype(np.float32)
        self._wake = threading.Condition()
        self._stopping = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def ids(self, *pieces: bytes) -> list[int]:
        """Each piece as one token if the vocabulary has it, else byte by byte."""
        index = self.tokenizer.vocab.index
        found: list[int] = []
        for piece in pieces:
            whole = index.get(spell(piece), index.get(piece.decode("utf-8", "replace")))
            found += [whole] if whole is not None else [index[spell(bytes([b]))] for b in piece]
        return found

    def forever(self, *pieces: bytes) -> None:
        """Say this again and again."""
        self.script = lambda plan: itertools.cycle(self.ids(*pieces))

    def say(self, *pieces: bytes) -> None:
        """Say this to every prompt."""
        self.script = lambda plan: self.ids(*pieces)

    def reserve(self) -> FakePlace:
        if self.refuse is not None:
            raise self.refuse
        if len(self.places) >= self.slots + self.queue:
            raise QueueFull("full")
        return FakePlace(self)

    def submit_all(
        self, plans: Sequence[Plan], sink: Sink, *, accepted: float | None, request_id: str, place: FakePlace
    ) -> list[Job]:
        if self.refuse is not None:
            raise self.refuse
        place.turns = len(plans)
        jobs = [
            Job(Turn(p, self.tokenizer, accepted), i, sink, self, iter(self.script(p)), place)
            for i, p in enumerate(plans)
        ]
        with self._wake:
            self.submitted += plans
            self.waiting += jobs
            self._wake.notify_all()
        return jobs

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot("ready", "", self.slots, waiting=len(self.waiting), pages=4, pages_free=3)

    def notify(self) -> None:
        with self._wake:
            self._wake.notify_all()

    def stop(self) -> None:
        with self._wake:
            self._ended = True
            self._wake.notify_all()
        self._thread.join()
        with self._stopping:  # a server and its test may come here at once
            for job in self.waiting + self.running:
                self._end(job, EngineStopped("stopped"))

    def _active(self) -> bool:
        jobs = self.waiting + self.running
        return self._ended or any(j.turn.cancelled or not j.turn.paused for j in jobs)

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(self._active)
                if self._ended:
                    return
                withdrawn = [j for j in self.waiting + self.running if j.turn.cancelled]
            for job in withdrawn:
                self._end(job, Cancelled("withdrawn"))
            with self._wake:
                while self.waiting and len(self.running) < self.slots:
                    self.running.append(self.waiting.pop(0))
                jobs = [j for j in self.running if not j.turn.paused]
            if self.delay:
                time.sleep(self.delay)
            for job in jobs:
                self._step(job)
            self.steps += bool(jobs)

    def _end(self, job: Job, error: Qwen35Error | None = None) -> None:
        (self.running if job in self.running else self.waiting).remove(job)
        job.place.turns -= 1
        if not job.place.turns:
            job.place.release()
        job.sink(job.index, job.turn.completion if error is None else error)

    def _step(self, job: Job) -> None:
        turn, ids = job.turn, job.turn.plan.ids
        if ended(turn):
            self._end(job)
            return
        error = self.fault(turn, job.draws)
        if error is not None:
            self._end(job, error)
            return
        turn.began(0)
        turn.stepped(REPORT, len(ids) + job.draws)
        if not job.draws and turn.plan.prompt_logprobs:
            turn.read_prompt(0, np.stack([self._noise[i % 16] for i in ids[:-1]]) if len(ids) > 1 else self._noise[:0])
        logits = self._noise[job.draws % 16].copy()
        logits[next(job.script, self.tokenizer.vocab.eos or 0)] = SURE
        job.draws += 1
        delta = turn.draw(logits)
        job.sink(job.index, delta)
        if ended(turn):
            self._end(job)


def ended(turn: Turn) -> bool:
    """Whether nothing more comes of it."""
    return turn.finish_reason is not None


class Exchange:
    """One request over ASGI. ``messages``: what came back. ``gate``: while it is clear the client does not read;
    ``stop_at``: a part of the body that clears it."""

    def __init__(
        self,
        app: Any,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Iterable[tuple[str, str]] = (),
        *,
        query: bytes = b"",
        complete: bool = True,
        stop_at: bytes | None = None,
    ) -> None:
        given = [(k.lower().encode(), v.encode("latin-1")) for k, v in headers]
        if not any(k == b"host" for k, _ in given):
            given.append((b"host", b"localhost"))
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
            "root_path": "",
            "headers": given,
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 80),
            "extensions": {},
        }
        self._stop_at = stop_at
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": not complete})
        self.messages: list[dict[str, Any]] = []
        self._news = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.task = asyncio.ensure_future(app(self._scope, self._incoming.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        await self.gate.wait()
        self.messages.append(dict(message))
        if self._stop_at is not None and self._stop_at in message.get("body", b""):
            self.gate.clear()
        self._news.set()

    def go_on(self) -> None:
        """The client reads again, to the end."""
        self._stop_at = None
        self.gate.set()

    def leave(self) -> None:
        """The client closes its connection."""
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {k.decode().lower(): v.decode("latin-1") for k, v in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.messages[1:])

    @property
    def json(self) -> Any:
        assert self.headers["content-type"].startswith("application/json"), self.headers
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found = self.json["error"]
        assert set(found) >= {"message", "type", "param", "code"}
        assert isinstance(found, dict)
        return found

    @property
    def lines(self) -> list[str]:
        """The data of all events so far."""
        return [part[6:] for part in self.body.decode().split("\n\n") if part.startswith("data: ")]

    @property
    def events(self) -> list[dict[str, Any]]:
        """JSON events so far."""
        return [json.loads(line) for line in self.lines if line != "[DONE]"]

    @property
    def text(self) -> str:
        """Text of choice 0 so far."""
        return "".join(c["text"] for e in self.events for c in e["choices"] if c["index"] == 0)

    async def until(self, test: Callable[[], bool], seconds: float = 5.0) -> None:
        """Wait for the answer to reach a state."""
        async with asyncio.timeout(seconds):
            while not test():
                self._news.clear()
                await self._news.wait()

    async def end(self, seconds: float = 10.0) -> Exchange:
        """Wait for the whole answer."""
        async with asyncio.timeout(seconds):
            await self.task
        return self


async def started(exchange: Exchange, events: int = 1) -> Exchange:
    """Wait until a stream has given so many events."""
    await exchange.until(lambda: len(exchange.lines) >= events)
    return exchange


async def eventually(test: Callable[[], bool], seconds: float = 3.0) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.005)


def loaded(engine: FakeEngine, n_ctx: int = 256, **facts: Any) -> Loaded:
    """A model around the engine."""
    tokenizer = engine.tokenizer
    given: Mapping[str, Any] = {"id": "tiny", "device": "cpu", "hash": "0123456789abcdef"} | facts
    return Loaded(ModelFacts(n_ctx=n_ctx, n_vocab=tokenizer.n_vocab, **given), tokenizer, engine)
