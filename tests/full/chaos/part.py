"""`python -m tests.full.chaos.part PACKAGE ...`: a process of a run, with a ledger of what it sees of the buffer.

The process is the product's own, `python -m PACKAGE ...`; only the methods of its BufferClient also write down what
they send, before they send it, and what they are answered.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bapo.core.codec import unpack_batch
from bapo.core.types import RolloutRequest
from bapo.transport.buffer_client import BufferClient
from bapo.transport.frame_transfer import FrameTransfer
from tests.full.chaos.ledger import Ledger, batch_line, group_line, request_line

LEDGER_FOLDER = "BAPO_CHAOS_LEDGER"
SABOTAGE = "BAPO_CHAOS_SABOTAGE"
Method = Callable[..., Any]


def keep_ledger(ledger: Ledger, cls: type[BufferClient] = BufferClient) -> None:
    """From now on every client of this class, in this process, writes into it."""

    def both(before: Method, after: Method) -> Callable[[Method], Method]:
        def wrap(method: Method) -> Method:
            @functools.wraps(method)
            def recorded(client: BufferClient, *args: Any, **kwargs: Any) -> Any:
                before(*args, **kwargs)
                answer = method(client, *args, **kwargs)
                after(answer, *args, **kwargs)
                return answer

            return recorded

        return wrap

    def nothing(*_: Any, **__: Any) -> None:
        return

    straight = noticed(FrameTransfer)
    hooks = {
        "push": both(
            lambda frames: ledger.write("sent", groups=[group_line(frame) for frame in frames]),
            lambda results, _: ledger.write("acknowledged", results=results),
        ),
        "enqueue": both(
            lambda requests, **_: ledger.write("asking", ids=request_line(requests), labels=labels_of(requests)),
            lambda num, requests, **fields: ledger.write("asked", ids=request_line(requests), num=num, **fields),
        ),
        "reevaluate": both(
            lambda step, requests: ledger.write("asking", ids=request_line(requests)),
            lambda _, step, requests: ledger.write("round", step=step, ids=request_line(requests)),
        ),
        "claim": both(
            nothing,
            lambda got, worker, **_: got and ledger.write("claimed", worker=worker, ids=request_line(got)),
        ),
        "batch_frame": both(
            lambda *_, **__: straight.clear(),
            lambda frame, step, **_: ledger.write(
                "batch", asked=step, straight=straight.is_set(), **batch_line(unpack_batch(frame))
            ),
        ),
        "commit": both(nothing, lambda _, step, checkpointed: ledger.write("commit", step=step, upto=checkpointed)),
        "resume": both(nothing, lambda _, step: ledger.write("resume", step=step)),
        "restore": both(nothing, lambda _, data: ledger.write("restore", num_bytes=len(data))),
        "collect": both(
            nothing, lambda groups, label: ledger.write("collected", label=label, ids=[g.group_id for g in groups])
        ),
        "forget": both(lambda label: ledger.write("forgot", label=label), nothing),
    }
    for name, wrap in hooks.items():
        setattr(cls, name, wrap(getattr(cls, name)))


def labels_of(requests: Sequence[RolloutRequest]) -> dict[str, str]:
    """Request id -> label, of evaluations."""
    return {request.request_id: request.label for request in requests if request.label}


def noticed(cls: type[FrameTransfer]) -> threading.Event:
    """Set whenever frames of a batch came from Redis itself; the learner has one thread that reads."""
    get = cls.get
    if isinstance(known := getattr(get, "has_read", None), threading.Event):
        return known
    has_read = threading.Event()

    @functools.wraps(get)
    def recorded(transfer: FrameTransfer, *args: Any) -> list[bytes | None]:
        frames = get(transfer, *args)
        if "read" in transfer._users:
            has_read.set()
        return frames

    recorded.has_read = has_read  # type: ignore[attr-defined]
    cls.get = recorded  # type: ignore[method-assign]
    return has_read


def main() -> None:
    """Become the package."""
    package = sys.argv.pop(1)
    sys.argv[0] = package
    if folder := os.environ.get(LEDGER_FOLDER):
        keep_ledger(Ledger(Path(folder), package.rpartition(".")[2]))
    if package == "buffer_service" and (sabotage := os.environ.get(SABOTAGE)):
        from tests.full.chaos.sabotage import commit  # here: other processes need no Redis

        commit(sabotage)
    runpy.run_module(package, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
