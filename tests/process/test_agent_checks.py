"""What a start says of agents, before anything is started."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bapo.config.tree import Config
from services.launcher.doctor.agent_checks import agents
from services.launcher.doctor.checks import Check

ROOT = Path(__file__).resolve().parents[2]
OWN = """
async def one(client): return 1.0
class Unfinished:
    def reset(self, prompt): return None
SCHEMAS = [{"type": "function", "function": {"name": "get"}}]
"""


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
        ("own.py:one", "is called with two arguments"),
        ("env:own.py:Unfinished", "has no method step"),
        ("tools:own.py:SCHEMAS", "must be a list of functions"),
        ("verifiers:my_tasks", "bapo env install verifiers"),
    ],
)
def test_a_rollout_that_cannot_run_is_refused(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("BAPO_ENVS", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    check, *_ = found(ROOT / "models/lookup-tiny", rollout=name)
    assert check.status == "fail"
    assert message in check.detail


def test_the_environment_of_a_package_is_loaded_by_its_own_python(tmp_path: Path) -> None:
    (tmp_path / "skyrl_gym.py").write_text("def register(**_): raise ValueError('no such environment')")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    check, *_ = found(rollout="skyrl_gym:my_env", python=str(python))
    assert check.status == "ok"
    check, *_ = found(rollout="skyrl_gym:my:env", python=str(python))
    assert check.status == "fail"
    assert "ValueError: no such environment" in check.detail


def test_a_parser_that_vllm_does_not_have_is_refused() -> None:
    assert [check.status for check in found(tool_call_parser=None)] == ["ok"]
    _, check = found(tool_call_parser="herms")
    assert check.status == "fail"
    assert "did you mean 'hermes'" in check.detail
    _, check = found(reasoning_parser="deepseek-r1")
    assert "it has " in check.detail
    for name in ("deepseek_v3", "qwen3_xml", "llama3_json"):
        assert [check.status for check in found(tool_call_parser=name)] == ["ok"]
    assert [check.status for check in found(reasoning_parser="deepseek_r1")] == ["ok"]


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
