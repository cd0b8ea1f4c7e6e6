"""What is done to a run, drawn from a seed: processes killed and stopped, Redis slowed, links cut, the disk filled."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import psutil
import redis

from tests.chaos.network import LASTING, MOMENTARY, Network

REDIS, SERVICE, LEARNER = "redis", "buffer_service", "learner"
SCHEDULER, EVALUATOR, FLEET = "scheduler", "evaluator", "rollout_server"
GRADER, GUARD = "grader", "guard"
NODE, ACTOR = "raylet", "worker actor"
DISK = "disk"
SECOND_RANK = f"{LEARNER}-1"
SELDOM_KILLED = (SCHEDULER, EVALUATOR, FLEET, GRADER, GUARD)
VICTIMS = (REDIS, SERVICE, LEARNER, *SELDOM_KILLED)
OF_RAY = (NODE, ACTOR)
"""Processes of a run whose workers are Ray actors."""
LINKS = ("redis", "workers", "learner", "scheduler", "evaluator", "fleet")
ROUND = ("kill redis",) * 4 + ("kill service",) * 4 + ("kill learner",) + ("mixed",) * 2
"""Shares of the faults: 50 rounds are 200 + 200 + 50 + 100."""
LONGEST_S = 3.0
STOPPED_S, GOES_S = 0.06, 0.02
"""A Redis that is slow: it works a quarter of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One of them."""

    number: int
    what: str
    """kill | stop | slow | pause | fill | a state of a link"""
    whom: str
    """A process, a link, or the disk."""
    seconds: float = 0.0
    """How long it lasts; a kill is for ever."""
    gap_s: float = 0.0
    """Before it."""

    @property
    def kind(self) -> str:
        """For counting."""
        return f"{self.what} {self.whom}"

    def line(self) -> dict[str, Any]:
        """For the record."""
        return asdict(self)


class Target(Protocol):
    """The run that they befall."""

    network: Network

    def process(self, whom: str) -> psutil.Process:
        """A process of the run that lives now."""
        ...

    @property
    def redis_url(self) -> str:
        """Straight to Redis."""
        ...

    def fill_disk(self, seconds: float) -> None:
        """Nothing more fits on the disk of the run for so long."""
        ...


def plan(num: int, seed: int, *, ray: bool = False, team: bool = False, disk: bool = False) -> list[Fault]:
    """The faults of one seed: the same ones whenever it is asked for.

    Args:
        ray: the workers are Ray actors, which befalls some of the faults that are mixed.
        team: the learner has a second rank, which befalls some of them.
        disk: the run has a disk of its own, which some of them fill.
    """
    rng = random.Random(seed)
    slots: list[str] = []
    while len(slots) < num:
        slots += rng.sample(ROUND, len(ROUND))
    kinds = ("kill", "stop", "stop", "slow", "pause", *LASTING, *MOMENTARY, *(("fill",) if disk else ()))
    others = (*(OF_RAY if ray else ()), *((SECOND_RANK,) if team else ()))
    return [_fault(number, slot, rng, kinds, others) for number, slot in enumerate(slots[:num])]


def _fault(number: int, slot: str, rng: random.Random, kinds: Sequence[str], others: Sequence[str]) -> Fault:
    gap_s = round(rng.uniform(0.05, 1.0), 3)
    kills = {"kill redis": REDIS, "kill service": SERVICE, "kill learner": LEARNER}
    if slot in kills:
        return Fault(number=number, what="kill", whom=kills[slot], gap_s=gap_s)
    what = rng.choice(kinds)
    seconds = round(rng.uniform(0.2, LONGEST_S), 3)
    if what == "kill":
        whom = rng.choice((*SELDOM_KILLED, *others))
    elif what == "stop":
        whom = rng.choice((*VICTIMS, *others))
    elif what == "fill":
        whom = DISK
    else:
        whom = rng.choice(LINKS) if what in (*LASTING, *MOMENTARY) else REDIS
    return Fault(number=number, what=what, whom=whom, seconds=seconds, gap_s=gap_s)


def inflict(fault: Fault, run: Target) -> bool:
    """Do it, and undo what is undone; returns when it is over, and whether there was anybody to do it to."""
    try:
        _inflict(fault, run)
    except psutil.NoSuchProcess:
        return False
    return True


def _inflict(fault: Fault, run: Target) -> None:
    if fault.what == "kill":
        run.process(fault.whom).kill()
    elif fault.what == "stop":
        _stop(run.process(fault.whom), fault.seconds)
    elif fault.what == "slow":
        _slow(run.process(fault.whom), fault.seconds)
    elif fault.what == "pause":
        _pause(run.redis_url, fault.seconds)
    elif fault.what == "fill":
        run.fill_disk(fault.seconds)
    else:
        run.network.set(fault.whom, fault.what)
        if fault.what in LASTING:
            time.sleep(fault.seconds)
            run.network.set(fault.whom, "open")


def _stop(process: psutil.Process, seconds: float) -> None:
    process.suspend()
    time.sleep(seconds)
    process.resume()


def _slow(process: psutil.Process, seconds: float) -> None:
    for _ in _until(seconds):
        _stop(process, STOPPED_S)
        time.sleep(GOES_S)


def _pause(url: str, seconds: float) -> None:
    with suppress(redis.RedisError), redis.Redis.from_url(url, socket_timeout=1.0) as client:
        client.client_pause(int(seconds * 1000), all=True)
    time.sleep(seconds)


def _until(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
