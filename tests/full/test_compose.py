"""docker-compose.yml gives each service its own secrets and nothing else, and no service more than it needs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from bapo.config.load import load_config
from bapo.runtime.auth.api_tokens import Role
from bapo.runtime.rank_environment import Nodes, nodes_of

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "docker-compose.yml").read_text()
COMPOSE = yaml.safe_load(TEXT)


SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


EXAMPLE = (REPOSITORY / ".env.example").read_text()
DOCKERFILES = sorted((REPOSITORY / "deploy" / "docker").glob("*.Dockerfile"))
SECRET = {role.value for role in Role} | {"redis-password"}
OWN = {
    "buffer": {"redis-password"},
    "rollout": {"worker"},
    "rollout-gpu": {"worker"},
    "learner": {"learner"},
    "learner-gpu": {"learner"},
    "scheduler": {"scheduler"},
    "evaluator": {"evaluator"},
    "agents": {"agent"},
    "dashboard": {"viewer"},
    "create": set(),
    "check": set(),
    "check-gpu": set(),
    "redis": set(),
    "secrets": SECRET,
    "prometheus": {"viewer"},
    "grafana": set(),
}


def mounted(service: str) -> dict[str, str]:
    """Volume -> where and how, of the short form."""
    entries = [entry for entry in SERVICES[service]["volumes"] if isinstance(entry, str)]
    return dict(split_mount(entry) for entry in entries)


def split_mount(entry: str) -> tuple[str, str]:
    """`${NAME:-./x}:/there:ro` -> (`${NAME:-./x}`, `/there:ro`)."""
    found = re.fullmatch(r"(\$\{[^}]*\}|[^:]+):(.+)", entry)
    assert found, entry
    return found[1], found[2]


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_a_service_is_given_its_own_secrets_alone(service: str) -> None:
    volumes = mounted(service)
    assert volumes.keys() & SECRET == OWN[service]
    if service != "secrets":
        assert all(volumes[name].endswith(":ro") for name in volumes.keys() & SECRET)
    own = SERVICES[service].get("environment", {}).get("BAPO_TOKEN_FILE")
    roles = OWN[service] & {role.value for role in Role}
    expected = None if service in ("secrets", "prometheus") or not roles else f"/bapo/secrets/{roles.pop()}/token"
    assert own == expected


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_a_service_has_a_read_only_root_and_no_rights_to_gain(service: str) -> None:
    found = SERVICES[service]
    assert (found["read_only"], found["cap_drop"], found["security_opt"]) == (True, ["ALL"], ["no-new-privileges:true"])
    assert found["user"] == "10001:10001"
    assert not found.keys() & {"cap_add", "privileged", "pid", "ipc"}
    assert "docker.sock" not in str(found)


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_images_are_pinned_and_ports_are_of_the_loopback(service: str) -> None:
    found = SERVICES[service]
    assert not found["image"].endswith(":latest")
    assert re.search(r":v?\d+\.\d+\.\d+|:\$\{BAPO_VERSION:-\d+\.\d+\.\d+\}", found["image"]), found["image"]
    assert all(port.startswith("127.0.0.1:") for port in found.get("ports", []))
    assert "container_name" not in found, "a named container cannot be scaled"


def test_the_buffer_waits_for_a_redis_that_reads_its_file_while_it_is_starting() -> None:
    """A container that ends makes `docker compose up` give up what depends on it."""
    buffer = SERVICES["buffer"]
    (waits,) = (float(arg.partition("=")[2]) for arg in buffer["command"] if arg.startswith("--redis-timeout-s="))
    start = float(buffer["healthcheck"]["start_period"].removesuffix("s"))
    assert start / 2 < waits < start


def test_gpu_services_have_compilers_a_probe_a_compile_cache_and_pinned_memory() -> None:
    rollout, learner = SERVICES["rollout-gpu"], SERVICES["learner-gpu"]
    assert {"gcc", "g++", "wget"} <= set(rollout["build"]["args"]["PACKAGES"].split())
    assert mounted("rollout-gpu")["compiled"] == "/bapo/cache" == rollout["environment"]["VLLM_CACHE_ROOT"]
    assert rollout["ulimits"] == learner["ulimits"] == {"memlock": -1}


def test_only_what_writes_or_reads_frames_reaches_redis() -> None:
    assert SERVICES["redis"]["networks"] == ["store"]
    assert [name for name, found in SERVICES.items() if "store" in found.get("networks", [])] == [
        "redis",
        "buffer",
        "rollout",
        "learner",
        "rollout-gpu",
        "learner-gpu",
    ]
    assert "ports" not in SERVICES["redis"]


def test_every_variable_is_explained_and_every_explained_variable_is_used() -> None:
    used = set(re.findall(r"\$\{(\w+)", TEXT)) - {"COMPOSE_PROJECT_NAME", "BAPO_VERSION"}
    assert set(re.findall(r"^#?([A-Z][A-Z_]+)=", EXAMPLE, re.MULTILINE)) == used


@pytest.mark.parametrize("name", ["scripted", "vllm"])
def test_the_configurations_of_the_check_can_be_loaded(name: str) -> None:
    config = load_config([str(REPOSITORY / "tests/full/compose/configs" / f"{name}.toml")], [])
    assert config.rollout.engine == name


def test_images_run_as_a_user_without_rights() -> None:
    assert len(DOCKERFILES) == 3
    for path in DOCKERFILES:
        assert "\nUSER 10001:10001\n" in path.read_text(), path.name
        assert "# syntax=" not in path.read_text(), "that line needs a registry"


def needs(*command: str) -> None:
    """Skip, with the reason, where a command does not work."""
    found = shutil.which(command[0]) and subprocess.run(command, capture_output=True, check=False).returncode == 0
    if not found:
        pytest.skip(f"`{' '.join(command)}` does not work here")


@pytest.mark.parametrize("profiles", ["cpu", "gpu", "cpu,monitoring"])
def test_compose_takes_the_file(profiles: str) -> None:
    needs("docker", "compose", "version")
    command = ("docker", "compose", "--env-file", ".env.example", "config", "--quiet")
    env = os.environ | {"COMPOSE_PROFILES": profiles}
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_learner_on_several_hosts_is_in_the_network_of_its_host_and_calls_published_ports() -> None:
    needs("docker", "compose", "version")
    files = ("-f", "docker-compose.yml", "-f", "deploy/examples/docker-compose.hosts.yml")
    command = ("docker", "compose", "--env-file", ".env.example", *files, "config", "--format", "json")
    own = {"BAPO_NODES": "2", "BAPO_NODE_RANK": "1", "BAPO_MASTER_ADDR": "10.0.0.1", "BAPO_OUTPUTS": "/shared"}
    env = os.environ | own | {"COMPOSE_PROFILES": "gpu"}
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    learner = found["services"]["learner-gpu"]
    assert learner["network_mode"] == "host"
    assert not learner.get("networks")
    assert nodes_of(learner["environment"]) == Nodes(number=2, rank=1, address="10.0.0.1")
    urls = re.findall(r"http://127\.0\.0\.1:(\d+)", " ".join(learner["command"]))
    ports = [port for service in ("buffer", "rollout-gpu") for port in found["services"][service]["ports"]]
    assert urls == [port["published"] for port in ports]
    assert found["volumes"]["outputs"]["driver_opts"]["device"] == "/shared"


def test_without_a_profile_compose_says_what_to_do() -> None:
    needs("docker", "compose", "version")
    env = {name: value for name, value in os.environ.items() if name != "COMPOSE_PROFILES"}
    command = ("docker", "compose", "--env-file", "/dev/null", "config", "--quiet")
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "cp .env.example .env" in done.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_have_no_lint(path: Path) -> None:
    needs("docker", "buildx", "ls")
    needs("docker", "version")
    wheels = f"wheels={REPOSITORY / 'deploy' / 'docker' / 'wheels'}"
    command = ("docker", "buildx", "build", "--check", "--build-context", wheels, "--file", str(path), str(REPOSITORY))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
