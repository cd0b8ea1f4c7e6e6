"""The selector `review`: which prompts come back and when, by hand."""

from __future__ import annotations

from bapo.algorithms.selectors.base import PromptPool
from bapo.core.success_counts import success_counts_of
from contrib.review.selector import Review

POOL = PromptPool(prompt_ids=tuple(f"p{i}" for i in range(40)))


def selector(which: str) -> Review:
    settings = Review.Settings.model_validate({"which": which, "share": 0.5, "first": 3})
    return Review(settings, POOL, seed=1, batch_size=4)


def see(chooser: Review, step: int, levels: dict[int, int]) -> None:
    chooser.observe(success_counts_of(step, [(f"p{i}", k, 4) for i, k in levels.items()]))


def test_a_solved_prompt_comes_back_after_three_steps_then_after_six() -> None:
    chooser = selector("solved")
    a, b, c, d = chooser.propose(1, 4).tolist()
    see(chooser, 1, {a: 4, b: 3, c: 0, d: 1})
    assert not {a, b, c, d} & set(chooser.propose(3, 4).tolist())
    assert chooser.propose(4, 4).tolist()[0] == a
    assert not {b, c, d} & set(chooser.propose(4, 4).tolist())
    see(chooser, 4, {a: 4})
    assert a not in chooser.propose(9, 4).tolist()
    assert chooser.propose(10, 4).tolist()[0] == a


def test_a_prompt_that_is_no_longer_solved_is_not_reviewed() -> None:
    chooser = selector("solved")
    a, *_ = chooser.propose(1, 4).tolist()
    see(chooser, 1, {a: 4})
    see(chooser, 4, {a: 2})
    assert a not in chooser.propose(20, 4).tolist()


def test_the_control_reviews_prompts_of_any_result_up_to_its_share() -> None:
    chooser = selector("any")
    first = chooser.propose(1, 4).tolist()
    see(chooser, 1, dict(zip(first, (4, 3, 0, 1), strict=True)))
    assert len(set(first) & set(chooser.propose(4, 4).tolist())) == 2


def test_a_restored_selector_proposes_the_same() -> None:
    chooser, again = selector("solved"), selector("solved")
    a, *_ = chooser.propose(1, 4).tolist()
    see(chooser, 1, {a: 4})
    again.restore(chooser.state())
    assert again.propose(4, 10).tolist() == chooser.propose(4, 10).tolist()
