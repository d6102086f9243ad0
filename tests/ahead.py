"""Work of other processes (compilers, programs under test) that tests wait for, begun as soon as tests are chosen.

Tests keep one core busy; in a long session this work takes the others, at a low priority, and the tests that wait for
it come last. A test module with such work has a function ``begin_ahead``, which is given the module's chosen tests,
begins the work and gives the tests that wait for it (tests/conftest.py calls it).
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from qwen35rt.cpu_count import usable_cpus

T = TypeVar("T")
MANY = 1_000  # tests of a session that take long enough


@dataclass
class Ahead:
    """Work under way. ``pool``: None where there is no core for it; threads, and what they start, have low priority."""

    pool: ThreadPoolExecutor | None = None
    long: bool = False
    begun: dict[Hashable, Future[Any]] = field(default_factory=dict)
    children: set[subprocess.Popen[str]] = field(default_factory=set)
    ending: threading.Event = field(default_factory=threading.Event)
    change: threading.Condition = field(default_factory=threading.Condition)  # of the two below
    running: int = 0
    paused: bool = False


_ahead = Ahead()


def open_session(tests: int) -> None:
    """For so many tests."""
    cores = usable_cpus().affinity
    _ahead.long = tests >= MANY and cores > 1
    if cores > 1:
        _ahead.pool = ThreadPoolExecutor(cores - _ahead.long, initializer=partial(os.nice, 5))


def is_long() -> bool:
    """Whether the session's tests leave cores to work that begins now."""
    return _ahead.long


def begin(key: Hashable, work: Callable[[], object]) -> None:
    """Do this in another thread when its turn comes."""
    if _ahead.pool is not None:
        _ahead.begun[key] = _ahead.pool.submit(_in_turn, work)


def _in_turn(work: Callable[[], T]) -> T:
    with _ahead.change:
        _ahead.change.wait_for(lambda: not _ahead.paused)
        _ahead.running += 1
    try:
        return work()
    finally:
        with _ahead.change:
            _ahead.running -= 1
            _ahead.change.notify_all()


@contextmanager
def paused() -> Iterator[None]:
    """While it lasts nothing runs, for tests that count what this process holds. They must not ask for a result."""
    with _ahead.change:
        _ahead.paused = True
        _ahead.change.wait_for(lambda: not _ahead.running)
    try:
        yield
    finally:
        with _ahead.change:
            _ahead.paused = False
            _ahead.change.notify_all()


def result(key: Hashable, work: Callable[[], T]) -> T:
    """What the work of that name gave, or gives now if it has not begun. Raises what it raised."""
    future = _ahead.begun.pop(key, None)
    if future is None or future.cancel():
        return work()
    found: T = future.result()
    return found


def run(
    command: list[str], timeout: float | None = None, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, or to that of the session. Raises TimeoutExpired."""
    if _ahead.ending.is_set():
        raise InterruptedError("the session ends")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=cwd
    ) as child:
        _ahead.children.add(child)
        if _ahead.ending.is_set():  # since the check above
            child.kill()
        try:
            out, error = child.communicate(timeout=timeout)
        finally:
            child.kill()
            _ahead.children.discard(child)
    return subprocess.CompletedProcess(command, child.returncode, out, error)


@cache
def folder() -> Path:
    """Where such work finds and leaves files."""
    made = Path(tempfile.mkdtemp(prefix="qwen35rt-ahead-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def close_session() -> None:
    """Begin no more, and end what runs."""
    if _ahead.pool is None:
        return
    _ahead.pool.shutdown(wait=False, cancel_futures=True)
    _ahead.ending.set()
    for child in list(_ahead.children):
        child.kill()
    _ahead.pool.shutdown()
