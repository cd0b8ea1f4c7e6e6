"""A file system of its own that is soon full: a tmpfs, where the machine lets us mount one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

SIZE_MB = 64
BLOCK = b"x" * (1 << 14)


@contextmanager
def mounted(folder: Path) -> Iterator[Path]:
    """The folder as a file system of SIZE_MB; skips the test where that is not allowed."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={SIZE_MB}m", "tmpfs", str(folder)]
    done = subprocess.run(["mount", *options], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(filler: Path) -> None:
    """Write until nothing more fits."""
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(BLOCK):
            pass
