"""Fixtures shared by all tests: tiny models and the folder of oracle files."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen35rt.config import environment

from .fixtures import write_tiny


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
