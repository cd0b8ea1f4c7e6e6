"""The override for Docker Compose in deploy/examples fits docker-compose.yml."""

from __future__ import annotations

from pathlib import Path

import yaml

from bapo.config.load import load_config
from bapo.core.user_code import load_function
from bapo.runtime.auth.api_tokens import Role

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


def test_the_token_of_every_role_has_a_volume_a_folder_of_the_image_and_a_secret_of_kubernetes() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    image = (ROOT / "deploy/docker/buffer.Dockerfile").read_text()
    (folders,) = [line.split() for line in image.splitlines() if " accepted worker " in line]
    (secrets,) = [
        line.split() for line in (ROOT / "deploy/k8s/secrets.sh").read_text().splitlines() if "for role in" in line
    ]
    for role in Role:
        assert f"{role}:/bapo/secrets/{role}" in services["secrets"]["volumes"]
        assert role in folders
        assert role == "operator" or role.value in [word.rstrip(";") for word in secrets]


def test_its_settings_name_its_reward() -> None:
    config = load_config([ROOT / "deploy/configs/demo.toml", EXAMPLE / "run.toml"], [])
    assert config.task.reward == "/bapo/my_rewards.py:short_and_correct"
    load_function(f"{EXAMPLE}/my_rewards.py:short_and_correct", key="task.reward")
