"""One finished run for all tests of the dashboard."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.dashboard import made_run, viewed


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of NUM_STEPS steps; nobody writes to it."""
    return made_run(tmp_path_factory.mktemp("runs") / "finished")[0]


@pytest.fixture(scope="module")
def address(finished: RunDirectory) -> Iterator[str]:
    """Where it is shown."""
    with viewed(finished) as url:
        yield url
