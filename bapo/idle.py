"""Connections that no call has to itself now, of one process."""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

from bapo.forks import begins_again_in_children


class Connection(Protocol):
    """Something open."""

    def close(self) -> None:
        """Close it."""
        ...


T = TypeVar("T", bound=Connection)


class Idle(Generic[T]):
    """The newest first. Thread-safe."""

    def __init__(self, most: int) -> None:
        """`most` are kept."""
        self._most = most
        self._kept: deque[T] = deque()
        begins_again_in_children(self)

    def begin_again(self) -> None:
        """In a forked process: the parent goes on with them, and here they are closed, unused."""
        self.close()

    def close(self) -> None:
        """Those that are idle now; what is kept later stays open."""
        while (connection := self.take()) is not None:
            connection.close()

    def __del__(self) -> None:
        self.close()  # a socket that nobody closes is worth a ResourceWarning to Python

    def take(self) -> T | None:
        """One of them, if there is one."""
        try:
            return self._kept.pop()
        except IndexError:
            return None

    def keep(self, connection: T) -> bool:
        """Whether it is kept; else it is the caller's to close."""
        if len(self._kept) >= self._most:
            return False
        self._kept.append(connection)
        return True
