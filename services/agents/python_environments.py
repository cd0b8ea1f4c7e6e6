"""Where the Pythons of foreign environments are, and what is installed there.

They are in `~/.cache/bapo/envs` (or BAPO_ENVS), one folder a package, and are shared by all runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PINNED: Mapping[str, tuple[str, ...]] = {
    "openenv": ("openenv==0.10.0",),
    "skyrl_gym": ("skyrl-gym==0.4.0",),
    "verifiers": ("verifiers==0.4.0",),
}
"""Versions with which `standalone.py` is tested."""
FOLDER = "BAPO_ENVS"


def python_of(kind: str) -> Path:
    """The interpreter for a package, which may not be there yet."""
    folder = os.environ.get(FOLDER) or Path.home() / ".cache" / "bapo" / "envs"
    return Path(folder) / kind / "bin" / "python"
