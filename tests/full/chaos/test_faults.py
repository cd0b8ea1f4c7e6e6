"""The plan of faults: the same from the same seed, with the shares that the long trial promises."""

from __future__ import annotations

from collections import Counter

from tests.chaos.faults import (
    DISK,
    LEARNER,
    LINKS,
    OF_RAY,
    REDIS,
    SECOND_RANK,
    SERVICE,
    VICTIMS,
    Fault,
    killed_by,
    plan,
)
from tests.chaos.network import LASTING, MOMENTARY


def test_a_seed_has_one_plan() -> None:
    assert plan(40, 7) == plan(40, 7)
    assert plan(40, 7) != plan(40, 8)


def test_the_long_plan_kills_redis_and_service_200_times_and_the_learner_50_times() -> None:
    faults = plan(550, 1)
    kinds = Counter(fault.kind for fault in faults)
    assert (kinds["kill redis"], kinds["kill buffer_service"], kinds["kill learner"]) == (200, 200, 50)
    assert [fault.number for fault in faults] == list(range(550))


def test_rays_processes_and_the_disk_take_none_of_the_kills_that_are_promised() -> None:
    faults = plan(2200, 1, ray=True, disk=True)
    kinds = Counter(fault.kind for fault in faults)
    assert (kinds["kill redis"], kinds["kill buffer_service"], kinds["kill learner"]) == (800, 800, 200)
    assert {f"{what} {whom}" for what in ("kill", "stop") for whom in OF_RAY} <= kinds.keys()
    assert {fault.whom for fault in faults if fault.what == "fill"} == {DISK}


def test_a_second_rank_is_killed_and_stopped_where_there_is_one() -> None:
    kinds = {fault.kind for fault in plan(2200, 1, team=True)}
    assert {f"{what} {SECOND_RANK}" for what in ("kill", "stop")} <= kinds


def test_some_learners_are_killed_again_while_they_start_and_redis_while_something_else_stands_still() -> None:
    faults = plan(2200, 1)
    starts = [fault for fault in faults if fault.kind == "kill learner" and fault.seconds]
    assert 60 < len(starts) < 140
    both = {(fault.what, fault.meanwhile) for fault in faults if fault.meanwhile}
    assert both == {(what, whom) for what in ("stop", *LASTING) for whom in (REDIS, SERVICE)}
    assert all(fault.meanwhile != fault.whom for fault in faults)
    one = Fault(number=0, what="kill", whom=LEARNER, seconds=2.0)
    other = Fault(number=1, what="stop", whom=SERVICE, seconds=1.0, meanwhile=REDIS)
    assert killed_by([one, other]) == [LEARNER, LEARNER, REDIS]


def test_the_rest_is_mixed_and_bounded() -> None:
    mixed = [fault for fault in plan(2200, 3) if fault.what != "kill"]
    assert {fault.what for fault in mixed} == {"stop", "slow", "pause", *LASTING, *MOMENTARY}
    assert {fault.whom for fault in mixed} == {*LINKS, *VICTIMS}
    assert all(0.2 <= fault.seconds <= 3.0 for fault in mixed)
