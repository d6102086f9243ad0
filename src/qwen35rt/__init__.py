"""Run Qwen3.5-family GGUF models on CPU and NVIDIA GPUs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors
    from .api import Model, Stream, load
    from .engine.result import Completion, Timings, TokenLogprob, Usage
    from .errors import Qwen35Error

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "Model",
    "Qwen35Error",
    "Stream",
    "Timings",
    "TokenLogprob",
    "Usage",
    "__version__",
    "errors",
    "load",
]

# Loaded at first use, so that importing the package costs next to nothing.
_HOMES = {
    "load": "api",
    "Model": "api",
    "Stream": "api",
    "Completion": "engine.result",
    "Timings": "engine.result",
    "TokenLogprob": "engine.result",
    "Usage": "engine.result",
    "Qwen35Error": "errors",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module(".errors", __name__)
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
