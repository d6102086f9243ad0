"""Which names in a Host header are this server's. Imports nothing heavy: needed before the application is."""

from __future__ import annotations

import ipaddress
import re
import socket

from .settings import ServerSettings, is_loopback

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::\d{1,5})?")


class Hosts:
    """Built once from the settings."""

    def __init__(self, settings: ServerSettings) -> None:
        self._loopback = settings.loopback
        own = {socket.gethostname().lower()} if settings.loopback else set()
        self._names = frozenset(own | {h.lower() for h in settings.allowed_hosts})

    def allowed(self, host: str) -> bool:
        """On loopback binds: a page that has its own name point here must not reach the server."""
        if not self._loopback:
            return True
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = match[1].strip("[]").lower().rstrip(".")
        if name in self._names or is_loopback(name):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
