"""The wheel installs with its light extras on every supported Python that this machine has, and its command works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import bapo

REPOSITORY = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
EXTRAS = "buffer,embedded,records,dashboard"
"""Without torch and vllm, whose builds depend on the machine."""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tracked files: setuptools leaves a build folder next to them."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    subprocess.run(["xargs", "-0", "cp", "--parents", "-t", folder], cwd=REPOSITORY, input=listed, check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", "."]
    subprocess.run(command, cwd=folder, check=True)
    (built,) = (folder / "dist").glob("bapo-*.whl")
    return built


def interpreter(version: str) -> str | None:
    """A Python of this version that starts. Shims of pyenv exist for versions that are not selected."""
    for path in (f"python{version}", *map(str, sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")))):
        try:
            found = subprocess.run([path, "-c", "import sys; print(sys.version)"], capture_output=True, text=True)
        except FileNotFoundError:
            continue
        if found.returncode == 0 and found.stdout.startswith(version):
            return path
    return None


@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_installs_and_reads_its_presets(version: str, wheel: Path, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version}")
    subprocess.run([python, "-m", "venv", tmp_path / "env"], check=True)
    run = tmp_path / "env" / "bin"
    subprocess.run([run / "pip", "install", "--quiet", f"{wheel}[{EXTRAS}]"], check=True)

    def said(*arguments: str) -> str:
        done = subprocess.run([run / "bapo", *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert said("--version").split() == ["bapo", bapo.__version__]
    assert "batch_size = 256" in said("config", "show", "bapo")
    needed = (
        "import buffer_service.http.app, services.dashboard.app, studies.compare.figures\n"
        "from bapo.tasks.registry import load_task\n"
        "print([len(load_task(name, {}).prompts('train')) for name in ('countdown', 'chain', 'geometry')])"
    )
    subprocess.run([run / "python", "-c", needed], cwd=tmp_path, check=True)
