"""The commit of the running code, for run.json, `bapo_build_info` and every process of a run.

BAPO_COMMIT        set in images, or by the launcher
git                commit of the checkout with this package, with "-dirty" if tracked files were changed
None               an installed package, of which only the version is known
"""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

VARIABLE = "BAPO_COMMIT"
UNKNOWN = "unknown"
DIRTY = "-dirty"
"""git's suffix for a work tree with changes."""
PATIENCE_S = 10.0
"""Timeout of git on a busy machine."""


def commit() -> str | None:
    """40 hexadecimal digits, with "-dirty" if applicable; or the value of BAPO_COMMIT; None: unknown."""
    given = os.environ.get(VARIABLE, "").strip()
    return (given if given != UNKNOWN else "") or checked_out(Path(__file__).resolve().parents[2])


@cache
def checked_out(folder: Path) -> str | None:
    """Commit of the checkout with this root; None if it is not a checkout, or git is missing or fails.

    A package installed inside another checkout is not part of it, so the root must be the folder itself. Untracked
    files do not make it dirty.
    """
    if _git(folder, "rev-parse", "--show-toplevel") != str(folder):
        return None
    return _git(folder, "describe", "--always", "--abbrev=40", "--exclude=*", f"--dirty={DIRTY}")


def short(commit: str) -> str:
    """Short form: 7 digits, and whether it is dirty. Other strings are unchanged."""
    digits, dirty = commit.removesuffix(DIRTY), commit.endswith(DIRTY)
    is_hash = len(digits) == 40 and set(digits) <= set("0123456789abcdef")
    return digits[:7] + DIRTY * dirty if is_hash else commit


def _git(folder: Path, *arguments: str) -> str | None:
    # Without optional locks: must not interfere with a concurrent `git add`.
    command = ("git", "--no-optional-locks", "-C", str(folder), *arguments)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
