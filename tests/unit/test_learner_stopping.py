"""A signal ends a wait wherever it finds the learner."""

from __future__ import annotations

import io
import logging
import os
import signal
from collections.abc import Iterator

import pytest

from learner.distributed.stopping import StopFlag, Stopped


@pytest.fixture
def stop() -> Iterator[StopFlag]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    flag = StopFlag()
    flag.install()
    yield flag
    for number, handler in before.items():
        signal.signal(number, handler)


class Interrupted(io.StringIO):
    """A log on whose writing somebody presses Ctrl-C."""

    def write(self, text: str) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return len(text)


def test_a_signal_in_the_middle_of_a_line_of_the_log_ends_the_wait(stop: StopFlag) -> None:
    log, line = logging.StreamHandler(Interrupted()), "step 3 waits for its batch: 3/4 groups, 1 leased"
    with pytest.raises(Stopped, match="SIGINT while waiting"), stop.waiting():
        log.handle(logging.makeLogRecord({"msg": line}))
