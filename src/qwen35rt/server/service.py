"""The model that is served and its states; runs jobs. Made before the model is loaded; knows no route and no field."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal, TypeVar

from quart import Response

from ..config import SERVER
from ..engine.engine import EngineSnapshot
from ..errors import EngineLoading, EngineRestarting, EngineStopped, OutOfMemory, QueueFull, Qwen35Error
from .answer import Job
from .errors import ModelNotFound, NoModel, row_of
from .guard import Guard
from .metrics import Metrics
from .model import Loaded
from .record import Record
from .settings import ServerSettings
from .stream import answer
from .turns import Pace, Turns

log = logging.getLogger(__name__)

T = TypeVar("T")
State = Literal["loading", "no_model", "ready", "draining", "degraded"]
_MODEL_NAMES_LOGGED = 100


class Service:
    """``open_model``: reads the model and starts the engine, called in a thread of its own by ``start``; None: there
    is no model. ``failure``: why it could not be loaded. ``loaded``: set when loading has ended either way."""

    def __init__(self, settings: ServerSettings, open_model: Callable[[], Loaded] | None = None) -> None:
        self.settings = settings
        self.guard = Guard(settings)
        self.pace = Pace()
        self.metrics = Metrics(self._snapshot, settings.metrics_compat)
        self.failure: Exception | None = None
        self.loaded = threading.Event()
        self.started = time.monotonic()
        self.draining = False
        self._open_model = open_model
        self._model: Loaded | None = None
        # One thread each: short texts stay in the order of their arrival and never wait for long ones.
        self._short, self._long = (ThreadPoolExecutor(1, f"qwen35rt-{name}") for name in ("short", "long"))
        self._odd_names: set[str] = set()
        self.progress = 0.0  # of loading, 0 to 1
        self.live: set[Turns] = set()  # submitted and not ended
        self.halted = False
        self.on_failure: Callable[[Exception], None] = _log_failure

    def start(self) -> None:
        """Begin to load the model; returns at once."""
        if self._open_model is None:
            self.loaded.set()
        elif not self.loaded.is_set():
            threading.Thread(target=self._load, args=(self._open_model,), name="qwen35rt-load", daemon=True).start()

    def close(self) -> None:
        """Release what the service holds; turns that are left end with EngineStopped."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._model is not None:
            self._model.close()

    def halt(self) -> None:
        """End what still runs with EngineStopped, now, whatever the engine is doing."""
        self.draining = self.halted = True
        for turns in list(self.live):
            turns.fail(EngineStopped("the server is shutting down"))

    @property
    def model(self) -> Loaded:
        """The loaded model. Raises EngineLoading or NoModel."""
        if self._model is None:
            raise EngineLoading("the model is being loaded") if not self.loaded.is_set() else NoModel("no model")
        return self._model

    @property
    def state(self) -> State:
        """In one word; ``degraded``: the engine does not run."""
        if self.draining:
            return "draining"
        if self._model is None:
            return "loading" if not self.loaded.is_set() else "no_model"
        state = self._model.engine.state
        if state == "loading":
            return "loading"
        if state == "stopped":
            return "draining"
        return "ready" if state == "ready" else "degraded"

    def check_ready(self) -> Loaded:
        """The model, if requests can be taken now. Raises one of the refusals of C2."""
        state = self.state
        if state == "draining":
            raise EngineStopped("the server is shutting down")
        if state == "degraded":
            raise EngineRestarting("the engine is being restarted")
        if state == "loading":
            raise EngineLoading("the model is being loaded")
        return self.model

    def check_model(self, name: str | None, record: Record) -> Loaded:
        """The model that a generating request names (C12)."""
        self.check_ready()
        return self.find_model(name, record)

    def find_model(self, name: str | None, record: Record) -> Loaded:
        """The model that a request names, whether or not the engine takes requests."""
        model = self.model
        record.headers["x-model-id"] = _header(model.facts.id)
        if name is not None and name not in model.facts.names:
            if self.settings.strict_model:
                raise ModelNotFound("there is no model of this name", "model")
            if name not in self._odd_names and len(self._odd_names) < _MODEL_NAMES_LOGGED:
                self._odd_names.add(name)
                log.info("a request names the model %r; %r answers", name[:100], model.facts.id)
        return model

    async def off_loop(self, work: Callable[[], T], size: int) -> T:
        """Run ``work`` on ``size`` bytes of a body off the event loop."""
        pool = self._long if size > SERVER.short_body else self._short
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    async def run(self, record: Record, model: Loaded, build: Callable[[], Job]) -> Response:
        """Take a place, make the job off the event loop, run it, answer. Raises what refuses it."""
        place = model.engine.reserve()
        record.at_end(place.release)
        self.pace.begin()
        record.at_end(self.pace.end)
        accepted = time.perf_counter()
        job = await self.off_loop(build, record.body_bytes)
        if self.halted:
            raise EngineStopped("the server is shutting down")
        self.metrics.submitted(job.plans)
        turns = Turns(
            model.engine,
            job.plans,
            place,
            accepted=accepted,
            deadline=record.arrived + self.settings.request_timeout,
            request_id=record.id,
            deltas=job.stream,
            max_bytes=self.settings.max_stream_buffer,
            observe=self.metrics.watch(accepted - record.arrived),
        )
        self.live.add(turns)
        record.at_end(partial(self.live.discard, turns))
        return await answer(job, turns, record, self.settings)

    def retry_after(self, error: BaseException) -> int:
        """Seconds after which a refused request may come again."""
        if isinstance(error, QueueFull | OutOfMemory):
            return self.pace.retry_after()
        return 5 if isinstance(error, EngineLoading) else 1

    def refused(self, error: BaseException) -> None:
        """Count a request that was not admitted."""
        row = row_of(error)
        if row.status == 503:
            self.metrics.rejected(row.code)

    def _load(self, open_model: Callable[[], Loaded]) -> None:
        try:
            model = open_model()
            try:
                model.prepare()
                self.metrics.loaded(model.facts)
            except BaseException:
                model.close()
                raise
            self._model, self.progress = model, 1.0
        except Exception as e:
            self.failure = e
            self.on_failure(e)
        self.loaded.set()

    def _snapshot(self) -> EngineSnapshot | None:
        return None if self._model is None else self._model.engine.snapshot()


def _log_failure(error: Exception) -> None:
    log.error("the model cannot be loaded: %s", error, exc_info=None if isinstance(error, Qwen35Error) else error)


def _header(text: str) -> str:
    """A text that a header field can hold."""
    return "".join(c if 32 < ord(c) < 127 else "_" for c in text)
