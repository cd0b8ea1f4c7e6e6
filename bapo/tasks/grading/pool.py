"""Grade groups in processes that can be killed: a verifier may raise, hang or eat all memory without harm.

A failed grading is a `GradingError` with a `reason`, never a reward of 0: a false 0 would put a solvable prompt into
B_bad. Each child grades one group at a time, so the number of children is the number of groups graded at once.

A limit by RLIMIT would be an exception that a verifier's own `except Exception: return 0.0` makes a false 0, so the
worker reads the memory of a child that takes long, and kills it.

Does not cover: limits of processors or network inside a verifier (containers do that).
"""

from __future__ import annotations

import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

import msgpack
import numpy as np
import psutil

from bapo.config.rewards import OWN
from bapo.config.tree import TaskConfig
from bapo.core.errors import ConfigError, GradingError
from bapo.core.json_values import to_map
from bapo.core.token_arrays import Float32s
from bapo.core.types import Prompt
from bapo.tasks.base import ROW
from bapo.tasks.grading.process import LENGTH

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""Importing a user's task may be slow; grading has a deadline of its own."""
STARTING = "at startup"
POLL_S = 0.25
"""Between two readings of the memory of a child that works."""
END_S = 5.0
"""Longest time between the end of a child's pipe and its own."""

Answer = TypeVar("Answer")


class VerifierRaisedError(GradingError):
    """The verifier raised, or returned what is not a reward."""

    reason = "verifier_error"


class VerifierTimeoutError(GradingError):
    """The verifier took longer than `task.grading_timeout_s` and was killed."""

    reason = "verifier_timeout"


class VerifierMemoryError(GradingError):
    """The verifier, with what it had started, took more memory than `task.grading_memory_mb` and was killed."""

    reason = "verifier_out_of_memory"


class VerifierKilledError(GradingError):
    """The verifier's process ended by itself: a crash, or the machine was out of memory."""

    reason = "verifier_killed"


class UngradedError(GradingError):
    """The verifier said itself, by None, that it cannot grade a response."""

    reason = "ungraded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grades:
    """What a verifier says of the responses to one prompt."""

    rewards: Float32s
    """[G] in [0, 1]."""
    details: Mapping[str, Float32s] = field(default_factory=dict)
    """[G] each (`bapo.core.reward_details`)."""
    num_busy: int = 0
    """Responses that count as incorrect because their own text kept the verifier busy (`bapo.tasks.guard`)."""


class GraderPool:
    """Children that grade. `grade` may be called from as many threads as there are children."""

    def __init__(self, task: TaskConfig, *, num_children: int) -> None:
        """Start the children at once. Raises: ConfigError when they cannot load the task or the reward."""
        self._task = task
        self._idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        self._replacing = threading.Lock()
        self._is_closed = False
        self._children = [_Child(task) for _ in range(num_children)]
        try:
            for child in self._children:
                child.wait_ready()
                self._idle.put(child)
        except BaseException:  # Ctrl-C, too, must leave no process
            self.close()
            raise

    def grade(self, prompt: Prompt, texts: Sequence[str]) -> Grades:
        """The rewards of the responses to one prompt.

        Raises: VerifierRaisedError, VerifierTimeoutError, VerifierMemoryError, VerifierKilledError, UngradedError; the
            message names the function and the prompt, by its row where it has one.
        """
        answer = self._asked(prompt, texts)
        for text in answer["busy"]:
            log.warning("%s", self._told(f"was kept busy by the response {text}, which counts as incorrect,", prompt))
        return grades_of(answer)

    def expert(self, prompt: Prompt) -> str | None:
        """The task's expert solution, if it has one. Raises: as `grade`."""
        found: str | None = self._asked(prompt, None)["expert"]
        return found

    def _asked(self, prompt: Prompt, texts: Sequence[str] | None) -> dict[str, Any]:
        child = self._idle.get()
        try:
            answer = child.ask(_question(prompt, texts), self._task.grading_timeout_s)
        except GradingError as error:
            child = self._replace(child)
            raise type(error)(self._told(error, prompt)) from error
        except BaseException:
            child = self._replace(child)  # its answer is still to come, and would be taken for the next question's
            raise
        finally:
            self._idle.put(child)
        by = answer.get("by")
        if "failed" in answer:
            raise VerifierRaisedError(self._told(answer["failed"], prompt, by))
        if "ungraded" in answer:
            raise UngradedError(self._told(answer["ungraded"], prompt, by))
        return answer

    def _told(self, what: object, prompt: Prompt, by: str | None = None) -> str:
        """`by`: the one of several rewards."""
        functions = [by] if by else list(self._task.reward_functions) or [OWN]
        own = self._task.options.get("reward")
        names = [repr(own) if name == OWN and own else name if name == OWN else repr(name) for name in functions]
        verifier = f"the grading by {' and '.join(names)}" if len(names) > 1 else f"the reward {names[0]}"
        if names == [OWN]:
            verifier = f"the verifier of task {prompt.task!r}"
        return f"{verifier} {what}{prompt_words(prompt)}"

    def close(self) -> None:
        """Kill the children; those that grade now are not replaced."""
        with self._replacing:
            self._is_closed = True
        for child in self._children:
            child.kill()

    def _replace(self, child: _Child) -> _Child:
        child.kill()
        with self._replacing:
            if self._is_closed:
                return child
            fresh = _Child(self._task)
            self._children[self._children.index(child)] = fresh
        return fresh


class _Child:
    """One grading process: STARTING --ready--> IDLE <--> GRADING; killed and replaced, never repaired."""

    def __init__(self, task: TaskConfig) -> None:
        command = [sys.executable, "-m", "bapo.tasks.grading.process"]
        # A child finds what its parent finds: a user's module next to the config, too.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
            start_new_session=True,  # so that `kill` reaches what a verifier has started
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        os.set_blocking(self._to.fileno(), False)
        self._ready = False
        self._most_memory_mb = task.grading_memory_mb
        start = task.model_dump()
        self._within(START_TIMEOUT_S, STARTING, lambda deadline: self._write(_packed(start), deadline))

    def wait_ready(self) -> None:
        """Raises: ConfigError with the child's own words; GradingError when it dies or is silent."""
        answer = self._within(START_TIMEOUT_S, STARTING, self._read)
        if "refused" in answer:
            raise ConfigError(answer["refused"])
        self._ready = True

    def ask(self, question: bytes, timeout_s: float) -> dict[str, Any]:
        """The answer to one group. Raises: VerifierTimeoutError, VerifierMemoryError, VerifierKilledError."""
        if not self._ready:
            self.wait_ready()

        def answer(deadline: float) -> dict[str, Any]:
            self._write(question, deadline)
            return self._read(deadline)

        return self._within(timeout_s, "with one group (task.grading_timeout_s)", answer)

    def kill(self) -> None:
        """SIGKILL, also to what it has started: a hung verifier ignores anything else."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._to.close()
        self._from.close()

    def _within(self, timeout_s: float, what: str, talk: Callable[[float], Answer]) -> Answer:
        """`talk` with its deadline. Raises: VerifierTimeoutError, VerifierMemoryError, VerifierKilledError."""
        try:
            return talk(time.monotonic() + timeout_s)
        except TimeoutError as error:
            raise VerifierTimeoutError(f"was killed after {timeout_s:g} s {what}") from error
        except (OSError, ValueError) as error:  # ValueError: the pool was closed meanwhile, and its pipes with it
            raise self._died() from error

    def _write(self, frame: bytes, deadline: float) -> None:
        left = memoryview(frame)
        while left:
            self._wait_for(self._to, select.POLLOUT, deadline)
            left = left[os.write(self._to.fileno(), left) :]

    def _read(self, deadline: float) -> dict[str, Any]:
        (size,) = LENGTH.unpack(self._read_bytes(LENGTH.size, deadline))
        answer: dict[str, Any] = msgpack.unpackb(self._read_bytes(size, deadline))
        return answer

    def _read_bytes(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._wait_for(self._from, select.POLLIN, deadline)
            part = os.read(self._from.fileno(), size - len(data))
            if not part:
                raise self._died()
            data += part
        return bytes(data)

    def _wait_for(self, file: IO[bytes], event: int, deadline: float) -> None:
        """Raises: TimeoutError, VerifierMemoryError."""
        ready = select.poll()
        ready.register(file, event)
        while not ready.poll(min(POLL_S, max(0.0, deadline - time.monotonic())) * 1000):
            if time.monotonic() >= deadline:
                raise TimeoutError
            used_mb = _memory_bytes(self._process.pid) / 2**20
            if used_mb > self._most_memory_mb:
                limit = f"task.grading_memory_mb = {self._most_memory_mb}"
                raise VerifierMemoryError(f"was killed because of its memory use of {used_mb:.0f} MB, above {limit},")

    def _died(self) -> VerifierKilledError:
        what = "while grading" if self._ready else "before it was ready to grade"
        try:
            return VerifierKilledError(f"exited with code {self._process.wait(END_S)} {what}")
        except subprocess.TimeoutExpired:
            # A verifier may close what it does not own, and leave threads that Python waits for at its end.
            return VerifierKilledError(f"closed the pipe to its worker {what} and was killed")


def grades_of(answer: Mapping[str, Any]) -> Grades:
    """The grades in a process's answer."""
    details = {name: np.asarray(values, np.float32) for name, values in answer["details"].items()}
    rewards = np.asarray(answer["rewards"], np.float32)
    return Grades(rewards=rewards, details=details, num_busy=len(answer.get("busy", ())))


def prompt_words(prompt: Prompt) -> str:
    """The end of a message about a prompt: its id, and its row where it has one."""
    return f" on prompt {prompt.prompt_id}" + (f" ({prompt.answer[ROW]})" if ROW in prompt.answer else "")


def _memory_bytes(pid: int) -> int:
    """Of a process and all that it has started, pages that they share once; 0 when it has ended."""
    total = 0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                memory = each.memory_full_info()
                total += getattr(memory, "pss", memory.uss)  # macOS has no pss
    return total


def _question(prompt: Prompt, texts: Sequence[str] | None) -> bytes:
    fields = to_map(prompt)
    return _packed({"prompt": fields} if texts is None else {"prompt": fields, "texts": list(texts)})


def _packed(message: dict[str, Any]) -> bytes:
    # A model may emit half a surrogate pair, which UTF-8 cannot carry.
    packed: bytes = msgpack.packb(message, unicode_errors="replace")
    return LENGTH.pack(len(packed)) + packed
