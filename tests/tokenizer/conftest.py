from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen35rt.config import environment
from qwen35rt.tokenizer import Tokenizer, build_tokenizer
from tests.tokenizer.real_vocab import real_metadata, small_metadata


@pytest.fixture(scope="session")
def oracle() -> Path:
    path = Path(environment().oracle or Path(__file__).parents[3] / "shared" / "oracle")
    if not path.is_dir():
        pytest.skip("no oracle folder: set QWEN35RT_ORACLE")
    return path


@pytest.fixture(scope="session")
def real() -> Tokenizer:
    """Tokeniser over the whole Qwen3.5 vocabulary, the encoder for long text built."""
    tokenizer = build_tokenizer(real_metadata())
    tokenizer.warm()
    return tokenizer


@pytest.fixture
def small() -> Tokenizer:
    return build_tokenizer(small_metadata())


@pytest.fixture(scope="session")
def chat_cases(oracle: Path) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((oracle / "chat" / "golden.json").read_text(encoding="utf-8"))["cases"]
    return cases
