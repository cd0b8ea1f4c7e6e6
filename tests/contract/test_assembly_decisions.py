"""What a composer decides is checked before it becomes state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bapo.algorithms.composer import AssemblyView, Decision, Rng, whole_groups
from bapo.core.batch_items import Item, Part
from bapo.core.errors import ContractError
from bapo.core.types import HardPrompt, Origin
from tests.support.assembly import KeepsAll, Setup
from tests.support.buffer import stat


def rows_of(*parts: tuple[str, tuple[int, ...] | None]) -> Item:
    """An item of these rows."""
    return Item(origin=Origin.X1, parts=tuple(Part(group_id=group_id, rows=rows) for group_id, rows in parts))


class Breaks(KeepsAll):
    def __init__(self, **changes: object) -> None:
        super().__init__()
        self.changes = changes

    def compose(self, view: AssemblyView, rng: Rng) -> Decision:
        return replace(super().compose(view, rng), **self.changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"items": whole_groups("abc")}, "trains 3 items of kind rl, more than B = 2"),
        ({"items": whole_groups(["g-a"], ["g-a"])}, "trains an item more than once: .'g-a'"),
        ({"items": whole_groups(["g-a"], x3=["g-z"])}, "that are not in the buffer: .'g-z'"),
        ({"items": (rows_of(("g-a", (0, 8))),)}, "'g-a:0,8' has no rows"),
        ({"items": (rows_of(("g-a", (1, 1))),)}, "has no rows, or repeats one"),
        ({"items": (rows_of(("g-a", ())),)}, "has no rows"),
        ({"items": (rows_of(("g-a", None), ("g-b", (1,))),)}, "'g-a.g-b:1' mixes groups of different prompts"),
        (
            {"items": (rows_of(("g-a", (0,))), rows_of(("g-a", (1,))))},
            "trains a prompt more than once in one step: .'a'",
        ),
        ({"reasons": {"g-a": "said"}}, "no reason for 1 groups: .'g-b'"),
        ({"bad": (HardPrompt(prompt_id="z", birth=1, mu=0.0),)}, "were not fresh in this step: .'z'"),
    ],
)
def test_a_decision_that_breaks_its_invariants_changes_nothing(
    redis_url: str, changes: dict[str, object], message: str
) -> None:
    setup = Setup(redis_url, Breaks(**changes))
    setup.fill("a", "b")
    with pytest.raises(ContractError, match=message):
        setup.service.batch(1)
    assert setup.service.inspection.status().assembled_step == 0
    assert setup.service.inspection.status().fresh_ready == 2


def test_a_decision_may_keep_in_b_high_only_what_the_buffer_holds(redis_url: str) -> None:
    setup = Setup(redis_url, Breaks(high=(stat("g-z"),)))
    setup.fill("a", "b")
    with pytest.raises(ContractError, match=r"keeps in B_high groups that are not in the buffer: .'g-z'"):
        setup.service.batch(1)


# -- what an assembly writes down
