"""The composer `bapo`: which group goes where (vectors V9 and the trace V10), and what its parts promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from bapo.algorithms.composer import AssemblyView, Decision, Reason, Rng
from bapo.algorithms.composers.bapo import Bapo
from bapo.algorithms.randomness import rng_for
from bapo.algorithms.settings import AlgorithmConfig
from bapo.core.types import GroupStat, HardPrompt, Origin
from tests.support.factories import make_hard, make_stat
from tests.support.vectors import vector

TRACE = AlgorithmConfig(
    batch_size=6, c2_range=(2 / 8, 2 / 8), c3_range=(4 / 8, 4 / 8), threshold_schedule="fixed", max_reevaluated=4
)
"""The settings of V10: c1 = 1/8, S = 3, B_bad of 6 prompts."""


def rng_of(step: int, seed: int = 0) -> Rng:
    return lambda purpose: rng_for(seed, step, purpose)


def compose(
    settings: AlgorithmConfig = TRACE,
    *,
    fresh: Mapping[str, int] | Sequence[GroupStat],
    reevaluated: Mapping[str, int] | Sequence[GroupStat] = (),
    bad: Sequence[HardPrompt] = (),
    high: Sequence[GroupStat] = (),
    step: int = 4,
    seed: int = 0,
) -> Decision:
    """Compose step `step`; {prompt id: k} stands for fresh groups "f-<id>" and re-evaluated groups "r-<id>"."""
    view = AssemblyView(
        step=step,
        fresh=tuple(groups("f", fresh)),
        reevaluated=tuple(groups("r", reevaluated)),
        bad=tuple(bad),
        high=tuple(high),
        previous_r_tot=None,
    )
    return Bapo(settings).compose(view, rng_of(step, seed))


def groups(kind: str, given: Mapping[str, int] | Sequence[GroupStat]) -> list[GroupStat]:
    if not isinstance(given, Mapping):
        return list(given)
    return [make_stat(k=k, prompt_id=name, group_id=f"{kind}-{name}") for name, k in given.items()]


def names(ids: Sequence[str]) -> str:
    """("f-a", "r-b") -> "ab"."""
    return "".join(group_id[2:] for group_id in ids)


def prompts(entries: Sequence[HardPrompt | GroupStat]) -> str:
    return "".join(entry.prompt_id for entry in entries)


@pytest.mark.parametrize("seed", range(5))
def test_four_steps_of_the_trace_give_its_batches_and_its_buffers(seed: int) -> None:
    composer, given = Bapo(TRACE), vector("V10.trace")
    fresh, again = given["fresh"], given["reeval"]
    bad: tuple[HardPrompt, ...] = ()
    high: tuple[GroupStat, ...] = ()
    for row in given["trace"]:
        t = row["t"]
        now, asked = fresh[str(t)], again.get(str(t), {})
        if t % 2 == 0:  # m = 2
            assert composer.hard_prompts_to_ask(bad, t, frozenset(now), rng_of(t, seed)) == tuple(asked)
        decision = compose(fresh=now, reevaluated=asked, bad=bad, high=high, step=t, seed=seed)
        assert (list(names(decision.x1)), list(names(decision.x2))) == (row["X1"], row["X2"]), f"step {t}"
        assert 6 - len(decision.x1) - len(decision.x2) == row["room_for_X3"], f"step {t}"
        if row["X3"][:1] == ["choose"]:
            num, candidates = row["X3"][1], row["X3"][3]
            assert len(decision.x3) == num
            assert set(names(decision.x3)) < set(candidates)
        else:
            assert list(names(decision.x3)) == row["X3"]
        assert list(prompts(decision.bad)) == row["B_bad_after"], f"step {t}"
        assert list(prompts(decision.high)) == row["B_high_after"], f"step {t}"
        bad, high = decision.bad, decision.high
    assert [prompt.attempts for prompt in bad] == [1, 0]  # g was asked at step 4 and is still hard


@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("V9.fresh_r0.4_c[.275,.4]", (0.275, 0.4)),
        ("V9.fresh_r0_c[.125,.25]", (0.125, 0.25)),  # k = 1 is then in X1, B_bad and B_high at once
    ],
)
@pytest.mark.parametrize("k", range(9))
def test_a_fresh_group_goes_where_its_level_says(k: int, name: str, window: tuple[float, float]) -> None:
    c2, c3 = window
    want = vector(name)["rows"][k]
    settings = AlgorithmConfig(batch_size=4, threshold_schedule="fixed", c2_range=(c2, c2), c3_range=(c3, c3))
    decision = compose(settings, fresh={"p": want["k"]})
    assert bool(decision.x1) is want["X1"]
    assert bool(decision.bad) is want["to_bad"]
    assert bool(decision.high) is want["to_high"]


@pytest.mark.parametrize("row", vector("V9.reeval")["rows"], ids=lambda row: f"k={row['k']}")
def test_a_reevaluated_prompt_trains_leaves_or_stays(row: dict[str, Any]) -> None:
    k = row["k"]
    decision = compose(fresh={"z": 8}, reevaluated={"p": k}, bad=[make_hard(prompt_id="p")])
    assert bool(decision.x2) is row["X2"]
    assert bool(decision.bad) is not row["leaves_B_bad"]
    want = Reason.STILL_HARD if k < 2 else Reason.SOLVED if k == 8 else Reason.IMPROVED
    assert decision.reasons["r-p"] == want


def test_the_released_code_would_also_train_a_prompt_that_is_hardly_better_and_one_that_is_solved() -> None:
    """It takes mu' above the old mu, here 0; we take eq. 6, c1 < mu' < 1 (docs/paper.md, Decisions)."""
    more = set()
    for row in vector("V9.reeval")["rows"]:
        ours = compose(fresh={"z": 8}, reevaluated={"p": row["k"]}, bad=[make_hard(prompt_id="p", mu=0.0)]).x2
        assert not ours or row["official_code_promotes_if_old_mu_0"]
        if row["official_code_promotes_if_old_mu_0"] and not ours:
            more.add(row["k"])
    assert more == {1, 8}


def test_still_hard_prompts_keep_their_place_and_count_the_attempt() -> None:
    bad = [make_hard(prompt_id="a", birth=1), make_hard(prompt_id="b", birth=2, attempts=3)]
    decision = compose(fresh={"z": 8}, reevaluated={"a": 1, "b": 0}, bad=bad)
    assert decision.bad == (
        make_hard(prompt_id="a", birth=1, mu=1 / 8, attempts=1),
        make_hard(prompt_id="b", birth=2, mu=0.0, attempts=4),
    )


def test_improved_prompts_without_room_stay_in_b_bad() -> None:
    fresh = dict.fromkeys("tuvwx", 4)  # X1 has 5 of 6 places
    bad = [make_hard(prompt_id=name) for name in "abc"]
    decision = compose(fresh=fresh, reevaluated={"a": 3, "b": 3, "c": 3}, bad=bad)
    (taken,) = decision.x2
    left = [name for name in "abc" if f"r-{name}" != taken]
    assert prompts(decision.bad) == "".join(left)
    assert [decision.reasons[f"r-{name}"] for name in left] == [Reason.NO_ROOM] * 2
    assert [prompt.attempts for prompt in decision.bad] == [0, 0]


def test_a_reevaluation_without_variance_does_not_train_and_stays() -> None:
    again = make_stat(rewards=[0.5] * 8, prompt_id="a", group_id="r-a")
    decision = compose(fresh={"z": 8}, reevaluated=[again], bad=[make_hard(prompt_id="a", attempts=1)])
    assert (decision.x2, decision.reasons["r-a"]) == ((), Reason.NO_VARIANCE)
    assert decision.bad == (make_hard(prompt_id="a", mu=0.5, attempts=1),)


def test_a_full_x1_leaves_no_room_for_the_others() -> None:
    decision = compose(
        fresh=dict.fromkeys("tuvwxy", 4),
        reevaluated={"a": 3},
        bad=[make_hard(prompt_id="a")],
        high=[make_stat(k=3, prompt_id="h", birth=3)],
    )
    assert (len(decision.x1), decision.x2, decision.x3) == (6, (), ())


def test_no_signal_anywhere_gives_an_empty_batch() -> None:
    decision = compose(fresh={"a": 0, "b": 8})
    assert decision.origins == {}
    assert decision.reasons == {"f-a": Reason.ALL_INCORRECT, "f-b": Reason.ALL_CORRECT}


def test_a_prompt_trains_once_x1_before_x2_before_x3() -> None:
    in_all_three = [make_stat(k=3, prompt_id=name, group_id=f"h-{name}", birth=3) for name in "abc"]
    decision = compose(
        fresh={"a": 3, "z": 8},
        reevaluated={"a": 3, "b": 3},
        bad=[make_hard(prompt_id="a"), make_hard(prompt_id="b")],
        high=in_all_three,
    )
    assert decision.origins == {"f-a": Origin.X1, "r-b": Origin.X2, "h-c": Origin.X3}
    assert decision.reasons["r-a"] == Reason.DUPLICATE_PROMPT
    assert decision.bad == (make_hard(prompt_id="a", mu=3 / 8),)  # improved, but not trained as X2: it stays


def test_a_prompt_that_is_twice_in_the_fresh_groups_trains_with_its_first() -> None:
    fresh = [make_stat(k=2, prompt_id="a", group_id="first"), make_stat(k=3, prompt_id="a", group_id="second")]
    decision = compose(fresh=fresh)
    assert decision.x1 == ("first",)
    assert decision.reasons["second"] == Reason.DUPLICATE_PROMPT
    assert [stat.group_id for stat in decision.high] == ["second"]


def test_a_prompt_that_was_asked_twice_is_judged_by_its_newest_group() -> None:
    again = [make_stat(k=3, prompt_id="a", group_id="old"), make_stat(k=0, prompt_id="a", group_id="new")]
    decision = compose(fresh={"z": 8}, reevaluated=again, bad=[make_hard(prompt_id="a")])
    assert decision.x2 == ()
    assert decision.reasons == {"f-z": "all_correct", "old": Reason.DUPLICATE_PROMPT, "new": Reason.STILL_HARD}


def test_a_prompt_that_left_b_bad_meanwhile_does_not_train() -> None:
    decision = compose(fresh={"z": 8}, reevaluated={"a": 3}, bad=[])
    assert (decision.x2, decision.reasons["r-a"]) == ((), Reason.LEFT_BAD)


def test_b_bad_forgets_its_oldest_beyond_its_capacity() -> None:
    settings = TRACE.model_copy(update={"bad_capacity": 2})
    decision = compose(settings, fresh={"c": 0, "d": 0}, bad=[make_hard(prompt_id="a"), make_hard(prompt_id="b")])
    assert prompts(decision.bad) == "cd"
    assert prompts(compose(settings, fresh={"c": 0}, bad=[make_hard(prompt_id=n) for n in "ab"]).bad) == "bc"


def test_a_newer_group_replaces_the_one_of_the_same_prompt_in_b_high() -> None:
    old = make_stat(k=2, prompt_id="a", group_id="old", birth=3)
    other = make_stat(k=2, prompt_id="b", birth=3)
    decision = compose(fresh={"a": 3}, high=[old, other], step=4)
    assert decision.high == (other, make_stat(k=3, prompt_id="a", group_id="f-a", birth=4))


@pytest.mark.parametrize(
    ("birth", "reused", "kept"),
    [(6, False, False), (7, True, False), (8, True, True), (9, True, True), (10, False, True)],
)
def test_b_high_serves_and_keeps_the_latest_three_steps(birth: int, reused: bool, kept: bool) -> None:
    stat = make_stat(k=3, prompt_id="h", birth=birth)
    decision = compose(fresh={"z": 8}, high=[stat], step=10)
    assert bool(decision.x3) is reused
    assert bool(decision.high) is kept


def test_x3_asks_for_the_window_of_this_step_again() -> None:
    # Stored while k = 6 was inside; c3 = 4/8 now.
    decision = compose(fresh={"z": 8}, high=[make_stat(k=6, prompt_id="h", birth=3)])
    assert decision.x3 == ()


@pytest.mark.parametrize(("drop", "reused"), [(True, ()), (False, ("g-h",))])
def test_x3_without_variance_is_dropped_unless_asked_for(drop: bool, reused: tuple[str, ...]) -> None:
    settings = TRACE.model_copy(update={"c2_range": (0.0, 0.0), "drop_zero_variance_x3": drop})
    decision = compose(settings, fresh={"z": 8}, high=[make_stat(k=0, prompt_id="h", birth=3)])
    assert decision.x3 == reused


def test_the_ablations_switch_off_x2_and_x3() -> None:
    settings = TRACE.model_copy(update={"use_x2": False, "use_x3": False})
    bad = [make_hard(prompt_id="a")]
    decision = compose(
        settings, fresh={"z": 8}, reevaluated={"a": 3}, bad=bad, high=[make_stat(k=3, prompt_id="h", birth=3)]
    )
    assert (decision.x2, decision.x3) == ((), ())
    assert decision.reasons["r-a"] == Reason.NOT_USED
    assert Bapo(settings).hard_prompts_to_ask(bad, 4, frozenset(), rng_of(4)) == ()


def test_x3_is_drawn_uniformly() -> None:
    high = [make_stat(k=3, prompt_id=name, birth=3) for name in "abcd"]
    fresh = dict.fromkeys("tuvwx", 4)  # leaves one place
    drawn = [compose(fresh=fresh, high=high, seed=seed).x3[0] for seed in range(400)]
    for stat in high:
        assert 70 <= drawn.count(stat.group_id) <= 130  # 100 expected, sigma 8.7


def test_hard_prompts_of_this_step_or_in_its_fresh_groups_are_not_asked() -> None:
    bad = [make_hard(prompt_id="a", birth=3), make_hard(prompt_id="b", birth=4), make_hard(prompt_id="c", birth=1)]
    assert Bapo(TRACE).hard_prompts_to_ask(bad, 4, frozenset("c"), rng_of(4)) == ("a",)


def test_at_most_m_hard_prompts_are_asked_oldest_first() -> None:
    bad = [make_hard(prompt_id=f"{i:02d}", birth=1) for i in range(20)]
    asked = Bapo(TRACE).hard_prompts_to_ask(bad, 4, frozenset(), rng_of(4))
    assert len(asked) == 4
    assert list(asked) == sorted(asked)
    assert asked == Bapo(TRACE).hard_prompts_to_ask(bad, 4, frozenset(), rng_of(4))
    assert asked != Bapo(TRACE).hard_prompts_to_ask(bad, 4, frozenset(), rng_of(4, seed=1))


def test_r_tot_counts_the_groups_that_the_filter_drops() -> None:
    assert compose(fresh={"a": 0, "b": 8, "c": 1}).r_tot == 9 / 24


def test_fractional_rewards_are_compared_with_a_tolerance() -> None:
    # 0.7 + 0.2 + 0.1 is 0.9999999999999999 in floats: mu = 1/8 = c1, hard and informative.
    stat = make_stat(rewards=[0.7, 0.2, 0.1, 0, 0, 0, 0, 0], group_id="f-p")
    decision = compose(fresh=[stat])
    assert (decision.x1, prompts(decision.bad)) == (("f-p",), "p")
    just_above = msgspec.structs.replace(stat, reward_sum=1.01)
    assert compose(fresh=[just_above]).bad == ()


@pytest.mark.parametrize("k", range(9))
def test_the_mini_test_is_settings_alone(k: int) -> None:
    mini = AlgorithmConfig(batch_size=4, c1=0.0, x3_exactly_half=True)
    fresh = compose(mini, fresh={"p": k})
    assert bool(fresh.bad) is (k == 0)
    assert bool(fresh.high) is (k == 4)
    again = compose(mini, fresh={"z": 8}, reevaluated={"p": k}, bad=[make_hard(prompt_id="p")])
    assert bool(again.x2) is (1 <= k <= 7)


def test_a_hard_prompt_that_is_hard_again_moves_to_the_tail_as_new() -> None:
    bad = [make_hard(prompt_id="a", birth=1, attempts=2), make_hard(prompt_id="b", birth=2)]
    decision = compose(fresh={"a": 1}, bad=bad, step=4)
    assert decision.bad == (bad[1], make_hard(prompt_id="a", birth=4, mu=1 / 8))
