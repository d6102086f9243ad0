"""Where the model is that is used when no file is named. It comes with the package; tools/embedded_model makes it."""

from __future__ import annotations

from pathlib import Path

from ..errors import ModelFileError

_PATH = Path(__file__).parents[1] / "data" / "embedded.gguf"


def embedded_model() -> Path:
    """Path of the embedded model. Raises ModelFileError if the package was installed without it."""
    if not _PATH.is_file():
        raise ModelFileError(f"{_PATH}: the embedded model is missing; install the package again, or name a model file")
    return _PATH


def is_embedded(path: Path) -> bool:
    """Whether a file is the embedded model."""
    return path.resolve() == _PATH.resolve()
