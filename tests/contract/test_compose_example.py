"""The override for Docker Compose in deploy/examples fits docker-compose.yml."""

from __future__ import annotations

from pathlib import Path

import yaml

from bapo.config.load import load_config
from bapo.core.user_code import load_function

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "deploy/examples"


def test_the_override_repeats_the_command_of_create_with_its_settings_over_the_demo() -> None:
    base = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    override = yaml.safe_load((EXAMPLE / "docker-compose.override.yml").read_text())["services"]
    assert override.keys() <= base.keys()
    command = ["deploy/configs/demo.toml" if "BAPO_CONFIG" in part else part for part in base["create"]["command"]]
    after = command.index("deploy/configs/demo.toml") + 1
    assert override["create"]["command"] == [*command[:after], "run.toml", *command[after:]]


def test_the_log_of_the_dashboard_and_its_page_give_one_command_for_the_token() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    (announced,) = [part for part in services["dashboard"]["command"] if part.startswith("--announce=")]
    command = announced.partition("token: ")[2]
    assert command.startswith("docker compose ")
    assert f'"{command}"' in (ROOT / "services/dashboard/static/app/main.js").read_text()
    assert command.replace("operator", "viewer") in (ROOT / "docs/cluster.md").read_text()


def test_its_settings_name_its_reward() -> None:
    config = load_config([ROOT / "deploy/configs/demo.toml", EXAMPLE / "run.toml"], [])
    assert config.task.reward == "/bapo/my_rewards.py:short_and_correct"
    load_function(f"{EXAMPLE}/my_rewards.py:short_and_correct", key="task.reward")
