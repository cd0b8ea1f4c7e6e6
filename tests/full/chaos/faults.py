"""What is done to a run, drawn from a seed: processes killed and stopped, Redis slowed, links cut, the disk filled."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import psutil
import redis

from tests.support.network import LASTING, MOMENTARY, Network

REDIS, SERVICE, LEARNER = "redis", "buffer_service", "learner"
SCHEDULER, EVALUATOR, ROLLOUT_SERVER = "scheduler", "evaluator", "rollout_server"
GRADER, GUARD = "grader", "guard"
NODE, ACTOR = "raylet", "worker actor"
DISK = "disk"
SECOND_RANK = f"{LEARNER}-1"
SELDOM_KILLED = (SCHEDULER, EVALUATOR, ROLLOUT_SERVER, GRADER, GUARD)
VICTIMS = (REDIS, SERVICE, LEARNER, *SELDOM_KILLED)
OF_RAY = (NODE, ACTOR)
"""Processes of a run whose workers are Ray actors."""
LINKS = ("redis", "workers", "learner", "scheduler", "evaluator", "fleet")
ROUND = ("kill redis",) * 4 + ("kill service",) * 4 + ("kill learner",) + ("mixed",) * 2
"""Shares of the faults: 50 rounds are 200 + 200 + 50 + 100."""
LONGEST_S = 3.0
LONGEST_START_S = 8.0
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
    """How long it lasts. A kill is for ever; with seconds, who has taken the place is killed so much later, too."""
    meanwhile: str = ""
    """A process that is killed in the middle of it."""
    gap_s: float = 0.0
    """Before it."""

    @property
    def kind(self) -> str:
        """For counting."""
        return f"{self.what} {self.whom}"

    def line(self) -> dict[str, Any]:
        """For the record."""
        return asdict(self)


def killed_by(faults: Sequence[Fault]) -> list[str]:
    """Who was killed, as often as it was."""
    twice = [fault for fault in faults if fault.what == "kill" and fault.seconds]
    return [
        *(fault.whom for fault in [*faults, *twice] if fault.what == "kill"),
        *(fault.meanwhile for fault in faults if fault.meanwhile),
    ]


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
        # A learner needs some seconds to load and to resume, in which nothing else would befall it.
        again_s = round(rng.uniform(0.0, LONGEST_START_S), 3) if slot == "kill learner" and rng.random() < 0.5 else 0.0
        return Fault(number=number, what="kill", whom=kills[slot], gap_s=gap_s, seconds=again_s)
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
    lasts = what == "stop" or what in LASTING
    meanwhile = rng.choice([other for other in ("", REDIS, SERVICE) if other != whom]) if lasts else ""
    return Fault(number=number, what=what, whom=whom, seconds=seconds, gap_s=gap_s, meanwhile=meanwhile)


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
        if fault.seconds:
            time.sleep(fault.seconds)
            run.process(fault.whom).kill()
    elif fault.what == "stop":
        with _stopped(run.process(fault.whom)):
            _last(fault, run)
    elif fault.what == "slow":
        _slow(run.process(fault.whom), fault.seconds)
    elif fault.what == "pause":
        _pause(run.redis_url, fault.seconds)
    elif fault.what == "fill":
        run.fill_disk(fault.seconds)
    else:
        run.network.set(fault.whom, fault.what)
        if fault.what in LASTING:
            try:
                _last(fault, run)
            finally:
                run.network.set(fault.whom, "open")


def _last(fault: Fault, run: Target) -> None:
    time.sleep(fault.seconds / 2)
    if fault.meanwhile:
        run.process(fault.meanwhile).kill()
    time.sleep(fault.seconds / 2)


@contextmanager
def _stopped(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def _slow(process: psutil.Process, seconds: float) -> None:
    for _ in _until(seconds):
        with _stopped(process):
            time.sleep(STOPPED_S)
        time.sleep(GOES_S)


def _pause(url: str, seconds: float) -> None:
    with suppress(redis.RedisError), redis.Redis.from_url(url, socket_timeout=1.0) as client:
        client.client_pause(int(seconds * 1000), all=True)
    time.sleep(seconds)


def _until(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
