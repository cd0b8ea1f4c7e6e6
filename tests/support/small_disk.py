"""A file system of its own that is soon full: a tmpfs, where the machine lets us mount one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SIZE_MB = 64
BLOCK = b"x" * (1 << 14)


class NoMountError(Exception):
    """This machine lets us mount nothing."""


@contextmanager
def mounted(folder: Path, size_mb: int = SIZE_MB) -> Iterator[Path]:
    """The folder, which is made, as a file system of this size. Raises: NoMountError."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(folder)]
    done = subprocess.run(["mount", *options], capture_output=True, text=True)
    if done.returncode != 0:
        raise NoMountError(f"cannot mount a small file system here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(filler: Path) -> None:
    """Write until nothing more fits."""
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(BLOCK):
            pass
