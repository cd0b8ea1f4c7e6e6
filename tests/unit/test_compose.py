"""docker-compose.yml gives each service its own secrets and nothing else, and no service more than it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from bapo.tokens import Role

COMPOSE = yaml.safe_load((Path(__file__).parents[2] / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SECRET = {role.value for role in Role} | {"redis-password"}
OWN = {
    "buffer": {"redis-password"},
    "rollout": {"worker"},
    "learner": {"learner"},
    "scheduler": {"scheduler"},
    "evaluator": {"evaluator"},
    "create": set(),
    "redis": set(),
    "secrets": SECRET,
}


def mounted(service: str) -> dict[str, str]:
    """Volume -> where and how."""
    return dict(entry.split(":", 1) for entry in SERVICES[service]["volumes"])


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_a_service_is_given_its_own_secrets_alone(service: str) -> None:
    volumes = mounted(service)
    assert volumes.keys() & SECRET == OWN[service]
    if service != "secrets":
        assert all(volumes[name].endswith(":ro") for name in volumes.keys() & SECRET)
    own = SERVICES[service].get("environment", {}).get("BAPO_TOKEN_FILE")
    roles = OWN[service] & {role.value for role in Role}
    assert own == (None if service == "secrets" or not roles else f"/bapo/secrets/{roles.pop()}/token")


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_a_service_has_a_read_only_root_and_no_rights_to_gain(service: str) -> None:
    found = SERVICES[service]
    assert (found["read_only"], found["cap_drop"], found["security_opt"]) == (True, ["ALL"], ["no-new-privileges:true"])


def test_only_the_buffer_service_reaches_redis() -> None:
    assert SERVICES["redis"]["networks"] == ["store"]
    assert [name for name, found in SERVICES.items() if "store" in found.get("networks", [])] == ["redis", "buffer"]
    assert "ports" not in SERVICES["redis"]


def test_images_run_as_a_user_without_rights() -> None:
    for path in (Path(__file__).parents[2] / "deploy" / "docker").glob("*.Dockerfile"):
        assert "\nUSER 10001:10001\n" in path.read_text(), path.name
