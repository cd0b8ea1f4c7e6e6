"""docker-compose.yml gives each service its own secrets and nothing else, and no service more than it needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from bapo.config.load import load_config
from bapo.tokens import Role

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
    "dashboard": {"viewer"},
    "create": set(),
    "redis": set(),
    "secrets": SECRET,
    "prometheus": {"viewer"},
    "grafana": set(),
}
ONCE = {"secrets", "create"}
UNTIL_THE_END = {"learner", "learner-gpu", "scheduler", "evaluator"}
EVERYWHERE = {"redis", "buffer", "scheduler", "evaluator", "dashboard", *ONCE}


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
def test_a_service_is_limited_and_ends_in_its_own_time(service: str) -> None:
    found = SERVICES[service]
    assert found["mem_limit"]
    assert found["cpus"]
    assert found["logging"]["options"].keys() == {"max-size", "max-file"}
    if service not in ONCE:
        assert found["healthcheck"]["test"][0] == "CMD"
        assert found["pids_limit"]
        assert found["restart"] == ("on-failure" if service in UNTIL_THE_END else "unless-stopped")
    else:
        assert "restart" not in found


@pytest.mark.parametrize("service", sorted(SERVICES.keys() - ONCE))
def test_only_what_samples_or_trains_may_take_all_cpus(service: str) -> None:
    name = service.removesuffix("-gpu").upper()
    bound = re.fullmatch(rf"\$\{{BAPO_{name}_CPUS:-(\d)\}}", str(SERVICES[service]["cpus"]))
    assert bound, "each has a variable of its own"
    # Docker refuses more than a host has, and the demo is for hosts of two.
    assert int(bound[1]) in ((0,) if name in ("ROLLOUT", "LEARNER") else (1, 2))


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_images_are_pinned_and_ports_are_of_the_loopback(service: str) -> None:
    found = SERVICES[service]
    assert not found["image"].endswith(":latest")
    assert re.search(r":v?\d+\.\d+\.\d+|:\$\{BAPO_VERSION:-\d+\.\d+\.\d+\}", found["image"]), found["image"]
    assert all(port.startswith("127.0.0.1:") for port in found.get("ports", []))
    assert "container_name" not in found, "a named container cannot be scaled"


@pytest.mark.parametrize("service", ["rollout", "rollout-gpu"])
def test_any_number_of_rollout_servers_may_run(service: str) -> None:
    assert "ports" not in SERVICES[service]
    assert "--one-of-several" in SERVICES[service]["command"]
    aliases = SERVICES[service].get("networks", {}).get("default", {}).get("aliases", [service])
    assert aliases == ["rollout"], "the learner and Prometheus find them under this name"


def test_the_buffer_waits_for_a_redis_that_reads_its_file_while_it_is_starting() -> None:
    """A container that ends makes `docker compose up` give up what depends on it."""
    buffer = SERVICES["buffer"]
    (waits,) = (float(arg.partition("=")[2]) for arg in buffer["command"] if arg.startswith("--redis-timeout-s="))
    start = float(buffer["healthcheck"]["start_period"].removesuffix("s"))
    assert start / 2 < waits < start


def test_only_the_buffer_service_reaches_redis() -> None:
    assert SERVICES["redis"]["networks"] == ["store"]
    assert [name for name, found in SERVICES.items() if "store" in found.get("networks", [])] == ["redis", "buffer"]
    assert "ports" not in SERVICES["redis"]


def test_grafana_reaches_prometheus_alone() -> None:
    assert SERVICES["grafana"]["networks"] == ["looking"]
    assert [name for name, found in SERVICES.items() if "looking" in found.get("networks", [])] == [
        "prometheus",
        "grafana",
    ]


@pytest.mark.parametrize(
    ("profile", "more"),
    [
        ("cpu", {"rollout", "learner"}),
        ("gpu", {"rollout-gpu", "learner-gpu"}),
        ("monitoring", {"prometheus", "grafana"}),
    ],
)
def test_a_profile_adds_what_it_says(profile: str, more: set[str]) -> None:
    assert {name for name, found in SERVICES.items() if found.get("profiles") == [profile]} == more
    assert {name for name, found in SERVICES.items() if "profiles" not in found} == EVERYWHERE


def test_profiles_can_be_added_to_a_run_that_goes_on() -> None:
    """A container whose definition has changed is made anew, so only one that runs once may name the profiles."""
    naming = {name for name, found in SERVICES.items() if "COMPOSE_PROFILES" in str(found)}
    assert naming
    assert naming <= ONCE


def test_an_image_is_built_by_one_service() -> None:
    """Several would build it several times, and `up` makes a container anew whose image has lost its name."""
    ours = {found["image"] for found in SERVICES.values() if "BAPO_VERSION" in found["image"]}
    built = [found["image"] for found in SERVICES.values() if "build" in found]
    assert sorted(built) == sorted(ours)
    for name, found in SERVICES.items():
        if found["image"] in ours and "build" not in found:
            assert found["pull_policy"] == "never", f"{name} would look for it in a registry"


def test_every_image_is_told_its_commit() -> None:
    for name, found in SERVICES.items():
        if "build" in found:
            assert found["build"]["args"]["COMMIT"] == "${BAPO_COMMIT:-unknown}", name
    for path in DOCKERFILES:
        last_stage = path.read_text().rsplit("\nFROM ", 1)[1]
        assert "\nARG COMMIT=unknown\nENV BAPO_COMMIT=${COMMIT}\n" in last_stage, path.name


@pytest.mark.parametrize(
    "page", [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_no_page_chooses_profiles_by_a_flag(page: Path) -> None:
    """`--profile monitoring` replaces what .env chooses, so the run would have no learner."""
    assert not re.search(r"docker compose .*--profile", page.read_text())


def test_the_stand_ins_take_the_place_of_the_images_that_are_pulled() -> None:
    found = yaml.safe_load((REPOSITORY / "tests" / "compose" / "standins" / "compose.yml").read_text())["services"]
    assert found.keys() == {name for name, service in SERVICES.items() if service.get("profiles") == ["monitoring"]}
    for service in found.values():
        assert service.keys() == {"image", "build"}, "everything else is what a user gets"
        assert (REPOSITORY / service["build"]["context"] / "Dockerfile").is_file()


def test_every_variable_is_explained_and_every_explained_variable_is_used() -> None:
    used = set(re.findall(r"\$\{(\w+)", TEXT)) - {"COMPOSE_PROJECT_NAME", "BAPO_VERSION"}
    assert set(re.findall(r"^#?([A-Z][A-Z_]+)=", EXAMPLE, re.MULTILINE)) == used


def test_the_example_names_the_defaults() -> None:
    defaults = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", TEXT))
    shown = dict(re.findall(r"^#?([A-Z][A-Z_]+)=(.*)$", EXAMPLE, re.MULTILINE))
    several = {"BAPO_ROLLOUT_MEMORY", "BAPO_LEARNER_MEMORY"}  # larger with GPUs
    assert {name: value for name, value in shown.items() if name in defaults and name not in several} == {
        name: value for name, value in defaults.items() if name in shown and name not in several
    }
    assert shown["COMPOSE_PROFILES"] == "cpu"


@pytest.mark.parametrize("name", ["scripted", "vllm"])
def test_the_configurations_of_the_check_can_be_loaded(name: str) -> None:
    config = load_config([str(REPOSITORY / "tests" / "compose" / "configs" / f"{name}.toml")], [])
    assert config.rollout.engine == name


def test_images_run_as_a_user_without_rights() -> None:
    assert len(DOCKERFILES) == 3
    for path in DOCKERFILES:
        assert "\nUSER 10001:10001\n" in path.read_text(), path.name
        assert "# syntax=" not in path.read_text(), "that line needs a registry"


def test_bytecode_is_in_the_images() -> None:
    """Roots are read-only: without it every process would compile all that it imports, every time."""
    for path in DOCKERFILES:
        assert "--no-compile" not in path.read_text()
        assert "PYTHONDONTWRITEBYTECODE" not in path.read_text()


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
