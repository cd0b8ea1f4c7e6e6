"""The engine's thread goes on whatever its callers do: hang up, or ask what cannot be answered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future

import pytest

from bapo.core.errors import ContractError, UnavailableError
from rollout_server.engines.base import Completed, Completion, Engine
from rollout_server.engines.scripted import ScriptedEngine, make_engine, make_tokenization
from rollout_server.rollouts.base import completion_of
from rollout_server.sampler import Sampler
from tests.support.factories import make_request
from tests.support.rollout import make_config
from tests.support.wait import wait_until


class Picky(ScriptedEngine):
    """Refuses the call "long", and leaves at "exit"."""

    def add(self, completion: Completion) -> None:
        if completion.call_id == "g-long":
            raise ContractError("the prompt is too long")
        if completion.call_id == "g-exit":
            raise SystemExit(3)
        super().add(completion)


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    def make() -> Engine:
        engine = make_engine(make_config())
        engine.__class__ = Picky
        return engine

    found = Sampler(make)
    found.start()
    yield found
    found.stop(5.0)


def generate(sampler: Sampler, name: str) -> Future[Completed]:
    request, config = make_request(prompt_id=name), make_config()
    return sampler.generate(completion_of(request, make_tokenization(config).encode_prompt(request.prompt), config))


def held(sampler: Sampler) -> Callable[[], None]:
    """The thread waits inside a call. Returns: what lets it go on."""
    begun, go_on = threading.Event(), threading.Event()

    def wait(engine: Engine) -> None:
        begun.set()
        go_on.wait(10.0)

    sampler.call(wait)
    assert begun.wait(10.0)
    return go_on.set


def assert_samples(sampler: Sampler) -> None:
    """A call is sampled to its end."""
    assert generate(sampler, "next").result(10.0).call_id == "g-next"
    assert not sampler.ended.done()


def test_a_call_that_is_cancelled_before_it_began_is_not_run_and_ends_nothing(sampler: Sampler) -> None:
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
    assert_samples(sampler)


def test_a_call_that_has_begun_ends_although_its_caller_hangs_up(sampler: Sampler) -> None:
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
    assert_samples(sampler)


def test_a_client_that_hangs_up_while_its_call_waits_leaves_the_others_their_turn(
    sampler: Sampler,
) -> None:
    async def hang_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(waiting), 0.02)

    let_go = held(sampler)
    waiting = sampler.call(lambda engine: engine.occupancy)
    asyncio.run(hang_up())
    assert waiting.cancelled()
    let_go()
    assert_samples(sampler)


def test_cancelled_calls_do_not_disturb_the_end_of_the_thread(sampler: Sampler) -> None:
    let_go = held(sampler)
    sampler.call(lambda engine: 1 / 0)
    gone, lost = sampler.call(lambda engine: 1), sampler.call(lambda engine: 2)
    gone.cancel()
    let_go()
    with pytest.raises(UnavailableError):
        lost.result(10.0)
    assert isinstance(sampler.ended.exception(10.0), ZeroDivisionError)
    assert gone.cancelled()


def test_a_call_that_the_engine_refuses_fails_alone(sampler: Sampler) -> None:
    long, good = generate(sampler, "long"), generate(sampler, "good")
    assert isinstance(long.exception(10.0), ContractError)
    assert good.result(10.0).call_id == "g-good"
    assert_samples(sampler)


def test_sampling_that_is_cancelled_leaves_the_engine_and_its_id_may_come_again(sampler: Sampler) -> None:
    let_go = held(sampler)
    before, kept = generate(sampler, "twice"), generate(sampler, "kept")
    assert before.cancel()
    again = generate(sampler, "twice")
    let_go()
    assert [again.result(10.0).call_id, kept.result(10.0).call_id] == ["g-twice", "g-kept"]


def test_sampling_that_is_cancelled_in_the_engine_is_aborted() -> None:
    sampler = slow_sampler(3600.0)
    future = generate(sampler, "endless")
    sampler.call(set_version(2)).result(10.0)
    assert sampler.idle_s == 0.0
    assert future.cancel()
    assert sampler.call(lambda engine: engine.occupancy.running).result(10.0) == 0
    wait_until(lambda: sampler.idle_s > 0.0)
    assert sampler.stop(5.0)
    assert sampler.ended.exception(10.0) is None


def test_an_engine_that_leaves_by_system_exit_is_reported_dead_with_all_its_calls(sampler: Sampler) -> None:
    let_go = held(sampler)
    lost = [generate(sampler, name) for name in ("good", "exit", "later")]
    let_go()
    assert isinstance(sampler.ended.exception(10.0), SystemExit)
    assert {str(future.exception(10.0)) for future in lost} == {"the engine is dead: SystemExit: 3"}
    with pytest.raises(UnavailableError):
        sampler.call(lambda engine: 1).result(10.0)
    with pytest.raises(UnavailableError):
        generate(sampler, "after").result(10.0)


def slow_sampler(latency_s: float) -> Sampler:
    found = Sampler(lambda: make_engine(make_config(engine_options={"latency_s": latency_s})))
    found.start()
    return found


def set_version(version: int) -> Callable[[Engine], None]:
    return lambda engine: engine.load_weights("unread", version)


def version_of(future: Future[Completed]) -> int:
    return int(future.result(10.0).sequences[0].versions.max())


def test_an_update_waits_for_the_calls_in_the_engine_and_what_is_called_later_gets_the_new_weights() -> None:
    sampler = slow_sampler(0.3)
    early = generate(sampler, "early")
    update = sampler.call(set_version(2), wait_s=30.0)
    late = generate(sampler, "late")
    update.result(timeout=10.0)
    assert (early.done(), late.done()) == (True, False)
    assert (version_of(early), version_of(late)) == (1, 2)
    assert sampler.stop(5.0)


def test_an_update_waits_no_longer_than_it_may_for_a_call_that_does_not_end() -> None:
    sampler = slow_sampler(3600.0)
    endless = generate(sampler, "endless")
    sampler.call(set_version(2), wait_s=0.2).result(timeout=10.0)
    assert (endless.done(), sampler.policy_version) == (False, 2)
    sampler.call(set_version(3), wait_s=3600.0).cancel()
    assert sampler.call(lambda engine: engine.policy_version).result(timeout=10.0) == 2  # a cancelled one holds nothing
    sampler.call(set_version(3), wait_s=3600.0)
    endless.cancel()  # whoever asked for it has hung up
    assert sampler.call(lambda engine: engine.policy_version).result(timeout=10.0) == 3
    generate(sampler, "endless too")
    waiting = sampler.call(set_version(4), wait_s=3600.0)
    assert sampler.stop(5.0)
    waiting.result(timeout=10.0)  # the end of the thread does not wait for the call
