"""Which policy versions a service takes for published, also when another service has changed the state."""

from __future__ import annotations

import pytest

from bapo.errors import ContractError
from bapo.types import Progress
from bapo.wire import pack_group
from buffer_service.arrival import incoming
from buffer_service.groups import Incoming
from buffer_service.intake import KNOWN_S, Intake
from tests.buffer_setup import PuttingMemoryStore as MemoryStore
from buffer_service.steps import finish
from tests.buffer_setup import answer
from tests.factories import make_request


def group_of(version: int) -> Incoming:
    return incoming(memoryview(pack_group(answer(make_request(), version=version))))


def test_a_service_hears_of_a_restore_by_another_one() -> None:
    """Version 7 was published, and taken; then another service restores a state before step 1."""
    store, seconds = MemoryStore("run", lease_s=60, max_attempts=3), [100.0]
    before = store.image()
    intake, group = Intake(store, now=lambda: seconds[0]), group_of(7)
    store.report(Progress(step=7, policy_version=7))
    finish(intake.checking([group]))
    store.restore(before, ())
    seconds[0] += KNOWN_S
    with pytest.raises(ContractError, match="policy version 7, but the learner has published 1 at most"):
        finish(intake.checking([group]))


def test_versions_up_to_the_newest_are_asked_for_once_a_second() -> None:
    asked: list[float] = []

    class Counting(MemoryStore):
        def progress(self) -> Progress:
            asked.append(seconds[0])
            return Progress(step=7, policy_version=7)

    seconds = [100.0]
    intake = Intake(Counting("run", lease_s=60, max_attempts=3), now=lambda: seconds[0])
    for version, second in ((3, 100.0), (7, 100.5), (1, 100.9), (7, 101.0), (2, 101.5)):
        seconds[0] = second
        finish(intake.checking([group_of(version)]))
    assert asked == [100.0, 101.0]
