"""A blocking method as a coroutine: each call runs in a thread of its own.

Threads and not an event loop's own sockets, because what takes long is the service and its Redis, and a second HTTP
client would be a second set of retries, errors and limits. A thread per call costs less than 0.1 ms and, unlike a
pool's, never makes one call wait for another one's long poll, nor the interpreter for a call that was cancelled.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Blocking = TypeVar("Blocking", covariant=True)


class Wraps(Protocol[Blocking]):
    """An object whose methods block in another one."""

    @property
    def blocking(self) -> Blocking:
        """The other one."""
        ...


def in_thread(
    method: Callable[Concatenate[Blocking, P], R],
) -> Callable[Concatenate[Wraps[Blocking], P], Coroutine[Any, Any, R]]:
    """The coroutine with the arguments, the answer, the errors and the documentation of a blocking method."""

    @wraps(method)
    async def coroutine(self: Wraps[Blocking], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await run_in_thread(lambda: method(self.blocking, *args, **kwargs))

    return coroutine


def with_arguments_of(
    method: Callable[Concatenate[Any, P], R],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """For a method that hands its arguments on to `method`: its arguments and its documentation."""
    return wraps(method)


async def run_in_thread(call: Callable[[], R]) -> R:
    """What `call` returns or raises. When the awaiting task is cancelled the call goes on, and nobody hears of it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = loop.create_future()

    def settle(result: R | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: R | None = None
        error: BaseException | None = None
        try:
            result = call()
        except BaseException as caught:  # noqa: BLE001 - it is raised where the call is awaited
            error = caught
        with suppress(RuntimeError):  # the loop is closed: nobody is there to hear of it
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="bapo-call", daemon=True).start()
    return await future
