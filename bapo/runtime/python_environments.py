"""Pythons for environments of agents whose packages contradict ours (`bapo env install`).

They are in `~/.cache/bapo/envs` (or BAPO_ENVS), one folder a package, and are shared by all runs.
"""

from __future__ import annotations

import os
import subprocess
import venv
from collections.abc import Mapping
from pathlib import Path

from bapo.core.errors import ConfigError, UnavailableError, did_you_mean

PINNED: Mapping[str, str] = {
    "openenv": "openenv==0.10.0",
    "skyrl_gym": "skyrl-gym==0.4.0",
    "verifiers": "verifiers==0.4.0",
}
"""Versions with which services/agents/standalone.py is tested."""
FOLDER = "BAPO_ENVS"
DONE = ".installed"
"""Written last: a folder without it is of an installation that was cut off."""
SHOWN = 2000
"""Characters of pip's output in a message."""


def python_of(name: str) -> Path:
    """The interpreter for a package, which may not be there yet."""
    folder = os.environ.get(FOLDER) or Path.home() / ".cache" / "bapo" / "envs"
    return Path(folder) / name / "bin" / "python"


def is_installed(name: str) -> bool:
    """Whether its interpreter can be used."""
    return (python_of(name).parents[1] / DONE).exists()


def install(name: str) -> Path:
    """Make the interpreter with the pinned package, unless it is there. Raises: ConfigError; UnavailableError."""
    if name not in PINNED:
        raise ConfigError(f"{name!r} is unknown{did_you_mean(name, PINNED)}; use one of {', '.join(PINNED)}")
    python = python_of(name)
    if not is_installed(name):
        folder = python.parents[1]
        venv.create(folder, with_pip=True, clear=True)
        done = subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", PINNED[name]], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise UnavailableError(f"installing {PINNED[name]} into {folder} failed: {done.stderr.strip()[-SHOWN:]}")
        (folder / DONE).write_text(f"{PINNED[name]}\n")
    return python
