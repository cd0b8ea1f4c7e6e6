"""Every preset trains: the real launcher, buffer, learner and scheduler with the scripted engine, a few steps each.

Minutes in all, so it is asked for: pytest -m long tests/full/test_preset_runs.py
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bapo.config.layers import preset_names
from bapo.config.load import load_resolved
from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.launch import run_to_end, train_arguments

TIMEOUT_S = 240.0
NUM_STEPS = 4
SHORT = {"dapo": ["--shaping.overlong_cache", "4"]}
"""What a preset for long responses needs besides, where responses are short."""


@pytest.mark.long
@pytest.mark.parametrize("name", preset_names())
def test_a_preset_trains(name: str, tmp_path: Path) -> None:
    overrides = [
        *SHORT.get(name, ()),
        "--preset",
        name,
        "--evaluation.every",
        "0",
        "--evaluation.num_prompts_final",
        "2",
    ]
    run_to_end(train_arguments(tmp_path, *overrides, num_steps=NUM_STEPS), timeout_s=TIMEOUT_S)
    run = RunDirectory(tmp_path / "outputs" / "run")
    rows = run.read_metrics()
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    trained = [row for row in rows if row["num_updates"]]
    assert len(trained) >= 2, "at least two steps changed the weights"
    assert all(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in trained)
    assert max(row["grad_norm"] for row in trained) > 0
    assert load_resolved(run.config_path).preset == name
    assert run.checkpoint_steps()[-1] == NUM_STEPS
