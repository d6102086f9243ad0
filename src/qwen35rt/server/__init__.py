"""The HTTP server: requests become plans for the engine, its events become answers. Knows no tensor."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quart import Quart

__all__ = ["create_app"]


def create_app(
    model_path: str | os.PathLike[str] | None = None, *, config: str | None = None, **settings: Any
) -> Quart:
    """An application for any ASGI server; its start-up begins to load the model (None: the embedded model).

    ``settings``: the flags of ``qwen35rt serve`` with underscores, such as ``ctx_size``, ``api_key`` (a list) or
    ``allowed_hosts``; where one is absent its QWEN35RT_ variable counts, then the file ``config``, then the default.
    Only one process may serve it, as each would load the model. Raises ConfigError.
    """
    from .app import create_app as build
    from .loading import make_service
    from .settings import read_settings

    given = settings if model_path is None else {**settings, "model": os.fspath(model_path)}
    chosen = read_settings(given, config)
    return build(make_service(chosen, chosen.model))
