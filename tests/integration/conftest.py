"""One browser and one finished run for all tests of the page; commands that no failed test leaves behind."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from bapo.records import RunDirectory
from tests.browser import chromium
from tests.integration.launching import kill_family
from tests.web_setup import made_run, viewed


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium."""
    with chromium() as found:
        yield found


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of NUM_STEPS steps; nobody writes to it."""
    return made_run(tmp_path_factory.mktemp("runs") / "finished")[0]


@pytest.fixture(scope="module")
def address(finished: RunDirectory) -> Iterator[str]:
    """Where it is shown."""
    with viewed(finished) as url:
        yield url


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Ends what a failed test leaves."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        kill_family(process)
