"""What every composer promises: found by name from the folder, so that a new file is tested without an edit here."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo.algorithms.composer import AssemblyView, Composer, Decision, NeedMore, Reason, Rng
from bapo.algorithms.composers.registry import load_composer
from bapo.algorithms.methods import COMPOSER
from bapo.algorithms.randomness import rng_for
from bapo.algorithms.settings import AlgorithmConfig
from bapo.config.load import load_config
from bapo.core.errors import ConfigError
from bapo.core.types import GroupStat, HardPrompt
from tests.support.factories import make_hard, make_stat
from tests.support.methods import options_for

TRAINED = {
    Reason.INFORMATIVE, Reason.IMPROVED, Reason.REUSED, Reason.YOUNGEST, Reason.REPLAYED, Reason.SUPERVISED,
}  # fmt: skip
WORDS = set(Reason)
PROMPTS = [f"p{i}" for i in range(12)]

WITH_EXPERTS = ("luffy", "relift")
"""Composers that refuse groups without an expert's row."""


OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "share": st.sampled_from([0.0, 0.4, 0.5]),
    "first_step": st.integers(1, 3),
    "last_step": st.none() | st.integers(3, 6),
    "window": st.integers(1, 3),
    "capacity": st.none() | st.integers(1, 9),
    "per_prompt": st.sampled_from([1, 4, 6, 8]),
    "num_rows": st.integers(1, 8),
    "strategy": st.sampled_from(["highest_k", "recent_k", "random_k", "all", "max_variance_k"]),
    "keep_homogeneous": st.booleans(),
    "sft_items": st.integers(1, 2),
}


def settings_of(name: str) -> st.SearchStrategy[AlgorithmConfig]:
    """Settings of one composer, small enough that every rule is reached within a few steps."""
    return st.builds(
        AlgorithmConfig,
        composer=st.just(name),
        options=st.fixed_dictionaries(options_for(COMPOSER, name, **OPTIONS)),
        batch_size=st.integers(2, 6),
        group_size=st.just(4),
        c1=st.sampled_from([0.0, 1 / 8, 1 / 4, 1 / 2]),
        threshold_schedule=st.sampled_from(["eq8", "inverted", "official", "fixed"]),
        r_tot_decay=st.sampled_from([0.0, 0.5]),
        online_filter=st.sampled_from(["range", "gaussian", "uniform", "none"]),
        x3_policy=st.sampled_from(["window", "youngest"]),
        use_x2=st.booleans(),
        use_x3=st.booleans(),
        bad_capacity=st.none() | st.integers(1, 5),
        high_window=st.integers(1, 4),
        max_reevaluated=st.integers(1, 4),
        x3_exactly_half=st.booleans(),
        max_rounds=st.integers(1, 3),
        num_experts=st.just(int(name in WITH_EXPERTS)),
    )


class Run:
    """A buffer in a few lines: steps of random groups, as the service would show them to the composer."""

    def __init__(self, config: AlgorithmConfig, seed: int) -> None:
        self.config = config
        self.composer: Composer = load_composer(config)
        self.seed = seed
        self.bad: tuple[HardPrompt, ...] = ()
        self.high: tuple[GroupStat, ...] = ()
        self.r_tot: float | None = None

    def step(self, t: int) -> tuple[AssemblyView, Decision]:
        draw = rng_for(self.seed, t, "test")
        names = self._names(draw, t)
        asked = self.composer.hard_prompts_to_ask(self.bad, t, frozenset(names), self._rng(t))
        assert len(asked) <= self.config.max_reevaluated
        assert not set(asked) & set(names)
        again = tuple(self._group("again", t, name, draw) for name in asked)
        fresh = tuple(self._group("fresh", t, name, draw) for name in names)
        view = AssemblyView(
            step=t, fresh=fresh, reevaluated=again, bad=self.bad, high=self.high, previous_r_tot=self.r_tot
        )
        while isinstance(decision := self._compose(view), NeedMore):
            assert decision.found < decision.wanted
            assert view.round < self.composer.max_rounds
            kind = f"extra{view.round}"
            more = tuple(self._group(kind, t, name, draw) for name in self._names(draw, t))
            view = replace(view, fresh=view.fresh + more, round=view.round + 1)
        self.bad, self.high, self.r_tot = decision.bad, decision.high, decision.r_tot
        return view, decision

    def _compose(self, view: AssemblyView) -> Decision | NeedMore:
        decision = self.composer.compose(view, self._rng(view.step))
        assert decision == self.composer.compose(view, self._rng(view.step)), "not a function of the view"
        return decision

    def _names(self, draw: random.Random, t: int) -> list[str]:
        return draw.sample(PROMPTS, self.composer.fresh_schedule.at(t))

    def _group(self, kind: str, t: int, name: str, draw: random.Random) -> GroupStat:
        size = self.config.group_size
        num = size - self.config.num_experts
        rewards = "".join("1" if i < draw.randint(0, num) else "0" for i in range(num)) + "1" * self.config.num_experts
        experts = range(num, size)
        return make_stat(rewards=rewards, prompt_id=name, group_id=f"{kind}-{t}-{name}", version=t, experts=experts)

    def _rng(self, t: int) -> Rng:
        return lambda purpose: rng_for(self.seed, t, purpose)


@pytest.mark.parametrize("name", COMPOSER.names())
@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 10_000))
def test_every_step_of_every_composer_keeps_the_invariants(name: str, data: st.DataObject, seed: int) -> None:
    config = data.draw(settings_of(name))
    run = Run(config, seed)
    for t in range(1, 9):
        high = run.high
        view, decision = run.step(t)
        check_batch(config, run.composer, view, decision)
        check_memory(t, view, high, decision)
        if name == "bapo":
            check_batch_of_bapo(config, view, decision)
            check_buffers_of_bapo(config, t, decision)


def check_batch(config: AlgorithmConfig, composer: Composer, view: AssemblyView, decision: Decision) -> None:
    new = {stat.group_id: stat for stat in (*view.fresh, *view.reevaluated)}
    known = {**{stat.group_id: stat for stat in view.high}, **new}
    ids = [item.item_id for item in decision.items]
    assert len(set(ids)) == len(ids)
    for kind in ("rl", "sft"):
        assert sum(item.kind == kind for item in decision.items) <= config.batch_size
    for item in decision.items:
        stats = [known[group_id] for group_id in item.group_ids]
        assert len({stat.prompt_id for stat in stats}) == 1, "rows of two prompts under one baseline"
        for part, stat in zip(item.parts, stats, strict=True):
            rows = range(config.group_size) if part.rows is None else part.rows
            assert rows
            assert len(set(rows)) == len(rows)
            assert set(rows) <= set(range(len(stat.rewards)))
    supervised = {group_id for item in decision.items if item.kind == "sft" for group_id in item.group_ids}
    trained = [known[item.group_ids[0]].prompt_id for item in decision.items if item.kind == "rl"]
    assert len(set(trained)) == len(trained) or not composer.prompts_once
    assert new.keys() <= decision.reasons.keys()
    assert set(decision.reasons.values()) <= WORDS
    in_batch = {group_id for item in decision.items for group_id in item.group_ids}
    assert {key for key, reason in decision.reasons.items() if reason in TRAINED} == in_batch
    assert {key for key, reason in decision.reasons.items() if reason == Reason.SUPERVISED} == supervised
    assert 0 <= decision.r_tot <= 1
    assert 0 <= decision.facts.get("c2", 0) <= decision.facts.get("c3", 1) <= 1


def check_memory(t: int, view: AssemblyView, before: tuple[GroupStat, ...], decision: Decision) -> None:
    """What is kept is known, once, oldest first, and its births never change."""
    births = {stat.group_id: stat.birth for stat in before}
    known = births.keys() | {stat.group_id for stat in (*view.fresh, *view.reevaluated)}
    ids = [stat.group_id for stat in decision.high]
    assert len(set(ids)) == len(ids)
    assert set(ids) <= known
    assert [stat.birth for stat in decision.high] == sorted(stat.birth for stat in decision.high)
    assert all(stat.birth == births.get(stat.group_id, t) for stat in decision.high)


def check_batch_of_bapo(config: AlgorithmConfig, view: AssemblyView, decision: Decision) -> None:
    known = {stat.group_id: stat for stat in (*view.fresh, *view.reevaluated, *view.high)}
    assert len(decision.items) <= config.batch_size
    assert set(decision.x1) <= {stat.group_id for stat in view.fresh}
    assert set(decision.x2) <= {stat.group_id for stat in view.reevaluated}
    assert set(decision.x3) <= {stat.group_id for stat in view.high}
    assert all(view.step - config.high_window <= known[x].birth < view.step for x in decision.x3)


def check_buffers_of_bapo(config: AlgorithmConfig, t: int, decision: Decision) -> None:
    assert len(decision.bad) <= config.capacity
    assert len({prompt.prompt_id for prompt in decision.bad}) == len(decision.bad)
    assert [prompt.birth for prompt in decision.bad] == sorted(prompt.birth for prompt in decision.bad)
    assert len({stat.prompt_id for stat in decision.high}) == len(decision.high)
    # So that step t + 1 sees births from (t + 1) - S to t.
    assert all(t + 1 - config.high_window <= stat.birth <= t for stat in decision.high)
    trained_again = set(decision.x2)
    assert not {f"again-{t}-{prompt.prompt_id}" for prompt in decision.bad if prompt.birth < t} & trained_again


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_a_composer_that_needs_experts_says_so(name: str) -> None:
    with pytest.raises(ConfigError, match=r"set algorithm\.num_experts = 1"):
        load_config([], [f"--algorithm.composer={name}"])


def test_a_misspelt_composer_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"bappo.*did you mean 'bapo'.*use one of .*bapo, .*grpo"):
        load_composer(AlgorithmConfig(composer="bappo"))


def test_grpo_trains_all_fresh_groups_and_stores_nothing() -> None:
    grpo = load_composer(AlgorithmConfig(composer="grpo", online_filter="none"))
    fresh = tuple(make_stat(k=k, prompt_id=f"p{k}") for k in range(9))
    view = AssemblyView(step=1, fresh=fresh, reevaluated=(), bad=(), high=(), previous_r_tot=None)
    decision = grpo.compose(view, lambda purpose: rng_for(0, 1, purpose))
    assert isinstance(decision, Decision)
    assert decision.x1 == tuple(f"g-p{k}" for k in range(9))
    assert (decision.x2, decision.x3, decision.bad, decision.high) == ((), (), (), ())
    assert decision.r_tot == 0.5
    assert grpo.hard_prompts_to_ask([make_hard()], 5, frozenset(), lambda purpose: rng_for(0, 5, purpose)) == ()
