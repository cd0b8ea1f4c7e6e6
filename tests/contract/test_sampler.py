"""The engine's thread goes on whatever its callers do: hang up, raise in a callback, or ask what cannot be answered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future

import pytest

from bapo.core.errors import ContractError, UnavailableError
from bapo.core.types import RolloutRequest
from rollout_server.engines.base import Engine, SampledGroup
from rollout_server.engines.scripted import ScriptedEngine, make_engine
from rollout_server.sampler import Sampler
from tests.support.factories import make_request
from tests.support.rollout import make_config
from tests.support.wait import wait_until


class Notes:
    """A listener that fails for groups named in `hates`."""

    def __init__(self) -> None:
        self.groups: list[str] = []
        self.versions: dict[str, int] = {}
        self.refusals: list[str] = []
        self.deaths: list[BaseException] = []
        self.hates: set[str] = set()

    def sampled(self, group: SampledGroup) -> None:
        if group.request_id in self.hates:
            raise RuntimeError("no room for this group")
        self.groups.append(group.request_id)
        self.versions[group.request_id] = int(group.versions.max())

    def refused(self, request_id: str, error: ContractError) -> None:
        self.refusals.append(request_id)
        if request_id in self.hates:
            raise RuntimeError("nobody may be told")

    def died(self, error: BaseException) -> None:
        self.deaths.append(error)


class Picky(ScriptedEngine):
    """Refuses prompts named "long", and leaves at "exit"."""

    def submit(self, request: RolloutRequest, most: int | None = None) -> None:
        if request.prompt.prompt_id == "long":
            raise ContractError("the prompt is too long")
        if request.prompt.prompt_id == "exit":
            raise SystemExit(3)
        super().submit(request, most)


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def sampler(notes: Notes) -> Iterator[Sampler]:
    def make() -> Engine:
        engine = make_engine(make_config())
        engine.__class__ = Picky
        return engine

    found = Sampler(make, notes)
    found.start()
    yield found
    found.stop(5.0)


def held(sampler: Sampler) -> Callable[[], None]:
    """The thread waits inside a call. Returns: what lets it go on."""
    begun, go_on = threading.Event(), threading.Event()

    def wait(engine: Engine) -> None:
        begun.set()
        go_on.wait(10.0)

    sampler.call(wait)
    assert begun.wait(10.0)
    return go_on.set


def assert_samples(sampler: Sampler, notes: Notes, name: str) -> None:
    """A request is sampled to its end."""
    sampler.submit(make_request(prompt_id=name))
    wait_until(lambda: f"g-{name}" in notes.groups)
    assert notes.deaths == []


def test_a_call_that_is_cancelled_before_it_began_is_not_run_and_ends_nothing(sampler: Sampler, notes: Notes) -> None:
    ran: list[str] = []
    let_go = held(sampler)
    gone = sampler.call(lambda engine: ran.append("gone"))
    kept = sampler.call(lambda engine: ran.append("kept"))
    assert gone.cancel()
    let_go()
    kept.result(10.0)
    assert ran == ["kept"]
    with pytest.raises(CancelledError):
        gone.result(10.0)
    assert_samples(sampler, notes, "next")


def test_a_call_that_has_begun_ends_although_its_caller_hangs_up(sampler: Sampler, notes: Notes) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(engine: Engine) -> int:
        begun.set()
        go_on.wait(10.0)
        return 7

    async def hang_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(call), 0.02)

    call: Future[int] = sampler.call(slow)
    assert begun.wait(10.0)
    asyncio.run(hang_up())
    assert not call.cancel()
    go_on.set()
    assert call.result(10.0) == 7
    assert not call.cancel(), "after the result nothing is left to cancel"
    assert_samples(sampler, notes, "next")


def test_a_client_that_hangs_up_while_its_call_waits_leaves_the_others_their_turn(
    sampler: Sampler, notes: Notes
) -> None:
    async def hang_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(waiting), 0.02)

    let_go = held(sampler)
    waiting = sampler.call(lambda engine: engine.num_sampling)
    asyncio.run(hang_up())
    assert waiting.cancelled()
    let_go()
    assert_samples(sampler, notes, "next")


def test_cancelled_calls_do_not_disturb_the_end_of_the_thread(sampler: Sampler, notes: Notes) -> None:
    let_go = held(sampler)
    sampler.call(lambda engine: 1 / 0)
    gone, lost = sampler.call(lambda engine: 1), sampler.call(lambda engine: 2)
    gone.cancel()
    let_go()
    with pytest.raises(UnavailableError):
        lost.result(10.0)
    wait_until(lambda: notes.deaths != [])
    assert isinstance(notes.deaths[0], ZeroDivisionError)
    assert gone.cancelled()


def test_a_callback_that_raises_fails_its_own_group_alone(sampler: Sampler, notes: Notes) -> None:
    notes.hates = {"g-bad", "g-long"}
    for name in ("bad", "good", "long"):
        sampler.submit(make_request(prompt_id=name))
    wait_until(lambda: len(notes.refusals) == 2 and len(notes.groups) == 1)
    assert (notes.groups, sorted(notes.refusals)) == (["g-good"], ["g-bad", "g-long"])
    assert_samples(sampler, notes, "next")


def test_a_question_that_fails_is_its_callers_error_and_a_change_that_fails_is_the_engines_end(
    sampler: Sampler, notes: Notes
) -> None:
    with pytest.raises(ZeroDivisionError):
        sampler.call(lambda engine: 1 / 0, reads=True).result(10.0)
    assert_samples(sampler, notes, "next")
    with pytest.raises(ZeroDivisionError):
        sampler.call(lambda engine: 1 / 0).result(10.0)
    wait_until(lambda: len(notes.deaths) == 1)


def test_an_engine_that_leaves_by_system_exit_is_reported_dead(sampler: Sampler, notes: Notes) -> None:
    sampler.submit(make_request(prompt_id="exit"))
    wait_until(lambda: len(notes.deaths) == 1)
    assert isinstance(notes.deaths[0], SystemExit)
    with pytest.raises(UnavailableError):
        sampler.call(lambda engine: 1).result(10.0)


def slow_sampler(notes: Notes, latency_s: float) -> Sampler:
    found = Sampler(lambda: make_engine(make_config(engine_options={"latency_s": latency_s})), notes)
    found.start()
    return found


def set_version(version: int) -> Callable[[Engine], None]:
    return lambda engine: engine.load_weights("unread", version)


def test_an_update_waits_for_the_groups_in_the_engine_and_what_is_submitted_later_gets_the_new_weights(
    notes: Notes,
) -> None:
    sampler = slow_sampler(notes, 0.3)
    sampler.submit(make_request(prompt_id="early"))
    update = sampler.call(set_version(2), wait_s=30.0)
    sampler.submit(make_request(prompt_id="late"))
    update.result(timeout=10.0)
    assert notes.groups == ["g-early"]
    wait_until(lambda: notes.groups == ["g-early", "g-late"])
    assert notes.versions == {"g-early": 1, "g-late": 2}
    assert sampler.stop(5.0)


def test_an_update_waits_no_longer_than_it_may_for_a_group_that_does_not_end(notes: Notes) -> None:
    sampler = slow_sampler(notes, 3600.0)
    sampler.submit(make_request(prompt_id="endless"))
    sampler.call(set_version(2), wait_s=0.2).result(timeout=10.0)
    assert (notes.groups, sampler.policy_version) == ([], 2)
    waiting = sampler.call(set_version(3), wait_s=3600.0)
    assert sampler.stop(5.0)
    waiting.result(timeout=10.0)  # the end of the thread does not wait for the group
