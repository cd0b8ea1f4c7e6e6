"""Remove a checkpoint of RUN/checkpoints, but no model that was exported from it: `bapo export` said where it is.

What stays has no state.json, so it is not a checkpoint.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

EXPORTS = ("hf", "adapter")
"""Folders of a checkpoint in the formats of others (learner/export.py)."""
FIRST = "state.json"


def remove_checkpoint(folder: Path) -> None:
    """Such that a kill leaves nothing that looks complete, and the rest in a folder that a resume deletes
    (`RunDirectory.truncate_after`)."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with suppress(OSError):
        if any((folder / name).is_dir() for name in EXPORTS):
            partial.mkdir()
            for entry in sorted(folder.iterdir(), key=lambda entry: entry.name != FIRST):
                if entry.name not in EXPORTS:
                    os.replace(entry, partial / entry.name)
        else:
            os.replace(folder, partial)
    shutil.rmtree(partial, ignore_errors=True)
