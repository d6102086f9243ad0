"""Every route that the server knows, as (method, pattern). HEAD goes where GET does. A test compares it with the map.

Those of later stages answer 501 until they are built.
"""

from __future__ import annotations

HEALTH = ("/health", "/healthz", "/v1/health", "/ping", "/livez", "/readyz")  # need no key

STAGE_1: tuple[tuple[str, str], ...] = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/chat/completions/input_tokens"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/<path:id>"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/apply-template"),
    *(("GET", path) for path in HEALTH),
    ("GET", "/metrics"),
    ("GET", "/props"),
    ("GET", "/slots"),
    ("GET", "/version"),
    ("GET", "/load"),
)
STAGE_2: tuple[tuple[str, str], ...] = (
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("POST", "/slots/<id>"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/api/generate"),
    ("POST", "/api/chat"),
    ("GET", "/api/tags"),
    ("POST", "/api/show"),
    ("GET", "/api/ps"),
    ("GET", "/api/version"),
    ("GET", "/"),
)
STAGE_3: tuple[tuple[str, str], ...] = (
    ("POST", "/v1/embeddings"),
    ("POST", "/api/embed"),
    ("POST", "/infill"),
    ("POST", "/models/load"),
    ("GET", "/lora-adapters"),
)
ROUTES: tuple[tuple[str, str], ...] = STAGE_1 + STAGE_2 + STAGE_3
