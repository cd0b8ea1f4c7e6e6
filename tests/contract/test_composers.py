"""What every composer promises: found by name from the folder, so that a new file is tested without an edit here."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo.algorithms.composer import AssemblyView, Composer, Decision, Reason, Rng
from bapo.algorithms.randomness import rng_for
from bapo.algorithms.registry import composer_names, load_composer
from bapo.algorithms.settings import AlgorithmConfig
from bapo.errors import ConfigError
from bapo.types import GroupStat, HardPrompt
from tests.factories import make_hard, make_stat

WORDS = {value for name, value in vars(Reason).items() if name.isupper()}
PROMPTS = [f"p{i}" for i in range(12)]

algorithm_settings = st.builds(
    AlgorithmConfig,
    name=st.sampled_from(composer_names()),
    batch_size=st.integers(1, 6),
    group_size=st.just(4),
    c1=st.sampled_from([0.0, 1 / 8, 1 / 4, 1 / 2]),
    threshold_schedule=st.sampled_from(["eq8", "inverted", "official", "fixed"]),
    r_tot_decay=st.sampled_from([0.0, 0.5]),
    online_filter=st.sampled_from(["range", "gaussian", "gaussian_quota", "uniform", "none"]),
    use_x2=st.booleans(),
    use_x3=st.booleans(),
    bad_capacity=st.none() | st.integers(1, 5),
    high_window=st.integers(1, 4),
    max_reevaluated=st.integers(1, 4),
    x3_exactly_half=st.booleans(),
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
        names = draw.sample(PROMPTS, self.config.batch_size)
        fresh = tuple(self._group("fresh", t, name, draw.randint(0, 4)) for name in names)
        asked = self.composer.hard_prompts_to_ask(self.bad, t, frozenset(names), self._rng(t))
        assert len(asked) <= self.config.max_reevaluated
        assert not set(asked) & set(names)
        again = tuple(self._group("again", t, name, draw.randint(0, 4)) for name in asked)
        view = AssemblyView(
            step=t, fresh=fresh, reevaluated=again, bad=self.bad, high=self.high, previous_r_tot=self.r_tot
        )
        decision = self.composer.compose(view, self._rng(t))
        assert decision == self.composer.compose(view, self._rng(t)), "not a function of the view"
        self.bad, self.high, self.r_tot = decision.bad, decision.high, decision.r_tot
        return view, decision

    def _group(self, kind: str, t: int, name: str, k: int) -> GroupStat:
        return make_stat(k=k, size=4, prompt_id=name, group_id=f"{kind}-{t}-{name}", version=t)

    def _rng(self, t: int) -> Rng:
        return lambda purpose: rng_for(self.seed, t, purpose)


@settings(max_examples=150, deadline=None)
@given(config=algorithm_settings, seed=st.integers(0, 10_000))
def test_every_step_of_every_composer_keeps_the_invariants(config: AlgorithmConfig, seed: int) -> None:
    run = Run(config, seed)
    for t in range(1, 9):
        view, decision = run.step(t)
        check_batch(config, view, decision)
        check_buffers(config, t, decision)


def check_batch(config: AlgorithmConfig, view: AssemblyView, decision: Decision) -> None:
    known = {stat.group_id: stat for stat in (*view.fresh, *view.reevaluated, *view.high)}
    chosen = [known[group_id] for group_id in decision.origins]
    assert len(chosen) <= config.batch_size
    assert len({stat.prompt_id for stat in chosen}) == len(chosen)
    assert set(decision.x1) <= {stat.group_id for stat in view.fresh}
    assert set(decision.x2) <= {stat.group_id for stat in view.reevaluated}
    assert set(decision.x3) <= {stat.group_id for stat in view.high}
    assert all(view.step - config.high_window <= known[x].birth < view.step for x in decision.x3)
    assert {stat.group_id for stat in (*view.fresh, *view.reevaluated)} <= set(decision.reasons)
    assert set(decision.reasons.values()) <= WORDS
    trained = {Reason.INFORMATIVE, Reason.IMPROVED, Reason.REUSED}
    assert {x for x, reason in decision.reasons.items() if reason in trained} == set(decision.origins)
    assert 0 <= decision.r_tot <= 1
    assert 0 <= decision.c2 <= decision.c3 <= 1


def check_buffers(config: AlgorithmConfig, t: int, decision: Decision) -> None:
    assert len(decision.bad) <= config.capacity
    assert len({prompt.prompt_id for prompt in decision.bad}) == len(decision.bad)
    assert [prompt.birth for prompt in decision.bad] == sorted(prompt.birth for prompt in decision.bad)
    assert len({stat.prompt_id for stat in decision.high}) == len(decision.high)
    assert [stat.birth for stat in decision.high] == sorted(stat.birth for stat in decision.high)
    # So that step t + 1 sees births from (t + 1) - S to t.
    assert all(t + 1 - config.high_window <= stat.birth <= t for stat in decision.high)
    trained_again = set(decision.x2)
    assert not {f"again-{t}-{prompt.prompt_id}" for prompt in decision.bad if prompt.birth < t} & trained_again


@pytest.mark.parametrize("name", composer_names())
def test_a_composer_carries_the_name_of_its_file(name: str) -> None:
    assert load_composer(AlgorithmConfig(name=name)).name == name


def test_both_papers_composers_are_found() -> None:
    assert {"bapo", "grpo"} <= set(composer_names())


def test_a_misspelt_composer_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"'bappo'.*did you mean 'bapo'.*write one of bapo, grpo"):
        load_composer(AlgorithmConfig(name="bappo"))


def test_a_module_without_a_composer_is_not_one() -> None:
    with pytest.raises(ConfigError, match="no such composer"):
        load_composer(AlgorithmConfig(name="thresholds"))


def test_grpo_trains_all_fresh_groups_and_stores_nothing() -> None:
    grpo = load_composer(AlgorithmConfig(name="grpo", online_filter="none"))
    fresh = tuple(make_stat(k=k, prompt_id=f"p{k}") for k in range(9))
    view = AssemblyView(step=1, fresh=fresh, reevaluated=(), bad=(), high=(), previous_r_tot=None)
    decision = grpo.compose(view, lambda purpose: rng_for(0, 1, purpose))
    assert decision.x1 == tuple(f"g-p{k}" for k in range(9))
    assert (decision.x2, decision.x3, decision.bad, decision.high) == ((), (), (), ())
    assert decision.r_tot == 0.5
    assert grpo.hard_prompts_to_ask([make_hard()], 5, frozenset(), lambda purpose: rng_for(0, 5, purpose)) == ()
