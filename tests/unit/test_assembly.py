"""The pure parts of an assembly: the view in order, the tables after a decision, its results and its batch."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from bapo.algorithms.composer import Decision, whole_groups
from bapo.config.tree import Config
from bapo.core.types import Origin
from bapo.transport.messages import ExtraRound
from buffer_service.assembly import batch_of, entering_bad, in_order, is_stale, results_of, reused_ids, tables_after
from buffer_service.state import GroupRecord, Tables, View
from tests.support.buffer import answer, hard, incoming, stat
from tests.support.buffer_app import small_config
from tests.support.factories import make_request


def record(name: str) -> GroupRecord:
    """Of the fresh group `g-NAME`."""
    return incoming(answer(make_request(prompt_id=name))).record


FRESH = (record("b"), record("a"))
BEFORE = Tables(
    step=1,
    high=(stat("g-old"),),
    extra_rounds=(ExtraRound(step=1, round=2, first=0, size=2),),
    num_extra=2,
)
VIEW = in_order(View(tables=BEFORE, fresh=FRESH, reevaluated=(), stale=()), FRESH)
DECISION = Decision(
    items=whole_groups(["g-a"], x3=["g-old"]),
    r_tot=0.25,
    facts={"c2": 0.2, "c3": 0.3},
    bad=(hard("b", birth=2),),
    high=(stat("g-a", birth=2),),
    reasons={"g-a": "trained", "g-b": "all_incorrect"},
)


@pytest.mark.parametrize(("stale_tokens", "too_old"), [("drop", [7, 8]), ("mask", [8])])
def test_a_group_is_stale_by_its_oldest_token_or_if_those_are_masked_by_its_newest(
    stale_tokens: str, too_old: list[int]
) -> None:
    config = Config.model_validate({
        "agents": {},
        "rollout": {"stale_tokens": stale_tokens},
        "cadence": {"weight_sync_interval": 1, "reevaluation_interval": 1, "max_steps_ahead": 3},
    })  # fmt: skip
    spanning = msgspec.structs.replace(record("a"), policy_version=3, newest_version=4)
    assert [step for step in range(4, 9) if is_stale(spanning, step, config)] == too_old


def test_a_view_does_not_depend_on_the_order_of_arrival() -> None:
    assert [item.group_id for item in VIEW.fresh] == ["g-a", "g-b"]


def test_the_tables_after_a_step_keep_rounds_of_which_no_group_was_consumed() -> None:
    after = tables_after(2, VIEW, DECISION)
    assert (after.step, after.bad, after.high) == (2, DECISION.bad, DECISION.high)
    assert after.extra_rounds == BEFORE.extra_rounds
    prefix = BEFORE.extra_rounds[0].prefix
    of_the_round = replace(VIEW, fresh=(record("a"), incoming(answer(make_request(request_id=prefix + "1"))).record))
    assert tables_after(2, of_the_round, DECISION).extra_rounds == ()


def test_only_prompts_that_b_bad_did_not_have_enter_it() -> None:
    assert entering_bad(VIEW, DECISION) == ["g-b"]
    assert entering_bad(replace(VIEW, tables=replace(BEFORE, bad=(hard("b"),))), DECISION) == []


def test_every_group_has_its_result_and_a_reused_one_keeps_its_birth() -> None:
    results = results_of(2, VIEW, DECISION, [record("old")])
    assert [(result.group_id, result.origin, result.reason, result.birth) for result in results] == [
        ("g-a", Origin.X1, "trained", 2),
        ("g-b", None, "all_incorrect", 2),
        ("g-old", Origin.X3, "reused", 1),
    ]


def test_a_batch_has_the_bytes_of_its_groups_and_holds_the_untrained_for_their_texts() -> None:
    old, config = record("old"), small_config(diagnostics={"texts": 1})
    batch = batch_of(2, VIEW, DECISION, results=[], reused=[old], held=[], config=config)
    assert reused_ids(VIEW, DECISION) == ["g-old"]
    assert (batch.group_ids, batch.untrained) == (("g-a", "g-old"), ("g-b",))
    assert batch.num_bytes == VIEW.fresh[0].num_bytes + old.num_bytes
