"""The child processes of one run, supervised and stopped together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from bapo.runtime.process import Interrupts
from bapo.transport.endpoints import AGENTS, BUFFER
from services.launcher.supervision.child_process import Child, ProcessSpec, adopt_orphans, end, kill_descendants
from services.launcher.supervision.supervisor import Supervisor

log = logging.getLogger(__name__)

REDIS = "redis"
# Less than ten seconds in total, e.g. the grace period of `docker stop`.
GRACE_S = {AGENTS: 2.0, "others": 4.5, BUFFER: 1.5, REDIS: 1.5}
MEMORY_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLine:
    name: str
    state: str
    """starting | ready | ended"""
    seconds: float
    """Seconds since start while starting; seconds until ready afterwards."""
    hint: str = ""


class InterruptedRunError(Exception):
    """The user stopped the run."""


class Children:
    def __init__(self, interrupts: Interrupts, supervisor: Supervisor) -> None:
        self._interrupts = interrupts
        self._supervisor = supervisor
        self._children: list[Child] = []
        self._peak_bytes: dict[str, int] = {}
        self._weighed_s = 0.0
        adopt_orphans()

    def start(self, spec: ProcessSpec) -> Child:
        """Start one. Raises: ConfigError, StorageError."""
        child = Child(spec)
        self._children.append(child)
        return child

    def poll(self) -> bool:
        """Update readiness and restart crashed children; returns whether any was started.

        Raises: ChildFailedError, InterruptedRunError.
        """
        if self._interrupts.asked:
            raise InterruptedRunError
        for child in self._children:
            child.poll()
        # After the probes: a child that died meanwhile is noticed now and not a tick later.
        has_started = self._supervisor.poll(self._children)
        if time.monotonic() - self._weighed_s > MEMORY_EVERY_S:
            self._weighed_s = time.monotonic()
            self._weigh()
        return has_started

    def lines(self) -> list[ProcessLine]:
        return [
            ProcessLine(
                name=child.name,
                state=_state(child),
                seconds=child.age_s if child.ready_after_s is None else child.ready_after_s,
                hint=child.spec.hint,
            )
            for child in self._children
        ]

    def stopped(self) -> list[str]:
        """Names of children stopped by a signal."""
        return [child.name for child in self._children if child.exit_code is None and _is_stopped(child.process.pid)]

    def facts(self) -> dict[str, dict[str, Any]]:
        """For run.json: process id, seconds until ready, peak memory including descendants in MiB."""
        return {
            child.name: {
                "pid": child.process.pid,
                "ready_after_s": child.ready_after_s and round(child.ready_after_s, 2),
                "peak_mib": self._peak_bytes.get(child.name, 0) >> 20,
                "exit_code": child.exit_code,
                "restarts": child.num_restarts,
            }
            for child in self._children
        }

    def close(self) -> None:
        """Stop everything: agents, which give their episodes back, then clients of the buffer, then the buffer, then
        Redis, then remaining descendants."""
        for stage in GRACE_S:
            members = [child for child in self._children if _stage(child) == stage]
            end(members, grace_s=GRACE_S[stage], is_hurried=lambda: self._interrupts.hurried)
        left = kill_descendants()
        if left:
            log.info("killed remaining processes: %s", ", ".join(sorted(left)))

    def _weigh(self) -> None:
        for child in self._children:
            found = sum(_resident_bytes(child.process.pid))
            self._peak_bytes[child.name] = max(found, self._peak_bytes.get(child.name, 0))


def all_ended(children: Sequence[Child]) -> Callable[[], bool]:
    return lambda: all(child.has_ended for child in children)


def is_ready(child: Child) -> Callable[[], bool]:
    return lambda: child.ready_after_s is not None


def _stage(child: Child) -> str:
    name = child.name.partition("-")[0]
    return name if name in GRACE_S else "others"


def _state(child: Child) -> str:
    if child.has_ended:
        return "ended"
    return "starting" if child.ready_after_s is None else "ready"


def _is_stopped(pid: int) -> bool:
    """Whether a process or a descendant is stopped (the rollout server is below a subreaper)."""
    try:
        top = psutil.Process(pid)
        return any(process.status() == psutil.STATUS_STOPPED for process in (top, *top.children(recursive=True)))
    except psutil.Error:
        return False


def _resident_bytes(pid: int) -> Iterator[int]:
    """Resident memory of a process and of each descendant; shared pages count in each."""
    try:
        top = psutil.Process(pid)
        for process in (top, *top.children(recursive=True)):
            yield process.memory_info().rss
    except psutil.Error:
        return
