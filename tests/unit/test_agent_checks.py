"""What a start says of agents, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bapo.config.tree import Config
from bapo.core.plugins import module_names
from services.agents.rollouts import ADAPTERS, STANDALONE
from services.launcher.doctor.agent_checks import PREFIXES, agents
from services.launcher.doctor.checks import Check


def found(model: Path | str = "models/lookup-tiny", **settings: Any) -> list[Check]:
    return list(agents(Config.model_validate({"agents": settings, "model": {"path": str(model)}})))


def test_a_run_without_agents_is_not_checked() -> None:
    assert list(agents(Config())) == []


def test_the_shipped_agent_is_found() -> None:
    (check,) = found(rollout="contrib.lookup.agent:rollout")
    assert (check.status, check.detail) == ("ok", "episodes by contrib.lookup.agent:rollout")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("contrib.lookup.agent:rolout", "did you mean 'rollout'"),
        ("no_such_file.py:rollout", "no_such_file.py not found"),
        ("contrib.lookup.agent:run_tool", "is not an async function"),
        ("rollout", "must have the form"),
    ],
)
def test_a_rollout_that_cannot_run_is_refused(name: str, message: str) -> None:
    (check,) = found(rollout=name)
    assert check.status == "fail"
    assert message in check.detail


def test_prefixes_are_those_that_processes_of_agents_know() -> None:
    assert set(PREFIXES) == {*module_names(ADAPTERS), *STANDALONE}
    (check,) = found(rollout="verifiers:my_tasks")
    assert check.status == "ok"


def test_episodes_that_may_outlast_the_learner_are_warned_of() -> None:
    _, check = found(timeout_s=601)  # the learner waits 600 s
    assert check.status == "warn"
    assert "learner.batch_timeout_s = 600, after which" in check.detail


def test_a_model_without_a_chat_template_is_warned_of(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": ""}))
    _, check = found(tmp_path)
    assert check.status == "warn"
    assert "no chat template" in check.detail
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert [one.status for one in found(tmp_path)] == ["ok"]
