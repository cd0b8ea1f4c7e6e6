"""What every engine promises. The test finds the engines by itself; each is made by the small factory below.

Real vLLM takes most of a minute to start: `tests/full/test_vllm_contract.py` runs the same tests on it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config, ModelConfig
from bapo.core.errors import ConfigError, ContractError
from bapo.core.types import Prompt
from rollout_server.engines.base import Continuation, Engine, SampledGroup, engine_module, known_engines, no_image
from rollout_server.engines.scripted import ScriptedEngine
from tests.support.factories import make_request

MAX_TOKENS = 24


def _scripted_config(folder: Path) -> Config:
    return Config(rollout=RolloutConfig(engine="scripted", max_response_tokens=MAX_TOKENS))


def _vllm_config(folder: Path) -> Config:
    from tests.support.tiny_model import write_tiny_model

    write_tiny_model(folder / "model")
    return Config(
        model=ModelConfig(path=str(folder / "model")),
        rollout=RolloutConfig(max_response_tokens=MAX_TOKENS, max_prompt_tokens=32),
    )


CONFIGS: dict[str, Callable[[Path], Config]] = {
    "scripted": _scripted_config,
    "scripted_actor": _scripted_config,
    "vllm": _vllm_config,
}


@contextmanager
def made(name: str, folder: Path) -> Iterator[Engine]:
    """An engine of this name."""
    assert name in CONFIGS, f"rollout_server/engines/{name}.py is new: say here how tests make it"
    module = engine_module(name)
    os.environ.update(module.ENVIRONMENT)
    engine = module.make_engine(CONFIGS[name](folder))
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=[name for name in known_engines() if name != "vllm"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with made(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


def finish(engine: Engine, num_steps: int = 10_000) -> list[SampledGroup]:
    groups: list[SampledGroup] = []
    for _ in range(num_steps):
        if engine.num_sampling == 0:
            return groups
        groups += engine.step()
    raise AssertionError(f"{engine.num_sampling} groups did not finish in {num_steps} steps")


def test_every_submitted_group_finishes_once_with_columns_that_fit_together(engine: Engine) -> None:
    for i in range(5):
        engine.submit(make_request(prompt_id=f"p{i}", group_size=4))
    assert engine.num_sampling == 5
    groups = finish(engine)
    assert sorted(group.request_id for group in groups) == [f"g-p{i}" for i in range(5)]
    for group in groups:
        assert len(group.lengths) == len(group.truncated) == len(group.texts) == len(group.versions) == 4
        assert group.lengths.sum() == len(group.token_ids) == len(group.logprobs)
        assert 1 <= group.lengths.min() <= group.lengths.max() <= MAX_TOKENS
        assert len(group.prompt_token_ids) >= 1


def test_columns_have_the_types_that_travel(engine: Engine) -> None:
    engine.submit(make_request(group_size=2))
    group = finish(engine)[0]
    for column in (group.prompt_token_ids, group.token_ids, group.lengths, group.versions):
        assert column.dtype == np.int32
    assert group.logprobs.dtype == np.float32
    assert group.truncated.dtype == np.bool_


def test_log_probs_are_finite_and_not_positive(engine: Engine) -> None:
    engine.submit(make_request(group_size=8))
    logprobs = finish(engine)[0].logprobs
    assert np.isfinite(logprobs).all()
    assert logprobs.max() <= 0.0


def test_only_a_response_of_full_length_is_truncated(engine: Engine) -> None:
    for i in range(8):
        engine.submit(make_request(prompt_id=f"p{i}", group_size=8))
    for group in finish(engine):
        assert (group.lengths[group.truncated] == MAX_TOKENS).all()


def test_an_evaluation_may_have_a_temperature_and_a_length_of_its_own(engine: Engine) -> None:
    request = replace(make_request(group_size=8), temperature=0.01, top_p=0.5, max_response_tokens=3)
    engine.submit(request, request.max_response_tokens)
    assert finish(engine)[0].lengths.max() <= 3


def test_responses_carry_the_version_that_sampled_them(engine: Engine) -> None:
    engine.submit(make_request(group_size=2))
    group = finish(engine)[0]
    assert group.versions.tolist() == [[engine.policy_version] * 2] * 2


def test_a_response_that_stopped_at_a_budget_goes_on_for_as_many_tokens_as_are_asked_for(engine: Engine) -> None:
    request = make_request(group_size=8)
    engine.submit(request, most=3)
    first = finish(engine)[0]
    assert first.lengths.max() <= 3
    assert (first.lengths[first.truncated] == 3).all()
    ends = np.cumsum(first.lengths)
    open_rows = np.flatnonzero(first.truncated).tolist()
    assert open_rows, "with three tokens of 24 some response is not done"
    for row in open_rows:
        tokens = first.token_ids[ends[row] - 3 : ends[row]]
        engine.resume(
            Continuation(
                part_id=f"part#{row}", request=request, row=row, prompt_token_ids=first.prompt_token_ids,
                token_ids=tokens, most=5,
            )
        )  # fmt: skip
    parts = finish(engine)
    assert sorted(part.request_id for part in parts) == sorted(f"part#{row}" for row in open_rows)
    for part in parts:
        assert len(part.lengths) == len(part.texts) == 1
        assert 1 <= part.lengths[0] == len(part.token_ids) == len(part.logprobs) <= 5
        assert not part.truncated[0] or part.lengths[0] == 5 or part.lengths[0] == MAX_TOKENS - 3
        np.testing.assert_array_equal(part.prompt_token_ids, first.prompt_token_ids)


def test_an_aborted_group_never_comes_and_the_others_do(engine: Engine) -> None:
    engine.submit(make_request(prompt_id="a"))
    engine.submit(make_request(prompt_id="b"))
    engine.abort("g-a")
    engine.abort("never-submitted")
    assert [group.request_id for group in finish(engine)] == ["g-b"]


def test_an_engine_says_how_many_responses_it_has_and_how_full_its_cache_is(engine: Engine) -> None:
    for prompt_id in ("a", "b"):
        engine.submit(make_request(prompt_id=prompt_id, group_size=4))
    assert engine.occupancy.running + engine.occupancy.waiting == 8
    if isinstance(engine, ScriptedEngine):
        assert (engine.occupancy.running, math.isnan(engine.occupancy.kv_cache_usage)) == (8, True)
    else:
        assert engine.occupancy.kv_cache_usage == 0
        assert engine.step() == []
        assert engine.occupancy.running == 8, "both prompts fit into the first batch"
        assert 0 < engine.occupancy.kv_cache_usage < 1
    finish(engine)
    assert (engine.occupancy.running, engine.occupancy.waiting) == (0, 0)
    assert not engine.occupancy.kv_cache_usage > 0


def test_the_same_id_may_come_again_after_an_abort(engine: Engine) -> None:
    engine.submit(make_request(prompt_id="a"))
    engine.abort("g-a")
    engine.submit(make_request(prompt_id="a"))
    assert [group.request_id for group in finish(engine)] == ["g-a"]


def test_measured_log_probs_have_one_value_per_token_but_the_first(engine: Engine) -> None:
    measured = engine.logprobs([5, 6, 7, 8])
    assert measured is None or measured.shape == (3,)


def test_measuring_does_not_disturb_groups_in_flight(engine: Engine) -> None:
    engine.submit(make_request(group_size=4))
    engine.logprobs([5, 6, 7, 8])
    assert [group.request_id for group in finish(engine)] == ["g-p"]


def prompt_of(text: str) -> Prompt:
    return Prompt(prompt_id="p", text=text, task="t", answer={})


def test_prompts_that_survive_the_tokenizer_are_accepted(engine: Engine) -> None:
    engine.check_prompts([prompt_of("12,99,7->80:"), prompt_of("1,2,3->6:")], no_image)


def test_a_prompt_without_its_own_tokens_or_too_long_is_refused_by_engines_with_a_tokenizer(engine: Engine) -> None:
    if engine.logprobs([5, 6]) is None:
        pytest.skip("this engine has no tokenizer")
    with pytest.raises(ConfigError, match=r"changes the prompt 'abc'"):
        engine.check_prompts([prompt_of("abc")], no_image)
    with pytest.raises(ConfigError, match=r"max_prompt_tokens=32"):
        engine.check_prompts([prompt_of(",".join(["1"] * 40))], no_image)


def test_a_request_whose_prompt_has_no_tokens_fails_alone(engine: Engine) -> None:
    if engine.logprobs([5, 6]) is None:
        pytest.skip("this engine has no tokenizer")
    with pytest.raises(ContractError, match="no tokens"):
        engine.submit(replace(make_request(), prompt=Prompt(prompt_id="empty", text="", task="countdown", answer={})))
    assert engine.num_sampling == 0


def test_a_file_that_is_no_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'vllm'.*scripted, scripted_actor, vllm"):
        engine_module("vlm")
    with pytest.raises(ConfigError, match="there is no engine 'base'"):
        engine_module("base")


def test_a_request_with_a_prompt_that_is_too_long_raises_contract_error(engine: Engine) -> None:
    if engine.logprobs([5, 6]) is None:
        pytest.skip("this engine has no tokenizer")
    request = make_request()
    long = type(request.prompt)(prompt_id="long", text=",".join(["1"] * 40), task="countdown", answer={})
    with pytest.raises(ContractError, match="79 tokens"):
        engine.submit(
            type(request)(request_id="g", prompt=long, group_size=2, purpose=request.purpose, step=1, min_version=1)
        )
    assert engine.num_sampling == 0
