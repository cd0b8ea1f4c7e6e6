"""Call a user's method, sync or async, without holding up the event loop.

A sync one runs in a daemon thread of its own: the shared pool of asyncio is small and serves heartbeats, which must not
wait for environments, and its threads would keep a process alive whose environment hangs.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from typing import Any


async def called(function: Callable[..., Any], *args: Any, **columns: Any) -> Any:
    """What the function returns, or raises. Cancelling stops the wait; a thread's work runs to its end."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **columns)
    found = await _in_thread(lambda: function(*args, **columns))
    return await found if inspect.isawaitable(found) else found


async def _in_thread(work: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def run() -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = context.run(work)
        except StopIteration as error:  # asyncio refuses it in a future
            failure = RuntimeError(f"StopIteration: {error}")
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="environment", daemon=True).start()
    return await future
