"""Images and the processes in them, as Dockerfiles, docker-compose.yml and the manifests in deploy/k8s say."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import yaml

ENTRYPOINT = ["python", "-m"]
DOCKERFILES = Path("deploy", "docker")


@dataclass(frozen=True, slots=True)
class Image:
    """What is built by one service of docker-compose.yml."""

    name: str
    requirements: tuple[str, ...]
    """Requirement files, below the repository."""
    sources: tuple[str, ...]
    """Files and folders of the repository that are copied into it or into what it is built from."""


@dataclass(frozen=True, slots=True, order=True)
class Process:
    """One program in a container."""

    image: str
    module: str
    """Of `python -m`, or that a command of a package (`ray`) is in."""
    where: str
    """File and service or container that start it."""


def images(repository: Path) -> dict[str, Image]:
    """Name -> image of every service with a `build`. Raises: ValueError if what pip is given cannot be read."""
    found = {}
    for service in _compose(repository).values():
        if "build" not in service:
            continue
        build, name = service["build"], _name(service["image"])
        text = (repository / build["dockerfile"]).read_text(encoding="utf-8")
        default = re.search(r'^ARG REQUIREMENTS="(.*)"$', text, re.MULTILINE)
        given = shlex.split(build.get("args", {}).get("REQUIREMENTS", default[1] if default else ""))
        if not given or given[::2] != ["-r"] * (len(given) // 2):
            raise ValueError(f"{build['dockerfile']}: requirements of {name} are no list of files: {given}")
        found[name] = Image(name=name, requirements=tuple(given[1::2]), sources=tuple(_copied(text)))
    return found


def processes(repository: Path) -> list[Process]:
    """Every process that one of our images can be asked to run."""
    known = images(repository)
    return sorted(each for each in {*_of_compose(repository), *_of_kubernetes(repository)} if each.image in known)


def _of_compose(repository: Path) -> Iterator[Process]:
    for name, service in _compose(repository).items():
        where, image = f"docker-compose.yml: {name}", _name(service["image"])
        if "build" in service:
            text = (repository / service["build"]["dockerfile"]).read_text(encoding="utf-8")
            default = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
            yield from _modules(image, [*ENTRYPOINT, *yaml.safe_load(default[-1])], f"CMD of {name}")
        if command := service.get("command"):
            words = shlex.split(command) if isinstance(command, str) else command
            yield from _modules(image, [*ENTRYPOINT, *words], where)


def _of_kubernetes(repository: Path) -> Iterator[Process]:
    for path in sorted((repository / "deploy" / "k8s").rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            for container in _containers(document):
                where = f"{path.relative_to(repository)}: {container['name']}"
                command = [*container.get("command", ENTRYPOINT), *container.get("args", [])]
                for image in _replaced(repository, _name(container["image"])):
                    yield from _modules(image, command, where)


def _containers(document: Any) -> Iterator[Mapping[str, Any]]:
    """Everything with a name and an image that runs, at any depth: pods, Jobs, groups of a RayCluster, patches."""
    if isinstance(document, dict):
        if {"name", "image"} <= document.keys() and document.keys() & {"args", "command"}:
            yield document
        document = list(document.values())
    if isinstance(document, list):
        for each in document:
            yield from _containers(each)


@cache
def _kustomizations(repository: Path) -> str:
    folder = repository / "deploy" / "k8s"
    return "".join(path.read_text(encoding="utf-8") for path in folder.rglob("kustomization.yaml"))


def _replaced(repository: Path, name: str) -> set[str]:
    """An image, and what overlays put in its place: bapo-rollout-gpu."""
    return {name, *re.findall(rf"name: {re.escape(name)}, newName: ([\w-]+)", _kustomizations(repository))}


def _modules(image: str, command: Sequence[str], where: str) -> Iterator[Process]:
    """Of a command, or of each in a line of the shell; what is no Python, and `python -c`, has none."""
    if command[:2] == ["sh", "-c"]:
        for line in re.split(r"[;\n]", command[2]):
            words = shlex.split(line)
            yield from _modules(image, words[words[:1] == ["exec"] :], where)
    elif command[:2] == ENTRYPOINT:
        yield Process(image=image, module=command[2], where=where)
    elif command and command[0] in _commands():
        yield Process(image=image, module=_commands()[command[0]], where=where)


@cache
def _commands() -> dict[str, str]:
    """Command -> its module, of every package that is installed here: ray, bapo."""
    return {each.name: each.module for each in entry_points(group="console_scripts")}


@cache
def _compose(repository: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((repository / "docker-compose.yml").read_text(encoding="utf-8"))
    return dict(found["services"])


def _copied(dockerfile: str) -> Iterator[str]:
    for words in re.findall(r"^COPY (?!--from)(.+)$", dockerfile, re.MULTILINE):
        yield from words.split()[:-1]


def _name(image: str) -> str:
    """bapo-buffer of bapo-buffer:${BAPO_VERSION:-0.1.0}."""
    return image.partition(":")[0].rpartition("/")[2]
