"""The worker thread on a fake executable: its states, faults and restarts, stop."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from qwen35rt.engine.result import Completion
from qwen35rt.errors import (
    BackendError,
    EngineLoading,
    EngineRestarting,
    EngineStopped,
)

from .bed import WAIT, Bed


def test_c60_a_fault_fails_what_runs_keeps_what_waits_and_starts_anew(beds: Callable[..., Bed]) -> None:
    bed = beds(parallel=2, queue=5)
    bed.fake.gate.clear()
    first = bed.fake
    with bed.engine._wake:  # all come in the same step
        readers = [bed.submit()[1] for _ in range(4)]
    bed.until(lambda: len(bed.engine.snapshot().running) == 2)
    bed.opening.clear()
    first.error = BackendError("made to fail")
    first.gate.set()
    for reader in readers[:2]:
        assert isinstance(reader.wait(), EngineRestarting)
    assert bed.engine.state == "restarting"
    assert "made to fail" in bed.engine.reason
    with pytest.raises(EngineRestarting):
        bed.submit()
    bed.opening.set()
    for reader in readers[2:]:
        assert reader.completion().ids == [4, 5, 6, 7]
    assert first.closed
    assert (len(bed.fakes), bed.engine.restarts, bed.engine.state) == (2, 1, "ready")
    assert bed.submit()[1].completion().ids == [4, 5, 6, 7]
    bed.check_all_returned()


def test_faults_without_end_stop_the_engine(beds: Callable[..., Bed]) -> None:
    bed = beds(queue=10)
    for i in range(4):
        bed.fake.error = RuntimeError("a bug")
        _, reader = bed.submit()
        error = reader.wait()
        assert isinstance(error, EngineRestarting if i < 3 else BackendError)
        bed.engine.wait_ready(WAIT)
    assert (bed.engine.state, bed.engine.reason) == ("failed", "RuntimeError")
    with pytest.raises(EngineStopped, match="failed"):
        bed.submit()
    assert len(bed.fakes) == 4


def test_faults_long_ago_do_not_count(beds: Callable[..., Bed]) -> None:
    bed = beds(restart_window=0.0)
    for _ in range(6):
        bed.fake.error = BackendError("again")
        assert isinstance(bed.submit()[1].wait(), EngineRestarting)
        assert bed.engine.wait_ready(WAIT)


def test_c2_states_while_loading_and_after_a_failed_start(beds: Callable[..., Bed]) -> None:
    bed = beds(start=False)
    assert bed.engine.state == "loading"
    with pytest.raises(EngineLoading):
        bed.submit()
    bed.open_error = BackendError("no device")
    bed.engine.start()
    assert not bed.engine.wait_ready(WAIT)
    assert (bed.engine.state, bed.engine.reason, bed.fakes) == ("failed", "no device", [])
    with pytest.raises(EngineStopped, match="no device"):
        bed.submit()


def test_stop_ends_what_is_paused_and_refuses_what_comes(beds: Callable[..., Bed]) -> None:
    bed = beds(parallel=1)
    ticket, reader = bed.submit(max_tokens=50)
    ticket.pause()
    bed.engine.stop()
    assert isinstance(reader.wait(), EngineStopped)
    assert bed.engine.state == "stopped"
    ticket.cancel()
    with pytest.raises(EngineStopped):
        bed.submit()


def test_stop_ends_what_runs_and_what_waits(beds: Callable[..., Bed]) -> None:
    bed = beds(parallel=1)
    readers = [bed.submit(max_tokens=10_000)[1] for _ in range(3)]
    bed.engine.stop()
    assert [type(r.wait()) for r in readers[1:]] == [EngineStopped] * 2
    assert isinstance(readers[0].wait(), EngineStopped | Completion)
    bed.engine.stop()
