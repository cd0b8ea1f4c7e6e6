"""docker-compose.yml runs the configuration that it is given, and the override in deploy/examples fits it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from bapo.cli.arguments import split_tokens
from bapo.config.load import diff, load_config
from bapo.config.tree import Config
from bapo.core.user_code import load_function
from bapo.runtime.auth.api_tokens import Role
from bapo.tasks.base import TRAIN
from bapo.tasks.registry import task_of

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "deploy/examples"
COMPOSE = ROOT / "docker-compose.yml"


def test_the_override_repeats_the_command_of_create_with_its_settings_over_the_configuration() -> None:
    override = yaml.safe_load((EXAMPLE / "docker-compose.override.yml").read_text())["services"]
    assert override.keys() <= yaml.safe_load(COMPOSE.read_text())["services"].keys()
    gpu = "deploy/configs/gpu.toml"
    for variables in ({}, {"BAPO_CONFIG": gpu, "BAPO_RUN": "mine", "BAPO_STEPS": "7", "BAPO_WORKERS": "3"}):
        command = create_arguments(COMPOSE, variables)
        after = command.index(variables.get("BAPO_CONFIG", "deploy/configs/demo.toml")) + 1
        expected = [*command[:after], "run.toml", *command[after:]]
        assert create_arguments(EXAMPLE / "docker-compose.override.yml", variables) == expected


@pytest.mark.parametrize("config", ["demo", "gpu", "math-1.5b"])  # 120 steps and 1 worker, 471 and 1, 471 and 4
def test_compose_runs_the_steps_and_workers_of_its_configuration(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file = f"deploy/configs/{config}.toml"
    example = dict(re.findall(r"^([A-Z_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
    for variables in (example, {}, {"BAPO_STEPS": "", "BAPO_WORKERS": ""}):
        changed = diff(load_config([file], []), created(variables | {"BAPO_CONFIG": file}))
        assert {line.partition(":")[0] for line in changed} <= {"run.name", "run.root", "buffer.url"}


def test_compose_takes_steps_and_workers_from_variables_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = created({"BAPO_CONFIG": "deploy/configs/gpu.toml", "BAPO_STEPS": "7", "BAPO_WORKERS": "3"})
    assert (config.run.num_steps, config.rollout.num_workers) == (7, 3)


def created(variables: Mapping[str, str]) -> Config:
    """The configuration that the service `create` resolves."""
    return load_config(*split_tokens(create_arguments(COMPOSE, variables)))


def create_arguments(file: Path, variables: Mapping[str, str]) -> list[str]:
    """Arguments of `bapo create` in the service `create`, with Compose's substitution, innermost variables first."""

    def value(match: re.Match[str]) -> str:
        name, how, other = match.groups()
        found = variables.get(name)
        if how == ":+":
            return other if found else ""
        is_absent = found is None if how == "-" else not found
        return other if is_absent else str(found)

    command = yaml.safe_load(file.read_text())["services"]["create"]["command"]
    while "${" in command:
        command = re.sub(r"\$\{(\w+)(:?[-+])([^${}]*)\}", value, command)
    module, verb, *arguments = shlex.split(command)
    assert (module, verb) == ("bapo.cli", "create")
    return arguments


def test_the_log_of_the_dashboard_and_its_page_give_one_command_for_the_token() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    (announced,) = [part for part in services["dashboard"]["command"] if part.startswith("--announce=")]
    command = announced.partition("token: ")[2]
    assert command.startswith("docker compose ")
    assert f'"{command}"' in (ROOT / "services/dashboard/static/app/main.js").read_text()
    assert command.replace("operator", "viewer") in (ROOT / "docs/cluster.md").read_text()


def test_the_token_of_every_role_has_a_volume_a_folder_of_the_image_and_a_secret_of_kubernetes() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    image = (ROOT / "deploy/docker/buffer.Dockerfile").read_text()
    (folders,) = [line.split() for line in image.splitlines() if " accepted worker " in line]
    (secrets,) = [
        line.split() for line in (ROOT / "deploy/k8s/secrets.sh").read_text().splitlines() if "for role in" in line
    ]
    for role in Role:
        assert f"{role}:/bapo/secrets/{role}" in services["secrets"]["volumes"]
        assert role in folders
        assert role == "operator" or role.value in [word.rstrip(";") for word in secrets]


def test_its_settings_name_its_reward_which_grades_the_demos_answers() -> None:
    config = load_config([ROOT / "deploy/configs/demo.toml", EXAMPLE / "run.toml"], [])
    assert config.task.reward == "/bapo/my_rewards.py:short_and_correct"
    score = load_function(f"{EXAMPLE}/my_rewards.py:short_and_correct", key="task.reward")
    task = task_of(load_config([ROOT / "deploy/configs/demo.toml"], []))
    prompt = task.prompts(TRAIN)[0]
    gold, wrong = task.gold(prompt), "<answer>no</answer>"
    assert [score(prompt, text) for text in (gold, gold.rjust(80), gold.rjust(81), wrong)] == [1.0, 1.0, 0.5, 0.0]
