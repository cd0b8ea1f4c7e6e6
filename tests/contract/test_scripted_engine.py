"""The scripted engine: always the same groups for the same request, right when the task says so, better with time."""

from __future__ import annotations

import numpy as np
import pytest

from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config, TaskConfig
from bapo.core.errors import ConfigError
from bapo.core.sequences import SampledSequence, group_columns
from bapo.core.types import Prompt, Purpose, RolloutRequest
from bapo.tasks.registry import load_task
from rollout_server.engines.scripted import make_engine, make_policy, make_tokenization
from tests.support.engines import Driven


def config_of(**options: object) -> Config:
    return Config(
        task=TaskConfig(options={"num_train": 50, "num_held_out": 5}),
        rollout=RolloutConfig(engine="scripted", max_response_tokens=32, engine_options=options),
    )


def prompts(num: int) -> list[Prompt]:
    return list(load_task("countdown", {"num_train": 50}).prompts("train")[:num])


def request(prompt: Prompt, *, purpose: Purpose = Purpose.FRESH, step: int = 1, size: int = 8) -> RolloutRequest:
    return RolloutRequest(
        request_id=f"r-{prompt.prompt_id}",
        prompt=prompt,
        group_size=size,
        purpose=purpose,
        step=step,
        min_version=1,
    )


def same(a: list[SampledSequence], b: list[SampledSequence]) -> bool:
    """But for the version that sampled them."""
    first, second = group_columns(a), group_columns(b)
    columns = ("token_ids", "rollout_logprobs", "lengths", "outcomes")
    return [s.text for s in a] == [s.text for s in b] and all(np.array_equal(first[c], second[c]) for c in columns)


def test_the_same_request_at_the_same_version_is_the_same_group_in_another_engine() -> None:
    prompt = prompts(1)[0]
    first = make_policy(config_of(seed=3)).sample(request(prompt), version=4)
    second = make_policy(config_of(seed=3)).sample(request(prompt), version=4)
    assert same(first, second)


def test_what_was_sampled_before_does_not_matter() -> None:
    a, b = prompts(2)
    alone = make_policy(config_of()).sample(request(b), version=1)
    policy = make_policy(config_of())
    policy.sample(request(a), version=1)
    assert same(policy.sample(request(b), version=1), alone)


@pytest.mark.parametrize(
    ("seed", "version", "purpose"), [(1, 1, Purpose.FRESH), (0, 2, Purpose.FRESH), (0, 1, Purpose.REEVALUATE)]
)
def test_seed_version_and_purpose_each_change_the_draw(seed: int, version: int, purpose: Purpose) -> None:
    prompt = prompts(1)[0]
    base = make_policy(config_of(seed=0)).sample(request(prompt), version=1)
    other = make_policy(config_of(seed=seed)).sample(request(prompt, purpose=purpose), version=version)
    assert not same(base, other)


def test_with_the_step_as_clock_the_version_that_happens_to_sample_does_not_matter() -> None:
    prompt = prompts(1)[0]
    policy = make_policy(config_of(clock="step"))
    early = policy.sample(request(prompt, step=6), version=5)
    late = policy.sample(request(prompt, step=6), version=6)
    assert same(early, late)
    assert ({*early[0].versions.tolist()}, {*late[0].versions.tolist()}) == ({5}, {6})
    assert not same(early, policy.sample(request(prompt, step=7), version=6))


def test_right_texts_are_right_and_wrong_texts_are_wrong_for_the_tasks_verifier() -> None:
    task = load_task("countdown", {"num_train": 50})
    prompt = prompts(1)[0]
    always = make_policy(config_of(skill_start=5.0)).sample(request(prompt), version=1)
    never = make_policy(config_of(skill_start=-5.0)).sample(request(prompt), version=1)
    assert [task.reward(prompt, response.text or "") for response in always] == [1.0] * 8
    assert [task.reward(prompt, response.text or "") for response in never] == [0.0] * 8


def test_probability_is_one_half_where_skill_meets_difficulty_and_rises_by_the_gain_over_the_spread() -> None:
    policy = make_policy(config_of(skill_start=0.5, skill_gain=0.05, spread=0.5))
    inner = [p.prompt_id for p in prompts(50) if 0.1 < policy.probability(p.prompt_id, 1) < 0.8]
    assert inner
    for prompt_id in inner:
        rise = policy.probability(prompt_id, 2) - policy.probability(prompt_id, 1)
        assert rise == pytest.approx(0.05 / 0.5)
        assert policy.probability(prompt_id, 100) == 1.0


def test_a_call_keeps_the_version_of_its_submission() -> None:
    engine = Driven(make_engine(config_of()), make_tokenization(config_of()), config_of())
    engine.submit(request(prompts(1)[0]))
    engine.engine.load_weights("unused", 7)
    (group,) = engine.finish()
    assert group.versions.tolist() == [[1, 1]] * 8
    assert engine.engine.policy_version == 7


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"latensy_s.*latency_s"):
        make_engine(config_of(latensy_s=1))
