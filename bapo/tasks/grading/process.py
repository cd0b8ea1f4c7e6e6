"""One grading process: reads groups from stdin, writes rewards to stdout, and may be killed at any time.

    start     [task] of the config        ->  {"ready": true} or {"refused": message}
    group     {"prompt", "texts": [G]}    ->  {"rewards": [G], "details": {name: [G]}, "busy": texts},
                                              {"failed": message} or {"ungraded": message}, of one of several with `by`
    expert    {"prompt"}                  ->  {"expert": text or null} or {"failed": message}

`busy` are responses that a verifier could not grade to the end because of their own text (`bapo.tasks.guard`).
Frames are a little-endian u32 length and a msgpack map. The verifier runs in the main thread, because some verifiers
use signals. It imports `bapo.tasks` and what the task imports: no torch, no engine.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from bapo.config.tree import TaskConfig
from bapo.core.errors import ConfigError
from bapo.core.json_values import from_map
from bapo.core.types import Prompt
from bapo.runtime.process import watch_parent
from bapo.runtime.standard_streams import never_fail_to_print
from bapo.tasks.base import Task, TaskContext
from bapo.tasks.grading.answers import described, shown
from bapo.tasks.grading.components import components_of, grade_by_all
from bapo.tasks.guard import share_of
from bapo.tasks.registry import load_task

LENGTH = struct.Struct("<I")
STDERR = 2
OVERTIME_S = 5.0
"""Beyond the worker's own deadline for a group."""


def write_frame(file: BinaryIO, message: dict[str, Any]) -> None:
    """One message; ends this process when the worker that reads it has died."""
    # A verifier that reads JSON may have half a surrogate pair, which UTF-8 cannot carry.
    packed = msgpack.packb(message, unicode_errors="backslashreplace")
    try:
        file.write(LENGTH.pack(len(packed)) + packed)
        file.flush()
    except BrokenPipeError:
        _end()


def read_frame(file: BinaryIO) -> dict[str, Any] | None:
    """The next message; None at the end of the stream."""
    prefix = file.read(LENGTH.size)
    if len(prefix) < LENGTH.size:
        return None
    message: dict[str, Any] = msgpack.unpackb(file.read(LENGTH.unpack(prefix)[0]))
    return message


def solve(task: Task, prompt: Prompt) -> dict[str, Any]:
    """The answer to the question for an expert's solution."""
    try:
        text = task.expert(prompt)
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        return {"failed": f"{described(error)} (when computing an expert solution)"}
    if text is not None and not isinstance(text, str):
        return {"failed": f"returned {shown(text)} as an expert solution, expected text"}
    return {"expert": text}


def main() -> None:
    """Serve until stdin ends."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    # What a user's verifier prints or reads must not get into the frames.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    never_fail_to_print()
    _be_expendable()
    start = read_frame(requests)
    if start is None:
        return
    try:
        settings = TaskConfig.model_validate(start)
        task = load_task(settings.name, settings.options, TaskContext(rewards=settings.reward_functions))
        components = components_of(task, settings)
    except ConfigError as error:
        write_frame(answers, {"refused": str(error)})
        return
    write_frame(answers, {"ready": True})
    while (request := read_frame(requests)) is not None:
        prompt = from_map(request["prompt"], Prompt, "prompt")
        with ended_after(settings.grading_timeout_s + OVERTIME_S):
            if "texts" in request:
                with share_of(settings.grading_timeout_s, len(request["texts"])) as busy:
                    answer = {"busy": busy, **grade_by_all(components, prompt, request["texts"])}
            else:
                answer = solve(task, prompt)
        write_frame(answers, answer)


@contextmanager
def ended_after(limit_s: float) -> Iterator[None]:
    """End this process when the block takes longer: by then the worker has killed it, or is dead itself.

    By a thread of C: a verifier that holds the interpreter, as every regular expression does, stops Python's threads,
    and with them the one that watches the parent.
    """
    owner = os.getpid()
    faulthandler.dump_traceback_later(limit_s, exit=True, file=STDERR)
    try:
        yield
    finally:
        if os.getpid() != owner:
            # A copy that the verifier forked has come back here. It must not answer, and cancelling would wait for ever
            # for the thread that a fork does not copy.
            os._exit(1)
        faulthandler.cancel_dump_traceback_later()


def _be_expendable() -> None:
    """Die with the worker even inside an endless verifier, and before it when memory runs out."""
    watch_parent(_end)
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError as error:
        sys.stderr.write(f"grader: the kernel may kill the worker before its grader: {error}\n")


def _end() -> None:
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # also what the verifier has started
    os._exit(1)


if __name__ == "__main__":
    main()
