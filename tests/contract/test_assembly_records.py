"""What an assembly says of groups that are easily mistaken: stale ones whose id is used again, re-evaluated ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from bapo.algorithms.composer import AssemblyView, Decision, Reason, Rng
from bapo.core.types import Purpose
from buffer_service.state import GroupRecord
from tests.support.assembly import KeepsAll, Setup, with_a_stale_group
from tests.support.factories import make_request


@pytest.mark.parametrize("later", [True, False], ids=["another group of its id", "deleted meanwhile"])
def test_a_stale_group_is_held_only_while_it_is_that_very_group(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, later: bool
) -> None:
    setup = with_a_stale_group(redis_url)
    records = setup.store.records

    def others(group_ids: Sequence[str]) -> list[GroupRecord | None]:
        found = records(group_ids)
        for index, record in enumerate(found):
            if record is not None and record.group_id == "g-old":
                found[index] = msgspec.structs.replace(record, claimed_at=record.claimed_at + 1) if later else None
        return found

    monkeypatch.setattr(setup.store, "records", others)
    batch = setup.service.batch(4)
    assert batch is not None
    assert batch.untrained == ("g-wrong",)


class Judges(KeepsAll):
    """Says of re-evaluated groups what BAPO would, and keeps one of those that improved out for want of room."""

    def compose(self, view: AssemblyView, rng: Rng) -> Decision:
        kept = tuple(stat for stat in view.reevaluated if stat.prompt_id != "late")
        decision = super().compose(replace(view, reevaluated=kept), rng)
        word = {"late": Reason.NO_ROOM, "still": Reason.STILL_HARD, "better": Reason.IMPROVED}
        return replace(
            decision, reasons={**decision.reasons, **{s.group_id: word[s.prompt_id] for s in view.reevaluated}}
        )


def test_reevaluated_groups_are_counted_as_improved_with_room_or_without(redis_url: str) -> None:
    setup = Setup(redis_url, Judges())
    for name, rewards in (("late", "11000000"), ("still", "00000000"), ("better", "11100000")):
        again = make_request(prompt_id=name, request_id=f"r-{name}", purpose=Purpose.REEVALUATE)
        setup.add(again, rewards=rewards)
    setup.fill("a", "b", rewards="00000000")
    assert setup.service.batch(1) is not None
    (line,) = setup.service.store.compositions(0, 1)[1]
    assert (line["fresh"], line["reevaluated"], line["improved"]) == (2, 3, 2)


def test_a_step_that_has_asked_for_nothing_more_is_in_its_first_round(redis_url: str) -> None:
    setup = Setup(redis_url)
    setup.fill("a", "b")
    assert setup.service.batch(1) is not None
    assert [view.round for view in setup.composer.views] == [1]
