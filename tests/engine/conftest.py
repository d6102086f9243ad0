"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qwen35rt.parts import open_tokenizer
from qwen35rt.tokenizer import Tokenizer

from ..fixtures import write_tiny
from .bed import Bed


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    formats = {"*attn_*.weight": "Q8_0", "*ffn_*.weight": "Q4_0", "token_embd*": "Q8_0"}
    drop = {"*norm.weight": ""}  # vectors stay as they are
    return write_tiny(tmp_path_factory.mktemp("q") / "q.gguf", formats=drop | formats)


@pytest.fixture(scope="module")
def tokenizer(tiny_dense: Path) -> Tokenizer:
    return open_tokenizer(tiny_dense)


@pytest.fixture
def beds(tokenizer: Tokenizer) -> Iterator[Callable[..., Bed]]:
    made: list[Bed] = []

    def make(**options: Any) -> Bed:
        made.append(Bed(tokenizer, **options))
        return made[-1]

    yield make
    for bed in made:
        bed.opening.set()
        for fake in bed.fakes:
            fake.gate.set()
        bed.engine.stop()
        assert all(f.closed for f in bed.fakes)
