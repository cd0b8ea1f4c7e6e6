"""Which code is at work: one string for run.json, for `bapo_build_info` and for every process of a run.

BAPO_COMMIT        what the environment says: of an image, or of the launcher that started this process
git                of the checkout that this package lies in: its commit, with "-dirty" when tracked files were changed
None               an installed package, whose version is all that is known
"""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

VARIABLE = "BAPO_COMMIT"
UNKNOWN = "unknown"
DIRTY = "-dirty"
"""What git itself puts after the commit of a work tree with changes."""
PATIENCE_S = 10.0
"""For git, on a machine that has no time."""


def commit() -> str | None:
    """40 hexadecimal digits of git, "-dirty" after them if so; or whatever BAPO_COMMIT says; None: not known."""
    given = os.environ.get(VARIABLE, "").strip()
    return (given if given != UNKNOWN else "") or checked_out(Path(__file__).resolve().parents[2])


@cache
def checked_out(folder: Path) -> str | None:
    """Commit of the checkout whose root is this folder; None when it is none, or git is not there or refuses.

    A package that is installed inside another checkout is not part of it, so the root must be the folder itself.
    Files that git does not track do not make it dirty.
    """
    if _git(folder, "rev-parse", "--show-toplevel") != str(folder):
        return None
    return _git(folder, "describe", "--always", "--abbrev=40", "--exclude=*", f"--dirty={DIRTY}")


def short(commit: str) -> str:
    """As people write it: 7 digits, and whether it was dirty. What is not a commit of git stays as it is."""
    digits, dirty = commit.removesuffix(DIRTY), commit.endswith(DIRTY)
    is_hash = len(digits) == 40 and set(digits) <= set("0123456789abcdef")
    return digits[:7] + DIRTY * dirty if is_hash else commit


def _git(folder: Path, *arguments: str) -> str | None:
    # Without optional locks: looking must not get in the way of a concurrent `git add`.
    command = ("git", "--no-optional-locks", "-C", str(folder), *arguments)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
