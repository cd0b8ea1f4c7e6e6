"""What an assembly moved, on one that fits on a page."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from bapo.types import HardPrompt
from buffer_service import flows
from buffer_service.values import Tables
from tests.factories import make_stat


@dataclass
class Made:
    """The fields of an Assembly that are read here."""

    step: int
    before: Tables
    after: Tables
    fresh: tuple[str, ...]
    reevaluated: tuple[str, ...]
    fates: list[dict[str, Any]] = field(default_factory=list)

    @property
    def batch(self) -> Any:
        return SimpleNamespace(header={"fates": self.fates})


def fate(group: str, prompt: str, purpose: str, origin: str | None, reason: str, tokens: int = 10) -> dict[str, Any]:
    return {
        "group_id": group, "prompt_id": prompt, "purpose": purpose, "origin": origin, "reason": reason,
        "rewards": [0.0, 1.0], "num_tokens": tokens,
    }  # fmt: skip


def hard(prompt: str, birth: int) -> HardPrompt:
    return HardPrompt(prompt_id=prompt, birth=birth, mu=0.0)


STEP = Made(
    step=8,
    before=Tables(
        bad=(hard("p1", 2), hard("p2", 3), hard("p3", 5), hard("p4", 6)),
        high=(make_stat(group_id="h5", prompt_id="q5", birth=5), make_stat(group_id="h7", prompt_id="q7", birth=7)),
    ),
    after=Tables(
        bad=(hard("p3", 5), hard("n1", 8)),
        high=(make_stat(group_id="h7", prompt_id="q7", birth=7), make_stat(group_id="f2", prompt_id="n2", birth=8)),
    ),
    fresh=("f1", "f2"),
    reevaluated=("r1", "r2", "r3"),
    fates=[
        fate("s0", "n0", "fresh", None, "stale", 7),
        fate("f1", "n1", "fresh", None, "all_wrong"),
        fate("f2", "n2", "fresh", "x1", "informative"),
        fate("r1", "p1", "reevaluate", "x2", "improved", 30),
        fate("r2", "p2", "reevaluate", None, "solved"),
        fate("r3", "p3", "reevaluate", None, "still_hard"),
        fate("h7", "q7", "fresh", "x3", "reused", 99),
    ],
)


def test_entries_come_in_once_and_leave_for_a_reason() -> None:
    assert flows.inserted(STEP) == {"bad": 1, "high": 1}
    assert dict(flows.evicted(STEP, high_window=3)) == {
        ("bad", "improved"): 1,  # p1 trains
        ("bad", "solved"): 1,  # p2
        ("bad", "full"): 1,  # p4 was not asked and is gone
        ("high", "expired"): 1,  # born in step 5 of 5, 6, 7
    }


def test_a_group_whose_prompt_has_a_newer_one_was_replaced() -> None:
    before = Tables(
        high=(make_stat(group_id="old", prompt_id="q", birth=7), make_stat(group_id="gone", prompt_id="x", birth=7))
    )
    after = Tables(high=(make_stat(group_id="new", prompt_id="q", birth=8),))
    made = Made(step=8, before=before, after=after, fresh=("new",), reevaluated=())
    assert dict(flows.evicted(made, high_window=3)) == {("high", "replaced"): 1, ("high", "dropped"): 1}


def test_a_hard_prompt_whose_fresh_group_is_hard_again_was_replaced_unless_it_was_trained() -> None:
    before = Tables(bad=(hard("again", 2), hard("trained", 3), hard("oldest", 4)))
    after = Tables(bad=(hard("again", 8), hard("trained", 8)))
    fates = [
        fate("r", "trained", "reevaluate", "x2", "improved"),
        fate("f1", "again", "fresh", None, "all_wrong"),
        fate("f2", "trained", "fresh", None, "all_wrong"),
    ]
    made = Made(step=8, before=before, after=after, fresh=("f1", "f2"), reevaluated=("r",), fates=fates)
    assert dict(flows.evicted(made, high_window=3)) == {
        ("bad", "replaced"): 1,
        ("bad", "improved"): 1,
        ("bad", "full"): 1,
    }
    assert flows.inserted(made)["bad"] == 2  # 3 entries before, 2 in, 3 out: 2


def test_ages_are_of_what_was_used() -> None:
    assert sorted(flows.ages(STEP)) == [("bad", 3), ("bad", 5), ("bad", 6), ("high", 1)]


def test_a_group_is_paid_for_where_it_is_first_looked_at() -> None:
    assert flows.spent(STEP) == {
        ("fresh", "stale"): (2, 7),
        ("fresh", "left_out"): (2, 10),
        ("fresh", "trained"): (2, 10),
        ("reevaluate", "trained"): (2, 30),
        ("reevaluate", "left_out"): (4, 20),
    }
