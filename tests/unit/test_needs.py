"""What runs need of a machine, and being the only process that does something."""

from __future__ import annotations

from pathlib import Path

import pytest

from bapo.config.tree import Config, RolloutConfig
from bapo.errors import ConfigError, StorageError
from bapo.needs import memory_gib, runs_at_once
from bapo.storage import locked


def test_every_engine_needs_memory_of_its_own() -> None:
    two = Config(rollout=RolloutConfig(num_workers=2))
    assert memory_gib(two) - memory_gib(Config()) == pytest.approx(1.3)


@pytest.mark.parametrize(
    ("cores", "free_gib", "want"),
    [
        (2, 64.0, 2),
        (8, 64.0, 8),
        (8, 10.0, 2),  # 4.8 GiB each
        (1, 1.0, 1),  # never none: the run itself says when memory is short
    ],
)
def test_the_scarcer_of_cores_and_memory_says_how_many_runs_fit(cores: int, free_gib: float, want: int) -> None:
    assert runs_at_once(Config(), cores=cores, free_gib=free_gib, cores_per_run=1.0) == want


def test_a_lock_is_refused_to_a_second_holder_and_given_back(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    elsewhere = locked(path, "it goes on elsewhere")
    with locked(path, "never"), pytest.raises(ConfigError, match="it goes on elsewhere"), elsewhere:
        pass
    with locked(path, "never"):
        pass
    with pytest.raises(StorageError), locked(tmp_path / "nowhere" / ".lock", "never"):
        pass
