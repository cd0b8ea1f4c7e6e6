"""Open the socket that a service listens on."""

from __future__ import annotations

import socket

from bapo.core.errors import ConfigError

BACKLOG = 512


def listen(host: str, port: int, *, what: str, key: str) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises: ConfigError when the port is taken.

    Args:
        what, key: for the error message: the service, and the config key of its port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{what} cannot listen on {host}:{port}: {error.strerror}; "
            f"stop the process that uses it, or choose another {key} (0: a free port)"
        ) from error
    listener.listen(BACKLOG)
    return listener
