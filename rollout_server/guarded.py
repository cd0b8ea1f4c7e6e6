"""Threads of a worker, none of which may die unseen: the fleet replaces a worker that says that it has failed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from bapo.errors import BapoError

log = logging.getLogger(__name__)


def guarded_thread(name: str, run: Callable[[], None], on_death: Callable[[BaseException], None]) -> threading.Thread:
    """A daemon that is not started yet; `on_death` gets what `run` raises, in that thread."""

    def guarded() -> None:
        try:
            run()
        except BapoError as error:  # foreseen, and worded for whoever reads it: where it came from says nothing more
            on_death(error)
        except Exception as error:  # a thread that dies of a bug must end its worker
            log.exception("%s ended", name)
            on_death(error)

    return threading.Thread(target=guarded, name=name, daemon=True)
