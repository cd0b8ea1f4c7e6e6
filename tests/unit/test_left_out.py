"""A run of the tests says which long ones it left out, and how to run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def collected(*options: str) -> str:
    """What pytest says of the autoscaling tests without running any."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        *options,
        "tests/integration/test_autoscaling.py",
    ]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False).stdout


def test_what_is_long_is_named_with_its_command_and_not_only_counted() -> None:
    said = collected()
    assert "left out: long tests" in said
    assert "   1  python -m pytest -m long tests/integration/test_autoscaling.py" in said


def test_who_asks_for_the_long_tests_is_told_nothing() -> None:
    assert "left out" not in collected("-m", "long")
