"""What runs need of a machine, and being the only process that does something."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from bapo.config.load import load_config
from bapo.config.rollout import RolloutConfig
from bapo.config.tree import Config
from bapo.core.errors import ConfigError, StorageError
from bapo.runtime.machine import (
    GIB,
    engine_bytes,
    learner_bytes,
    learner_gib,
    memory_gib,
    resident_bytes,
    run_bytes,
    runs_at_once,
)
from bapo.runtime.run_directory.files import locked
from services.launcher.doctor.checks import memory_limit


def test_every_engine_needs_memory_of_its_own() -> None:
    two = Config(rollout=RolloutConfig(num_workers=2))
    assert memory_gib(two) - memory_gib(Config()) == pytest.approx(1.3)


def test_weights_take_memory_by_the_parameter_and_disk_by_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bapo.runtime.machine.ranks_on_gpus", lambda config: 0)
    config = Config.model_validate({"rollout": {"num_workers": 3, "worker_resources": {"CPU": 1}}})
    # 1 M parameters: weights 4, gradients 4, moments 8; a copy of weights and moments; three engines of 4 bytes each.
    assert (memory_gib(config, 1_000_000) - memory_gib(config)) * GIB == pytest.approx(16e6 + 12e6 + 3 * 4e6)
    # weights 4, moments 8, alpha 4 bytes: four of them while one is written; hf 4, and two published files of 4.
    assert run_bytes(config, 1_000_000) == 4 * 16_000_000 + 4_000_000 + 2 * 4_000_000


def test_the_host_of_a_learner_on_gpus_needs_memory_for_a_checkpoint_and_published_weights() -> None:
    config = Config.model_validate({"learner": {"device": "cuda", "num_ranks": 8}})  # bfloat16
    assert (learner_gib(config, 1_000_000) - learner_gib(config, 0)) * GIB == pytest.approx(14e6)
    assert learner_gib(config, 0) == pytest.approx(8 * 2.1)


@pytest.mark.parametrize(("limit", "want"), [("1048576\n", 1 << 20), ("max\n", None), (None, None)])
def test_a_container_has_the_memory_of_its_limit(tmp_path: Path, limit: str | None, want: int | None) -> None:
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    assert memory_limit(tmp_path / "memory.max") == (want or psutil.virtual_memory().total)


def test_bfloat16_a_reference_and_a_critic_change_the_sums() -> None:
    config = Config.model_validate(
        {
            "model": {"dtype": "bfloat16"},
            "loss": {"advantage": "gae", "kl_ref": "reference", "kl_coef": 0.1},
        }
    )
    assert learner_bytes(config, 10) == 10 * (16 + 16 + 4)
    assert engine_bytes(config, 10) == 20
    assert run_bytes(config, 10) == 4 * 10 * (12 + 12 + 2) + 4 * 10 + 2 * 20


@pytest.mark.parametrize("preset", sorted(path.stem for path in Path("bapo/config/presets").glob("*.toml")))
def test_every_preset_gives_redis_room_for_its_groups(preset: str) -> None:
    config = load_config([preset], [])
    assert resident_bytes(config) <= config.buffer.maxmemory


def test_what_redis_holds_is_a_sum_over_steps() -> None:
    # 256 x (5 + 3 + 10) groups of 8 x 8,192 tokens of 8 bytes.
    assert resident_bytes(load_config(["bapo"], [])) == 256 * 18 * 8 * 8192 * 8


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
    with locked(path, "never"), pytest.raises(ConfigError, match="elsewhere"), elsewhere:
        pass
    with locked(path, "never"):
        pass
    with pytest.raises(StorageError), locked(tmp_path / "nowhere" / ".lock", "never"):
        pass
