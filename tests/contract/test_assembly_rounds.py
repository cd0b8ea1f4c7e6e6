"""Further rounds of a step in the service: what their requests may come to."""

from __future__ import annotations

from bapo.algorithms.composers.dapo import Dapo
from bapo.algorithms.settings import AlgorithmConfig
from bapo.transport.messages import ExtraRound
from tests.support.assembly import Setup
from tests.support.factories import make_request


def in_its_second_round(redis_url: str) -> tuple[Setup, ExtraRound]:
    """DAPO with B = 2 without sampling ahead: both groups of step 1 were all wrong."""
    setup = Setup(redis_url, Dapo(AlgorithmConfig(composer="dapo", batch_size=2)))
    setup.fill("a", "b", rewards="00000000")
    assert setup.service.batch(1) is None
    (extra,) = setup.service.inspection.status().extra_rounds
    return setup, extra


def test_a_round_of_which_every_request_failed_for_good_does_not_hold_up_its_step(redis_url: str) -> None:
    setup, extra = in_its_second_round(redis_url)
    lost = [make_request(prompt_id=name, request_id=f"{extra.prefix}{name}") for name in ("c", "d")]
    setup.store.enqueue(lost, cursor=None)
    assert [setup.store.drop_request(request.request_id) for request in lost] == [True, True]
    assert setup.service.batch(1) is None  # the scheduler has not asked for others yet
    assert setup.service.inspection.status().fresh_dropped == 2
    setup.fill("e", "f")  # its spares
    batch = setup.service.batch(1)
    assert batch is not None
    assert batch.group_ids == ("g-e", "g-f")


def test_a_round_that_lost_one_request_trains_what_it_has(redis_url: str) -> None:
    setup, extra = in_its_second_round(redis_url)
    kept, lost = (make_request(prompt_id=name, request_id=f"{extra.prefix}{name}") for name in ("c", "d"))
    setup.store.enqueue([lost], cursor=None)
    setup.add(kept)
    assert setup.store.drop_request(lost.request_id)
    assert setup.service.batch(1) is None  # a third round: one of two groups would train
    demand = setup.service.store.tables().demand
    assert demand is not None
    assert (demand.rounds, demand.found, demand.num_fresh) == (3, 1, 6)


def test_a_third_round_asks_for_other_prompts_than_the_second(redis_url: str) -> None:
    setup, second = in_its_second_round(redis_url)
    for name in ("c", "d"):
        setup.add(make_request(prompt_id=name, request_id=f"{second.prefix}{name}"), rewards="00000000")
    assert setup.service.batch(1) is None
    assert [(extra.round, extra.first, extra.size) for extra in setup.service.inspection.status().extra_rounds] == [
        (2, 0, 2),
        (3, 2, 2),  # of the permutation of prompts: behind the two of the second round
    ]
