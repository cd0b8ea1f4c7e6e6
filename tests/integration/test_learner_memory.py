"""What spares memory changes no number: recomputed activations, over one rank and two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_fsdp import spawn_ranks
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tiny_model(path)
    return path


def train(model: Path, run: Path, num_ranks: int, **sections: dict[str, Any]) -> list[dict[str, Any]]:
    """Three steps; what each rank found."""
    return spawn_ranks("memory_rank", [str(model), str(run), str(num_ranks), json.dumps(sections)], num_ranks)


def test_two_ranks_that_recompute_activations_train_the_same_bits(model: Path, tmp_path: Path) -> None:
    plain = train(model, tmp_path / "plain", 2, learner={"gradient_checkpointing": False})
    spared = train(model, tmp_path / "spared", 2, learner={"gradient_checkpointing": True})
    assert len(plain[0]["losses"]) == 9
    assert spared == plain
    for file in ("weights/version-000004.safetensors", "checkpoints/step-000003/optimizer.safetensors"):
        assert (tmp_path / "spared" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
