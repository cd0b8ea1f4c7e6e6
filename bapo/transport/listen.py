"""Open the socket that a service listens on."""

from __future__ import annotations

import errno
import socket

from bapo.core.addresses import authority, to_bind
from bapo.core.errors import ConfigError

BACKLOG = 512


def listen(host: str, port: int, *, what: str, key: str) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises: ConfigError for a taken port or an address of another host.

    Args:
        what, key: for the error message: the service, and the config key of its port.
    """
    try:
        family, address = to_bind(host, port)
        # asyncio turns off Nagle's algorithm, which costs 40 ms per answer, only where the protocol is named.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        what_to_do = f"choose another host or another {key}"
        if error.errno == errno.EADDRINUSE:
            what_to_do = f"stop the process that uses it, or choose another {key} (0: a free port)"
        raise ConfigError(f"{what} cannot listen on {authority(host, port)}: {error.strerror}; {what_to_do}") from error
    listener.listen(BACKLOG)
    return listener
