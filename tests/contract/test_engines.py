"""What every engine promises. The test finds the engines by itself; each is made by the small factory below.

Real vLLM takes most of a minute to start: `tests/full/test_vllm_contract.py` runs the same tests on it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config, ModelConfig
from bapo.core.errors import ConfigError, ContractError
from bapo.core.sequences import sequences_of
from bapo.core.types import Outcome, Prompt
from rollout_server.engines.base import engine_module, known_engines
from rollout_server.tokenization import no_image
from tests.support.engines import Driven
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
def made(name: str, folder: Path) -> Iterator[Driven]:
    """An engine of this name."""
    assert name in CONFIGS, f"rollout_server/engines/{name}.py is new: say here how tests make it"
    module = engine_module(name)
    os.environ.update(module.ENVIRONMENT)
    config = CONFIGS[name](folder)
    engine = module.make_engine(config)
    yield Driven(engine, module.make_tokenization(config), config)
    engine.close()


@pytest.fixture(scope="module", params=[name for name in known_engines() if name != "vllm"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driven]:
    with made(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


def test_every_call_finishes_once_with_columns_of_the_types_that_travel(engine: Driven) -> None:
    groups = engine.finish(make_request(prompt_id=f"p{i}", group_size=4) for i in range(5))
    assert sorted(group.group_id for group in groups) == [f"g-p{i}" for i in range(5)]
    for group in groups:
        assert len(group.lengths) == 4
        assert 1 <= group.lengths.min() <= group.lengths.max() <= MAX_TOKENS
        assert len(group.prompt_token_ids) >= 1
        assert {group.prompt_token_ids.dtype, group.token_ids.dtype, group.versions.dtype} == {np.dtype(np.int32)}
        assert group.rollout_logprobs.dtype == np.float32
        assert group.rollout_logprobs.max() <= 0.0
        assert group.versions.tolist() == [[engine.engine.policy_version] * 2] * 4


def test_only_a_response_of_full_length_is_truncated(engine: Driven) -> None:
    for group in engine.finish(make_request(prompt_id=f"p{i}", group_size=8) for i in range(8)):
        assert (group.lengths[group.outcomes == Outcome.TRUNCATED] == MAX_TOKENS).all()


def test_an_evaluation_may_have_a_temperature_and_a_length_of_its_own(engine: Driven) -> None:
    request = msgspec.structs.replace(make_request(group_size=8), temperature=0.01, top_p=0.5, max_response_tokens=3)
    assert engine.finish([request])[0].lengths.max() <= 3


def test_a_response_that_stopped_at_its_limit_goes_on_for_as_many_tokens_as_are_asked_for(engine: Driven) -> None:
    request = make_request(group_size=8)
    engine.submit(request, max_tokens=3)
    (first,) = engine.finish()
    responses = list(sequences_of(first))
    open_rows = [row for row, response in enumerate(responses) if response.truncated]
    assert open_rows, "with three tokens of 24 some response is not done"
    assert first.lengths.max() <= 3 == first.lengths[open_rows].min()
    for row in open_rows:
        so_far = [*first.prompt_token_ids.tolist(), *responses[row].token_ids.tolist()]
        engine.submit(request, call_id=f"part#{row}", token_ids=so_far, num=1, max_tokens=5)
    parts = engine.finish()
    assert sorted(part.group_id for part in parts) == sorted(f"part#{row}" for row in open_rows)
    for part in parts:
        (response,) = sequences_of(part)
        assert 1 <= len(response.token_ids) <= 5
        assert not response.truncated or len(response.token_ids) in (5, MAX_TOKENS - 3)
        np.testing.assert_array_equal(part.prompt_token_ids[: len(first.prompt_token_ids)], first.prompt_token_ids)


def test_an_aborted_call_never_comes_and_the_others_do(engine: Driven) -> None:
    engine.submit(make_request(prompt_id="a"))
    engine.submit(make_request(prompt_id="b"))
    for call_id in ("g-a", "never-submitted"):
        engine.engine.abort(call_id)
    del engine.open["g-a"]
    assert [group.group_id for group in engine.finish()] == ["g-b"]


def test_an_engine_says_how_many_responses_it_has_and_how_full_its_cache_is(engine: Driven) -> None:
    for prompt_id in ("a", "b"):
        engine.submit(make_request(prompt_id=prompt_id, group_size=4))
    found = engine.engine.occupancy
    assert found.running + found.waiting == 8
    if math.isnan(found.kv_cache_usage):
        assert found.running == 8
    else:
        assert found.kv_cache_usage == 0
        assert engine.step() == []
        assert engine.engine.occupancy.running == 8, "both prompts fit into the first batch"
        assert 0 < engine.engine.occupancy.kv_cache_usage < 1
    engine.finish()
    found = engine.engine.occupancy
    assert (found.running, found.waiting) == (0, 0)
    assert not found.kv_cache_usage > 0


def test_measuring_has_one_value_per_token_but_the_first_and_does_not_disturb_calls_in_flight(engine: Driven) -> None:
    engine.submit(make_request(group_size=4))
    measured = engine.engine.logprobs([5, 6, 7, 8])
    assert measured is None or measured.shape == (3,)
    assert [group.group_id for group in engine.finish()] == ["g-p"]


def prompt_of(text: str) -> Prompt:
    return Prompt(prompt_id="p", text=text, task="t", answer={})


@pytest.mark.parametrize(
    ("text", "at_start", "at_request"),
    [
        ("abc", r"changes the prompt 'abc'", None),
        (",".join(["1"] * 40), r"max_prompt_tokens=32", "79 tokens"),
        ("", "no tokens", "no tokens"),
    ],
)
def test_prompts_that_a_model_cannot_read_are_refused_at_the_start_and_one_by_one(
    engine: Driven, text: str, at_start: str, at_request: str | None
) -> None:
    engine.tokenization.check_prompts([prompt_of("12,99,7->80:"), prompt_of("1,2,3->6:")], no_image)
    if engine.engine.logprobs([5, 6]) is None:
        pytest.skip("this engine has no tokenizer")
    with pytest.raises(ConfigError, match=at_start):
        engine.tokenization.check_prompts([prompt_of(text)], no_image)
    if at_request:
        with pytest.raises(ContractError, match=at_request):
            engine.tokenization.encode_prompt(prompt_of(text))


def test_a_file_that_is_no_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'vllm'.*scripted, scripted_actor, vllm"):
        engine_module("vlm")
    with pytest.raises(ConfigError, match="there is no engine 'base'"):
        engine_module("base")
