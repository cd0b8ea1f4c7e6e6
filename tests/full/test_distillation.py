"""A whole run with a teacher: every group trains, whatever its rewards, and each step says how far the teacher is."""

from __future__ import annotations

import math
from pathlib import Path

from bapo.runtime.run_directory.layout import RunDirectory
from services.launcher.doctor.file_tokenizer import TOKENIZER, FileTokenizer
from tests.support.launch import run_to_end, train_arguments
from tests.support.teacher import Teacher, serving

NUM_STEPS = 3


def test_a_run_learns_from_a_teacher(tmp_path: Path) -> None:
    state = Teacher()
    with serving(state):
        overrides = {
            "preset": "grpo", "distillation.teacher": state.url, "loss.advantage": "distillation",
            "loss.advantage_norm": "center", "loss.kl_coef": 0.0, "learner.warmup_steps": 0,
            "cadence.weight_sync_interval": 1, "cadence.reevaluation_interval": 1,
        }  # fmt: skip
        arguments = train_arguments(tmp_path, num_steps=NUM_STEPS)
        if (tmp_path / "model" / TOKENIZER).is_file():
            tokenizer = FileTokenizer(tmp_path / "model")
            state.tokenize = lambda text: tokenizer.encode(text, add_special_tokens=False)
        words = [word for key, value in overrides.items() for word in (f"--{key}", str(value))]
        output = run_to_end([*arguments, *words], timeout_s=240.0)
    rows = RunDirectory(tmp_path / "outputs" / "run").read_metrics()
    assert [row["x1"] for row in rows] == [8] * NUM_STEPS
    assert all(math.isfinite(row["teacher_kl"]) and row["grad_norm"] > 0 for row in rows)
    assert "reverse KL" in output
