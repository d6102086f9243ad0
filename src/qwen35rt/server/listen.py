"""The server's sockets. Imports nothing heavy, so that they take connections before anything else is loaded."""

from __future__ import annotations

import errno
import socket

from ..config import SERVER
from ..errors import ConfigError


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections, though nobody answers yet. Raises ConfigError saying what is in the way."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as e:
        raise ConfigError(f"--host {host}: no such address ({e.strerror})") from None
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(SERVER.backlog)
    except OSError as e:
        found.close()
        if e.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} of {host} is in use: another server listens there; see --port") from None
        raise ConfigError(f"the server cannot listen on {host}, port {port}: {e.strerror}") from None
    found.setblocking(False)
    return found
