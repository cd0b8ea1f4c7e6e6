"""Assembly by the service: the step contract, with a composer that is small enough to check by eye."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import pytest

from bapo.config.tree import Config
from bapo.core.errors import ContractError
from bapo.core.types import Purpose
from buffer_service.assembly import Assembler, held_for_texts
from buffer_service.state import Assembly
from buffer_service.store.redis.rows import pack
from tests.support.assembly import Setup, assemble, with_a_stale_group
from tests.support.buffer import an_assembly, answer, incoming
from tests.support.factories import make_request


def test_a_batch_needs_exactly_b_fresh_groups(redis_url: str) -> None:
    setup = Setup(redis_url)
    setup.fill("a")
    assert setup.service.batch(1) is None
    assert setup.service.waiting_for(1)[0].startswith("1/2 fresh groups, 0 leased, 0 queued")
    setup.fill("b", "c")
    batch = setup.service.batch(1)
    assert batch is not None
    assert batch.group_ids == ("g-a", "g-b")
    assert setup.service.inspection.status().fresh_ready == 1


def test_the_same_step_has_the_same_batch(redis_url: str) -> None:
    setup = Setup(redis_url)
    setup.fill("a", "b")
    first = setup.service.batch(1)
    setup.fill("c", "d")
    again = setup.service.batch(1)
    assert first is not None
    assert again is not None
    assert pack(again) == pack(first)
    assert len(setup.composer.views) == 1


def test_the_batch_does_not_depend_on_the_order_in_which_its_groups_arrived(redis_url: str) -> None:
    seen = []
    requests = [make_request(prompt_id="a", step=2), make_request(prompt_id="b", step=1)]
    for order in itertools.permutations(requests):
        setup = Setup(redis_url)
        setup.add(*order)
        setup.service.batch(1)
        (view,) = setup.composer.views
        seen.append([stat.group_id for stat in view.fresh])
    assert seen == [["g-b", "g-a"], ["g-b", "g-a"]]


def test_without_max_steps_ahead_a_step_waits_for_its_own_groups_however_its_workers_race(redis_url: str) -> None:
    setup = Setup(redis_url, max_steps_ahead=0)
    planned = {"a": 1, "b": 1, "c": 2, "d": 2}
    requests = {name: make_request(prompt_id=name, step=step) for name, step in planned.items()}
    setup.store.enqueue(list(requests.values()), cursor=None)
    for name in "dca":
        setup.add(requests[name])
    assert setup.service.batch(1) is None
    setup.add(requests["b"])
    batches = [setup.service.batch(step) for step in (1, 2)]
    assert [batch and batch.group_ids for batch in batches] == [("g-a", "g-b"), ("g-c", "g-d")]


def test_with_max_steps_ahead_nobody_waits_for_the_last_of_a_step(redis_url: str) -> None:
    setup = Setup(redis_url, max_steps_ahead=1)
    setup.store.enqueue([make_request(prompt_id=name, step=1) for name in "ab"], cursor=None)
    setup.fill("c", "d", step=2)
    batch = setup.service.batch(1)
    assert batch is not None
    assert batch.group_ids == ("g-c", "g-d")


def test_a_dropped_request_does_not_hold_its_step_up(redis_url: str) -> None:
    setup = Setup(redis_url, max_steps_ahead=0)
    setup.store.enqueue([make_request(prompt_id="lost", step=1)], cursor=None)
    setup.fill("a", step=1)
    setup.fill("b", step=2)
    for _ in range(9):
        assert setup.service.batch(1) is None
        setup.service.claim("w", 1, 1)
        setup.store.fail("w", "g-lost", reason="engine", detail="")
        setup.store.resume(0)
    batch = setup.service.batch(1)
    assert batch is not None
    assert batch.group_ids == ("g-a", "g-b")


def test_randomness_depends_on_seed_and_step_alone(redis_url: str) -> None:
    draws = []
    for names in ("ab", "xy"):
        setup = Setup(redis_url)
        setup.fill(*names)
        setup.service.batch(1)
        draws += setup.composer.draws
    assert draws[0] == draws[1]


@pytest.mark.parametrize(("step", "why"), [(2, "the next step is 1"), (7, "the next step is 1")])
def test_a_step_that_is_not_next_is_refused(redis_url: str, step: int, why: str) -> None:
    with pytest.raises(ContractError, match=why):
        Setup(redis_url).service.batch(step)


def test_a_released_batch_is_refused_by_name(redis_url: str) -> None:
    setup = Setup(redis_url)
    setup.fill("a", "b")
    setup.service.batch(1)
    setup.service.commit(1, 1)
    with pytest.raises(ContractError, match="released"):
        setup.service.batch(1)


@pytest.mark.parametrize(("step", "checkpointed"), [(2, 0), (1, 2)])
def test_only_a_step_with_a_batch_is_committed(redis_url: str, step: int, checkpointed: int) -> None:
    setup = Setup(redis_url)
    setup.fill("a", "b")
    setup.service.batch(1)
    with pytest.raises(ContractError):
        setup.service.commit(step, checkpointed)


def test_b_bad_comes_with_its_prompts(redis_url: str) -> None:
    setup = Setup(redis_url)
    setup.fill("a", "b", rewards="00000000")
    setup.service.batch(1)
    hard = setup.service.inspection.hard_prompts()
    assert [(entry["prompt_id"], entry["prompt"]["text"]) for entry in hard] == [("a", "1,2,3->6:"), ("b", "1,2,3->6:")]


def test_x2_and_x3_fill_the_batch_and_every_result_is_reported(redis_url: str) -> None:
    setup = Setup(redis_url)
    setup.fill("a", rewards="00000000")
    setup.fill("b")
    setup.service.batch(1)
    again = make_request(prompt_id="a", request_id="r", purpose=Purpose.REEVALUATE, step=2, min_version=2)
    setup.store.enqueue_round(2, [again])
    setup.store.push([incoming(answer(again, "10000000", version=2))])
    setup.fill("c", "d", step=2, rewards="00000000", version=2)
    batch = setup.service.batch(2)
    assert batch is not None
    assert batch.group_ids == ("r", "g-b")
    assert batch.header["origins"] == ["x2", "x3"]
    results = {
        result["group_id"]: (result["origin"], result["birth"], result["purpose"]) for result in batch.header["results"]
    }
    assert results == {
        "g-c": (None, 2, "fresh"),
        "g-d": (None, 2, "fresh"),
        "r": ("x2", 2, "reevaluate"),
        "g-b": ("x3", 1, "fresh"),
    }
    assert [entry["prompt_id"] for entry in setup.service.inspection.hard_prompts()] == ["c", "d"]
    assert batch.num_bytes == sum(len(frame or b"") for frame in setup.store.frames(["r", "g-b"]))


# -- staleness


@pytest.mark.parametrize(
    ("max_steps_ahead", "version", "is_stale"), [(0, 3, False), (0, 2, True), (1, 2, False), (1, 1, True)]
)
def test_a_group_is_too_old_beyond_v_minus_1_plus_max_steps_ahead(
    redis_url: str, max_steps_ahead: int, version: int, is_stale: bool
) -> None:
    setup = Setup(redis_url, max_steps_ahead=max_steps_ahead)
    for step in (1, 2, 3):
        setup.fill(f"a{step}", f"b{step}", step=step, version=step)
        setup.service.batch(step)
    setup.fill("old", "new", step=4, version=version)
    assert (setup.service.batch(4) is None) is is_stale


def test_a_stale_group_is_replaced_by_a_request_for_the_same_prompt_and_reported(redis_url: str) -> None:
    setup = Setup(redis_url)
    for step in (1, 2, 3):
        setup.fill(f"a{step}", f"b{step}", step=step, version=step)
        setup.service.batch(step)
    setup.fill("old", step=4, rewards="11100000", version=1)
    setup.fill("new", step=4, version=4)
    assert setup.service.batch(4) is None
    assert setup.service.store.counters()["dropped_groups:stale:3/8"] == 1
    assert setup.service.claim("w", 9, 3) == []
    (again,) = setup.service.claim("w", 9, 4)
    assert (again.request_id, again.prompt.prompt_id, again.min_version, again.step) == ("g-old~1", "old", 4, 4)
    setup.store.push([incoming(answer(again, version=4))])
    batch = setup.service.batch(4)
    assert batch is not None
    assert batch.group_ids == ("g-new", "g-old~1")
    stale = [result for result in batch.header["results"] if result["reason"] == "stale"]
    assert [(result["group_id"], result["origin"], sum(result["rewards"])) for result in stale] == [
        ("g-old", None, 3.0)
    ]
    assert setup.service.store.compositions(0, 1)[1][0]["num_stale"] == 1


def test_a_stale_group_is_held_for_its_text_until_the_batch_that_reports_it_is_released(redis_url: str) -> None:
    setup = with_a_stale_group(redis_url)
    batch = setup.service.batch(4)
    assert batch is not None
    assert batch.untrained == ("g-old", "g-wrong")
    setup.service.commit(4, 3)
    assert setup.service.store.frames(["g-old"])[0] is not None
    setup.service.commit(4, 4)
    assert setup.service.store.frames(["g-old"])[0] is None


def test_what_does_not_train_is_held_as_far_as_it_fits_and_else_a_sample_that_is_the_same_for_all() -> None:
    records = [incoming(answer(make_request(prompt_id=name))).record for name in "abcdefgh"]
    records = [msgspec.structs.replace(record, num_bytes=300_000) for record in records]
    config = Config.model_validate({"diagnostics": {"texts_mb": 1, "texts": 2}})
    assert held_for_texts(2, records[:3], config) == ("g-a", "g-b", "g-c")
    held = held_for_texts(2, records, config)
    assert len(held) == 3
    assert list(held) == sorted(held)
    assert held_for_texts(2, records, config) == held
    assert len({held_for_texts(step, records, config) for step in range(2, 22, 2)}) > 1
    assert held_for_texts(3, records, config) == ()
    large = msgspec.structs.replace(records[0], num_bytes=1_000_001)
    assert held_for_texts(2, [large, *records[1:3]], config) == ("g-b", "g-c")


# -- waiting


def test_in_the_papers_order_a_step_waits_for_its_round(redis_url: str) -> None:
    setup = Setup(redis_url, wait_for_reevaluation=True)
    setup.fill("a", "b")
    assert setup.service.batch(1) is not None
    setup.fill("c", step=2, version=2)
    setup.fill("d", step=2, rewards="00000000", version=2)
    assert setup.service.batch(2) is None
    assert setup.service.waiting_for(2)[0] == "re-evaluation round 2 is not issued: is the scheduler running?"
    again = make_request(prompt_id="a", request_id="r", purpose=Purpose.REEVALUATE, step=2, min_version=2)
    setup.service.enqueue_round(2, [again])
    assert setup.service.batch(2) is None
    assert setup.service.waiting_for(2)[0].startswith(
        "1 requests of re-evaluation round 2 are open, 0 leased, 1 queued"
    )
    setup.store.push([incoming(answer(again, version=2))])
    batch = setup.service.batch(2)
    assert batch is not None
    assert "r" in batch.group_ids


def test_a_round_whose_requests_were_dropped_holds_nobody_up(redis_url: str) -> None:
    setup = Setup(redis_url, wait_for_reevaluation=True)
    setup.fill("a", "b")
    setup.service.batch(1)
    setup.fill("c", "d", step=2, version=2)
    setup.service.enqueue_round(2, [])
    assert setup.service.batch(2) is not None


# -- composers that break their promise


def assembled(setup: Setup, step: int) -> Assembly:
    assembly = assemble(Assembler(setup.store, setup.composer, setup.config, now=lambda: 99.5), step)
    assert assembly is not None
    return assembly


def test_a_composition_says_what_the_batch_is_made_of(redis_url: str) -> None:
    setup = Setup(redis_url, max_steps_ahead=1)
    setup.fill("a", rewards="00000000")
    setup.fill("b")
    sizes = [len(frame or b"") for frame in setup.store.frames(["g-a", "g-b"])]
    first = assembled(setup, 1)
    assert first.composition == {
        "step": 1, "x1": 1, "x2": 0, "x3": 0, "sft": 0, "rounds": 1, "batch_size": 2, "num_stale": 0,
        "staleness_max": 0, "r_tot": 1 / 8, "fresh": 2, "reevaluated": 0, "improved": 0,
        "c2": 0.25, "c3": 0.5, "num_bad": 1, "num_high": 1, "time": 99.5,
    }  # fmt: skip
    assert (first.fresh, first.fresh_bytes, first.batch.num_bytes) == (("g-a", "g-b"), sum(sizes), sizes[1])
    assert [prompt.prompt_id for prompt in first.new_prompts] == ["a"]
    assert (first.batch.untrained, first.reference_changes) == (("g-a",), {"g-b": 1})
    assert replace(first, batch=replace(first.batch, untrained=())).reference_changes == {"g-a": -1, "g-b": 1}
    setup.fill("c", "d", step=2, rewards="00000000", version=2)
    second = assembled(setup, 2)
    assert (second.composition["x3"], second.composition["staleness_max"], second.composition["num_bad"]) == (1, 1, 3)
    assert [prompt.prompt_id for prompt in second.new_prompts] == ["c", "d"], "a's is there already"
    assert second.left_bad == ()
    assert second.batch.header["facts"]["num_high"] == second.composition["num_high"] == 0


def test_fresh_groups_are_counted_by_their_rewards_whether_they_train_or_not(redis_url: str) -> None:
    setup = Setup(redis_url)
    setup.fill("a", rewards="11111111")  # trains: KeepsAll filters nothing but all-incorrect groups
    setup.fill("b", rewards="00000000")
    assert setup.service.batch(1) is not None
    setup.service.enqueue_round(2, [])
    setup.fill("c", step=2, version=2)
    setup.fill("d", step=2, rewards="00000000", version=2)
    assert setup.service.batch(2) is not None
    shown = setup.service.exposition(None).decode()
    assert 'bapo_batch_fresh_groups_total{rewards="equal"} 3.0' in shown, "a once, though step 2 trains it again"
    assert 'bapo_batch_fresh_groups_total{rewards="differ"} 1.0' in shown


def test_without_waiting_a_late_reevaluation_joins_the_next_batch(redis_url: str) -> None:
    setup = Setup(redis_url)
    setup.fill("a", rewards="00000000")
    setup.fill("b")
    setup.service.batch(1)
    again = make_request(prompt_id="a", request_id="r", purpose=Purpose.REEVALUATE, step=2, min_version=2)
    setup.service.enqueue_round(2, [again])
    setup.fill("c", "d", step=2, version=2)
    assert setup.service.batch(2) is not None
    setup.store.push([incoming(answer(again, version=2))])
    setup.fill("e", step=3, version=2)
    setup.fill("f", step=3, rewards="00000000", version=2)
    batch = setup.service.batch(3)
    assert batch is not None
    assert batch.header["origins"] == ["x1", "x2"]


def test_a_round_takes_only_reevaluations_of_its_step(redis_url: str) -> None:
    wrong = make_request(prompt_id="a", purpose=Purpose.REEVALUATE, step=3)
    with pytest.raises(ContractError):
        Setup(redis_url).service.enqueue_round(2, [wrong])


def test_a_batch_is_as_stale_as_its_oldest_group(redis_url: str) -> None:
    setup = Setup(redis_url, max_steps_ahead=1)
    setup.fill("a", rewards="00000000")
    setup.fill("b")
    assembled(setup, 1)
    setup.fill("c", step=2, rewards="00000000", version=2)
    setup.fill("d", step=2, version=2)
    second = assembled(setup, 2)
    assert second.batch.group_ids == ("g-d", "g-b")
    assert second.composition["staleness_max"] == 1, "d has the weights of step 2, b those of step 1"


def test_a_replacement_asks_for_weights_that_are_new_enough_for_the_step(redis_url: str) -> None:
    setup = Setup(redis_url, max_steps_ahead=1)  # v = 2: at most two steps old, so step 20 needs version 18
    setup.add(make_request(prompt_id="a", step=1, min_version=1), version=1)
    setup.add(make_request(prompt_id="b", step=9, min_version=7), version=7)
    for step in range(1, 20):
        setup.store.commit_assembly(an_assembly(step=step, before=setup.store.tables()))
    assert assemble(Assembler(setup.store, setup.composer, setup.config), 20) is None
    assert [request.min_version for request in setup.service.claim("w", 9, 20)] == [18, 18]
