"""Models with rows of 256 and a place for outputs, for the tests of quantize."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..fixtures import write_tiny
from .command import EXPERTS, WIDE


@pytest.fixture(scope="package")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense F32 model with an MTP block."""
    return write_tiny(tmp_path_factory.mktemp("wide") / "dense.gguf", mtp=True, **WIDE)


@pytest.fixture(scope="package")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of five experts in F32."""
    return write_tiny(tmp_path_factory.mktemp("wide") / "moe.gguf", "moe", **EXPERTS)


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """A path for the output, alone in its folder. No temporary file may be left beside it."""
    folder = tmp_path / "out"
    folder.mkdir()
    yield folder / "q.gguf"
    assert [p.name for p in folder.iterdir() if p.name != "q.gguf"] == []
