"""A configuration with which the launcher starts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from bapo.config.tree import Config

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = {"batch_size": 4}


def make_config(tmp_path: Path, **sections: dict[str, Any]) -> Config:
    """A configuration that passes: free ports, a model folder, ten problems."""
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(REPOSITORY / "models/countdown-tiny" / name, model)
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "task": {"options": {"num_train": 10, "num_held_out": 3}},
        "algorithm": SMALL,
        "learner": {"port": 0, "minibatch_size": 2},
        "buffer": {"port": 0},
        "rollout": {"port": 0},
        "scheduler": {"port": 0},
        "evaluation": {"port": 0},
        "dashboard": {"port": 0},
    }
    return Config.model_validate({name: tree.get(name, {}) | sections.get(name, {}) for name in {*tree, *sections}})
