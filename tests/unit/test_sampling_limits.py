"""Which sampling values an engine samples with as they are written; the pinned vLLM itself: tests/full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.runtime.sampling_limits import sampling_problems
from rollout_server.engines.vllm import check
from services.launcher.doctor.check_list import preflight
from services.launcher.doctor.situation import Situation
from tests.support.launcher_config import make_config


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"rollout": {"temperature": 2.6}}, "rollout.temperature = 2.6"),
        ({"rollout": {"temperature": 2.0001}}, "rollout.temperature = 2.0001"),
        ({"rollout": {"temperature": 0.005}}, "rollout.temperature = 0.005"),
        ({"rollout": {"temperature": 0.0099}}, "rollout.temperature = 0.0099"),
        ({"evaluation": {"temperatures": [0.3, 2.5]}}, "evaluation.temperatures[1] = 2.5"),
        ({"evaluation": {"temperatures": [0.001]}}, "evaluation.temperatures[0] = 0.001"),
        ({"evaluation": {"splits": {"aime": {"temperature": 3.0}}}}, "evaluation.splits.aime.temperature = 3"),
        ({"rollout": {"engine_options": {"max_model_len": 100}}}, "rollout.engine_options.max_model_len = 100"),
        ({"rollout": {"engine_options": {"logprobs_mode": "raw_logprobs"}}}, "rollout.engine_options.logprobs_mode"),
    ],
)
def test_a_value_that_vllm_refuses_or_replaces_is_a_problem_with_its_key(sections: dict[str, Any], key: str) -> None:
    (problem,) = sampling_problems(Config.model_validate(sections))
    assert problem.startswith(key)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"rollout": {"temperature": 0.01}, "evaluation": {"temperatures": [0.01, 2.0]}},
        {"rollout": {"temperature": 2.0, "engine_options": {"max_model_len": 128}}},
        {"evaluation": {"temperatures": [], "splits": {"aime": {"top_p": 0.95}}}},
        {"rollout": {"engine": "scripted", "temperature": 2.6}},
    ],
)
def test_a_value_that_the_engine_samples_with_is_none(sections: dict[str, Any]) -> None:
    assert list(sampling_problems(Config.model_validate(sections))) == []


def test_every_bad_value_is_named_at_once() -> None:
    bad = {"rollout": {"temperature": 2.6}, "evaluation": {"temperatures": [0.005, 2.5]}}
    assert len(list(sampling_problems(Config.model_validate(bad)))) == 3


def test_a_run_with_such_a_value_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.temperature"):
        preflight(Situation(config=make_config(tmp_path, rollout={"port": 0, "temperature": 2.6})))


def test_a_rollout_server_that_is_started_alone_refuses_it_too(tmp_path: Path) -> None:
    config = make_config(tmp_path, evaluation={"port": 0, "temperatures": [2.5]})
    (Path(config.model.path) / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"evaluation\.temperatures\[0\] = 2\.5"):
        check(config)
