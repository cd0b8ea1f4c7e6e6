"""Says which line of a rollout blocks the event loop, and with it all episodes of the process, and their heartbeats."""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

log = logging.getLogger(__name__)

BLOCKED_S = 5.0
TICK_S = 0.5
NOT_THE_USERS = (*(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib")), f"{Path(__file__).parent}/")


async def watch_loop(*, blocked_s: float = BLOCKED_S, say: Callable[[str], None] = log.warning) -> None:
    """Run until cancelled, in the loop that is watched. `say`: called once for each time that it is blocked."""
    ticks, ended = [time.monotonic()], threading.Event()
    thread = threading.get_ident()

    def watch() -> None:
        said_at = None
        while not ended.wait(min(TICK_S, blocked_s / 2)):
            tick = ticks[0]
            if time.monotonic() - tick > blocked_s and said_at != tick:
                said_at = tick
                where = place_in(sys._current_frames().get(thread))
                say(
                    f"{where} has blocked the event loop for {blocked_s:g} s: all other episodes of this "
                    "process wait, and so do their heartbeats; call what blocks by `await asyncio.to_thread(...)`"
                )

    threading.Thread(target=watch, name="loop-watch", daemon=True).start()
    try:
        while True:
            await asyncio.sleep(min(TICK_S, blocked_s / 4))
            ticks[0] = time.monotonic()
    finally:
        ended.set()


def place_in(frame: FrameType | None) -> str:
    """File and line of the innermost frame of the user's code, or else the innermost of all."""
    frames = traceback.extract_stack(frame) if frame is not None else []
    users = [found for found in frames if not found.filename.startswith((*NOT_THE_USERS, "<frozen"))]
    for found in (*reversed(users), *reversed(frames)):
        return f"{Path(found.filename).name} line {found.lineno}"
    return "something"
