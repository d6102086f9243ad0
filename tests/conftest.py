"""Fixtures shared by all tests: tiny models and the folder of oracle files; work of other processes begins early."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from qwen35rt.config import environment

from . import ahead
from .fixtures import write_tiny


def pytest_configure() -> None:
    # A script's background job ignores SIGINT, and so would the programs that tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def oracle() -> Path:
    """The folder of oracle files: QWEN35RT_ORACLE, else shared/oracle beside the repository."""
    named = environment().oracle
    folder = Path(named) if named else Path(__file__).parents[2] / "shared" / "oracle"
    if not folder.is_dir():
        pytest.skip(f"no oracle files in {folder}; set QWEN35RT_ORACLE")
    return folder


@pytest.fixture(scope="session")
def tiny_dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY-D. Shared: do not write to it."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "dense.gguf")


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TINY-MOE. Shared: do not write to it."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "moe.gguf", "moe")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without -m, leave out the long forms, and what needs a GPU."""
    if config.option.markexpr:
        return
    left_out = {i for i in items if i.get_closest_marker("long") or i.get_closest_marker("gpu")}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [i for i in items if i not in left_out]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin the work that the chosen tests will wait for (ahead.py)."""
    if session.config.option.collectonly:
        return
    chosen: dict[Any, list[pytest.Function]] = {}
    for item in session.items:
        if isinstance(item, pytest.Function):
            chosen.setdefault(item.module, []).append(item)
    ahead.open_session(len(session.items))
    waiting: list[pytest.Item] = []
    for module, items in chosen.items():
        if hasattr(module, "begin_ahead"):
            waiting += module.begin_ahead(items)
    if ahead.is_long():
        last = set(waiting)
        session.items[:] = [*(item for item in session.items if item not in last), *waiting]


def pytest_sessionfinish() -> None:
    ahead.close_session()
