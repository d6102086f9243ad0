"""What is looked at before a body is read: header, Host, Origin, key, content type, size, open requests (C4).

Works on the head of a request only; what each check allows stands in the settings.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from quart import Request, Response
from werkzeug.datastructures import Headers

from ..errors import QueueFull
from .errors import (
    HeadersTooLarge,
    HostNotAllowed,
    InvalidApiKey,
    OriginNotAllowed,
    RequestTooLarge,
    UnsupportedMedia,
)
from .hosts import Hosts
from .settings import ServerSettings, is_loopback

_PREFLIGHT_SECONDS = "600"


class Guard:
    """Built once from the settings. Raises the refusals of server/errors.py."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._digests = tuple(_digest(key) for key in sorted(settings.keys()))
        self._hosts = Hosts(settings)
        self._origins = frozenset(o.rstrip("/").lower() for o in settings.cors_origins)

    @property
    def needs_key(self) -> bool:
        """Whether any key is set."""
        return bool(self._digests)

    def check_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Number and size of header fields, as they came."""
        sizes = [len(name) + len(value) for name, value in headers]
        if len(sizes) > self._settings.max_headers:
            raise HeadersTooLarge(
                f"the request has {len(sizes)} header fields; {self._settings.max_headers} are allowed"
            )
        if sum(sizes) > self._settings.max_header:
            raise HeadersTooLarge(f"the header is larger than {self._settings.max_header} bytes")

    def check_host(self, host: str) -> None:
        """Raise HostNotAllowed unless the host names this server."""
        if not self._hosts.allowed(host):
            raise HostNotAllowed("the Host header names no host of this server; see --allowed-hosts")

    def check_origin(self, origin: str | None) -> dict[str, str]:
        """-> the answer's CORS headers."""
        if origin is None:
            return {}
        if "*" in self._origins:
            return {"Access-Control-Allow-Origin": "*"}
        if origin.lower() in self._origins:
            return {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
        try:
            name = urlsplit(origin).hostname or ""
        except ValueError:
            name = ""
        if not is_loopback(name):
            raise OriginNotAllowed("pages of this origin may not ask; see --cors-origins")
        return {}

    def preflight(self, request: Request, cors: Mapping[str, str]) -> Response | None:
        """The answer to a browser's question before the request proper; None if it is none."""
        if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers or not cors:
            return None
        return Response(
            b"",
            204,
            {
                "Access-Control-Allow-Methods": "GET, HEAD, POST, OPTIONS",
                "Access-Control-Allow-Headers": "Authorization, Content-Type, X-Api-Key, X-Request-Id",
                "Access-Control-Max-Age": _PREFLIGHT_SECONDS,
            },
        )

    def has_key(self, headers: Headers) -> bool:
        """Whether a request shows a valid key, or none is needed."""
        if not self._digests:
            return True
        given = headers.get("x-api-key")
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        if given is None and scheme.lower() == "bearer":
            given = token.strip()
        digest = _digest(given or "")
        # All are looked at: the time says nothing of which one, if any, is right.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return given is not None and any(matches)

    def check_key(self, headers: Headers) -> None:
        """Raise InvalidApiKey, the same for a missing and a wrong one."""
        if not self.has_key(headers):
            raise InvalidApiKey("a valid API key is needed, as bearer token or in x-api-key")

    def check_body(self, headers: Headers) -> None:
        """Announced size and kind of a body."""
        length = headers.get("Content-Length", "")
        if length.isdecimal() and int(length[:20]) > self._settings.max_body:
            raise RequestTooLarge(f"the body is larger than {self._settings.max_body} bytes")
        kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind not in ("", "application/json"):
            raise UnsupportedMedia("the body must be application/json")
        if "Content-Encoding" in headers:
            raise UnsupportedMedia("encoded bodies are not taken")

    def check_open(self, n: int) -> None:
        """``n``: requests in flight, this one included."""
        if n > self._settings.max_open:
            raise QueueFull("too many requests are open")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
