"""One grading process: reads groups from stdin, writes rewards to stdout, and may be killed at any time.

    start     {"task", "options", "reward", "range", "timeout_s"}
                                                               ->  {"ready": true} or {"refused": message}
    group     {"prompt", "texts": [G]}                         ->  {"rewards": [G], "busy": texts}, {"failed": message}
                                                                   or {"ungraded": message}
    expert    {"prompt"}                                       ->  {"expert": text or null} or {"failed": message}

`busy` are responses that a verifier could not grade to the end because of their own text (`bapo.tasks.guard`).
Frames are a little-endian u32 length and a msgpack map. The verifier runs in the main thread, because some verifiers
use signals. It imports `bapo.tasks` and what the task imports: no torch, no engine.
"""

from __future__ import annotations

import faulthandler
import math
import numbers
import os
import signal
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import msgpack

from bapo.core.errors import ConfigError
from bapo.core.json_values import from_map
from bapo.core.types import SAME_REWARD, Prompt
from bapo.core.user_code import place_of
from bapo.runtime.process import watch_parent
from bapo.runtime.standard_streams import never_fail_to_print
from bapo.tasks.base import ROW, Task, TaskContext
from bapo.tasks.guard import share_of
from bapo.tasks.registry import load_task
from bapo.tasks.rewards import Verifier, load_reward

LENGTH = struct.Struct("<I")
STDERR = 2
OVERTIME_S = 5.0
"""Beyond the worker's own deadline for a group."""
MAX_SHOWN = 500
"""Characters of what a verifier raised or returned."""


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


def verifier_of(task: Task, reward: str | None) -> Verifier:
    """What grades: `task.reward` where it is set, else the task. Imports the user's code. Raises: ConfigError."""
    if reward is not None:
        return load_reward(reward)
    task.load_reward()
    return task.rewards


def grade(verifier: Verifier, prompt: Prompt, texts: list[str], reward_range: tuple[float, float]) -> dict[str, Any]:
    """The answer to one group. Whatever the verifier does wrong becomes a message, never a reward."""
    shown = f"(on the response {texts[0][:200]!r})" if len(set(texts)) == 1 else f"(on {len(texts)} responses)"
    try:
        return _checked(list(verifier(prompt, texts)), texts, reward_range)
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything, and return what raises
        return {"failed": f"raised {_described(error)}{place_of(error)} {shown}{_hint(error, prompt)}"}


def _hint(error: Exception, prompt: Prompt) -> str:
    """Advice for a function that reads a column which the prompts do not have."""
    name = error.args[0] if isinstance(error, KeyError) and error.args else None
    if ROW not in prompt.answer or not isinstance(name, str) or name in prompt.answer:
        return ""
    return f"; for a column {name!r} of the data, set task.options.extra_columns (bapo reward test: --columns {name})"


def _checked(found: Sequence[object], texts: list[str], reward_range: tuple[float, float]) -> dict[str, Any]:
    if len(found) != len(texts):
        return {"failed": f"returned {len(found)} rewards for {len(texts)} responses"}
    low, high = reward_range
    rewards = []
    for given, text in zip(found, texts, strict=True):
        if given is None:
            continue
        reward = _number(given)
        mapped = math.nan if reward is None else (reward - low) / (high - low)
        if not -SAME_REWARD <= mapped <= 1 + SAME_REWARD:  # NaN fails both comparisons
            what = f"not a number in [{low:g}, {high:g}] (on the response {text[:200]!r}){_advice(reward)}"
            return {"failed": f"returned {_shown(given)}, which is {what}"}
        rewards.append(min(max(mapped, 0.0), 1.0))
    if len(rewards) < len(texts):
        return {"ungraded": f"left {len(texts) - len(rewards)} of {len(texts)} responses ungraded (it returned None)"}
    return {"rewards": rewards}


def _number(given: object) -> float | None:
    """`given` as the float that is stored: of Python's numbers, numpy's scalars (bool, too), arrays and tensors of one
    element; None for anything else, and for a number that no float holds."""
    if not isinstance(given, numbers.Real) and isinstance(given, _Array) and math.prod(given.shape) == 1:
        given = given.item()
    if not isinstance(given, numbers.Real | Decimal):
        return None
    try:
        return float(given)
    except OverflowError:
        return None


@runtime_checkable
class _Array(Protocol):
    """numpy's, torch's on any device, jax's: none of which is imported for it."""

    shape: Sequence[int]

    def item(self) -> object: ...


def _advice(reward: float | None) -> str:
    if reward is None:
        return ""
    if not math.isfinite(reward):
        return "; return None for a response that cannot be graded, 0 for an incorrect one"
    return "; set task.reward_range to the range of your reward"


def solve(task: Task, prompt: Prompt) -> dict[str, Any]:
    """The answer to the question for an expert's solution."""
    try:
        text = task.expert(prompt)
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        return {"failed": f"{_described(error)} (when computing an expert solution)"}
    if text is not None and not isinstance(text, str):
        return {"failed": f"returned {_shown(text)} as an expert solution, expected text"}
    return {"expert": text}


def _described(error: Exception) -> str:
    """Class and words, cut: many exceptions repeat the text that they are about, and each message is a log line."""
    try:
        words = str(error)
    except Exception as worse:  # noqa: BLE001 - a user's exception
        words = f"(message not printable: {type(worse).__name__})"
    return f"{type(error).__name__}: {_cut(words)}"


def _shown(value: object) -> str:
    try:
        return _cut(repr(value))
    except Exception as error:  # noqa: BLE001 - a user's value; also an integer of more digits than Python writes
        return f"a {type(value).__name__} that is not printable ({type(error).__name__})"


def _cut(words: str) -> str:
    return words if len(words) <= MAX_SHOWN else f"{words[:MAX_SHOWN]}... ({len(words)} characters)"


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
        task = load_task(start["task"], start["options"], TaskContext(reward=start["reward"]))
        verifier = verifier_of(task, start["reward"])
    except ConfigError as error:
        write_frame(answers, {"refused": str(error)})
        return
    write_frame(answers, {"ready": True})
    while (request := read_frame(requests)) is not None:
        prompt = from_map(request["prompt"], Prompt, "prompt")
        with ended_after(start["timeout_s"] + OVERTIME_S):
            if "texts" in request:
                with share_of(start["timeout_s"], len(request["texts"])) as busy:
                    answer = {"busy": busy, **grade(verifier, prompt, request["texts"], start["range"])}
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
