"""B90, C42, C60: a model served on a device, in emulation: what is said of it; faults, which never end on the CPU."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quart import Quart

from qwen35rt import self_test
from qwen35rt.backends import cuda
from qwen35rt.backends.base import Backend, Batch, Limits
from qwen35rt.backends.cuda.backend import CudaBackend
from qwen35rt.backends.cuda.interface import Grid
from qwen35rt.errors import BackendError, BackendUnavailable, ConfigError
from qwen35rt.model.source import open_source
from qwen35rt.server.app import create_app
from qwen35rt.server.loading import open_model
from qwen35rt.server.service import Service
from qwen35rt.server.settings import ServerSettings
from tests.cuda_host.host import HostLauncher, compiler
from tests.implementations import native
from tests.server.fake import Exchange, asynchronous, eventually
from tests.server.live import Live

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no g++ to build the kernels for the CPU"),
    pytest.mark.skipif(native() is None, reason="the compiled module qwen35rt._native is not built"),
]
SECONDS = 200  # emulation may have little of a busy machine
BODY = {"prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}


class Device(HostLauncher):
    """A device that fails: after ``good`` more launches once, or while it is ``dead``; ``tests`` counts its tests."""

    good: int | None = None
    dead = False
    tests = 0

    def _call(
        self, file: str, variant: str, name: str, grid: Grid, block: int, shared_bytes: int, args: tuple[Any, ...]
    ) -> None:
        if self.good is not None:
            self.good -= 1
            if self.good < 0:
                self.good = None
                raise BackendError("the GPU failed: illegal address")
        if self.dead:
            raise BackendError("the GPU failed: it is gone")
        super()._call(file, variant, name, grid, block, shared_bytes, args)


@pytest.fixture(scope="module", autouse=True)
def _built(tiny_dense: Path) -> None:
    """Kernels are compiled before anybody waits for them."""
    exe = CudaBackend(HostLauncher()).compile(open_source(tiny_dense).program, Limits(8, 8, 2, 4))
    for at, n in ((0, 7), (7, 1), (8, 2)):
        exe.run(Batch.single(range(n), at, np.arange(1, dtype=np.int32)))
    exe.close()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    """The only device, whose self-test fails while it is dead."""
    made = Device(description="Tester (sm_00)")

    def test(backend: Backend) -> None:
        assert isinstance(backend, CudaBackend)
        made.tests += 1
        if made.dead:
            raise BackendUnavailable("device cuda does not work here: it is gone")

    monkeypatch.setattr(cuda, "open_cuda", lambda: CudaBackend(made))
    monkeypatch.setattr(self_test, "self_test", test)
    return made


@pytest.fixture
def no_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever opens the CPU's kernels ends the test."""
    from qwen35rt.backends.cpu.backend import CpuBackend

    opened = []
    monkeypatch.setattr(CpuBackend, "__init__", lambda *args, **options: opened.append(args))
    yield
    assert not opened


Make = Callable[..., Service]


@pytest.fixture
def make(gpu: Device, tiny_dense: Path) -> Iterator[Make]:
    made: list[Service] = []

    def service(**options: Any) -> Service:
        given: dict[str, Any] = {"ctx_size": 128, "parallel": 2, "cache_ram": 1, "batch_size": 32, "threads": 1}
        settings = ServerSettings(**({"model": str(tiny_dense), "device": "cuda"} | given | options))
        made.append(Service(settings, lambda: open_model(settings)))
        return made[-1]

    yield service
    for each in made:
        each.close()


async def opened(service: Service) -> Quart:
    service.start()
    assert await asyncio.to_thread(service.loaded.wait, SECONDS)
    assert service.failure is None
    return create_app(service)


async def post(app: Quart, **body: Any) -> Exchange:
    return await Exchange(app, "POST", "/v1/completions", json.dumps(BODY | body).encode()).end(SECONDS)


async def page(app: Quart, path: str) -> Any:
    return (await Exchange(app, "GET", path).end()).json


@pytest.mark.usefixtures("no_cpu")
@asynchronous
async def test_c60_a_fault_of_the_device_fails_its_requests_and_starts_anew_there(gpu: Device, make: Make) -> None:
    """Buffered and streamed; later requests get the text of before, on the device again."""
    service = make()
    app = await opened(service)
    before = (await post(app)).json
    assert before["on_gpu"]
    gpu.good = 60
    waiting = [post(app), post(app, stream=True)]
    for failed in await asyncio.gather(*waiting):
        error = failed.error if failed.status != 200 else failed.events[-1]["error"]
        assert failed.status in (200, 503)
        assert error["code"] == "engine_restarting"
        assert "illegal address" not in error["message"], "that is for the log and for /health"
    await eventually(lambda: service.state == "ready", SECONDS)
    again = (await post(app)).json
    assert again["on_gpu"]
    assert again["choices"] == before["choices"]
    assert gpu.tests == 2  # at the start, and before it was used again
    text = service.metrics.text().decode()
    assert 'qwen35rt:engine_restarts_total{engine="0",model_name="dense"} 1.0' in text
    assert (
        'backend="cuda",device="Tester (sm_00)",engine="0",model_name="dense",n_gpu_layers="4",n_layers="4"} 1.0'
        in text
    )
    health, props = await page(app, "/health"), await page(app, "/props")
    assert (health["device"], health["device_name"], health["n_gpu_layers"]) == ("cuda", "Tester (sm_00)", 4)
    assert (props["device"], props["device_name"], props["n_gpu_layers"]) == ("cuda", "Tester (sm_00)", 4)


@pytest.mark.usefixtures("no_cpu")
def test_c60_a_device_that_stays_away_ends_the_server_with_the_reason(gpu: Device, make: Make) -> None:
    service = make()
    with Live(service) as server, server.client() as client:
        server.ready(SECONDS)
        gpu.dead = True
        answer = client.post("/v1/completions", json=BODY, timeout=SECONDS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_restarting")
        assert server.join(SECONDS) == 1
    assert gpu.tests == 4  # at the start, and in three tries
    assert "failed too often; the server ends: device cuda does not work here: it is gone" in server.lines[-1]


@asynchronous
async def test_c42_some_layers_on_the_device(gpu: Device, make: Make) -> None:
    """Said at the start and in reports; not on_gpu. A fault there is one of the engine."""
    service = make(n_gpu_layers=2)
    app = await opened(service)
    facts = service.model.facts
    assert (facts.device, facts.reason) == ("cuda+cpu", "2 of 4 layers on Tester (sm_00), the rest on the CPU")
    before = (await post(app)).json
    assert before["on_gpu"] is False
    assert gpu.launches > 0
    health = await page(app, "/health")
    assert (health["device"], health["device_name"], health["n_gpu_layers"]) == ("cuda+cpu", "Tester (sm_00)", 2)
    gpu.good = 5
    assert (await post(app)).error["code"] == "engine_restarting"
    await eventually(lambda: service.state == "ready", SECONDS)
    assert (await post(app)).json["choices"] == before["choices"]
    assert gpu.tests == 2


def test_b90_a_device_that_fails_in_its_first_step_ends_the_start(gpu: Device, make: Make) -> None:
    gpu.good = 0
    service = make()
    service.start()
    assert service.loaded.wait(SECONDS)
    assert isinstance(service.failure, BackendError)
    assert "first step of the model failed" in str(service.failure)


def test_layers_and_device_that_disagree_end_the_start(make: Make) -> None:
    for options in ({"device": "cpu", "n_gpu_layers": 2}, {"n_gpu_layers": 0}):
        service = make(**options)
        service.start()
        assert service.loaded.wait(SECONDS)
        assert isinstance(service.failure, ConfigError)
