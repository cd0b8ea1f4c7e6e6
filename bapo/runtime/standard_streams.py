"""Standard output and error of every process: printing never raises.

An encoding without some letter (`PYTHONIOENCODING=ascii`, `LC_ALL=C`), half a surrogate pair, and in a grading process
a full disk or a reader that has gone would otherwise end in an error of what only wanted to say something.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


def print_any_text() -> None:
    """From now on, print `?` for every character that the encoding of stdout or stderr does not have."""
    for stream in (sys.stdout, sys.stderr):
        _replace_unknown(stream)


def never_fail_to_print() -> None:
    """The same, and drop what cannot be written at all: for a process that runs a user's function."""
    sys.stdout, sys.stderr = (_forgiving(stream, fd) for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)))


def _replace_unknown(stream: TextIO | None) -> None:
    # None: started without this stream (`>&-`). Others: a test that captures what is printed.
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")


def _forgiving(stream: TextIO | None, fd: int) -> TextIO:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return io.TextIOWrapper(io.BufferedWriter(_Forgiving(fd)), encoding=encoding, errors="replace", line_buffering=True)


class _Forgiving(io.RawIOBase):
    """A file that takes everything, and writes what it can."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: Any) -> int:
        try:
            return os.write(self._fd, data)
        except OSError:  # a full disk, a closed pipe
            return len(data)
