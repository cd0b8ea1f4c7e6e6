"""A run that no longer improves ends by itself, and everything after its end is as usual."""

from __future__ import annotations

from pathlib import Path

from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.launch import run_to_end, start, train_arguments

WAIT_S = 240.0


def test_a_run_ends_early_with_its_last_weights_measured_and_exported(tmp_path: Path) -> None:
    # No measurement exceeds the base model's by 0.99; weights are published and measured every two steps.
    settings = ["--evaluation.patience", "1", "--evaluation.min_improvement", "0.99", "--checkpoint.keep_best", "1"]
    output = run_to_end(train_arguments(tmp_path, *settings, num_steps=200), timeout_s=WAIT_S)
    run = RunDirectory(tmp_path / "outputs" / "run")
    steps = run.read_metrics()
    last = steps[-1]["step"]
    assert 4 <= last < 200
    assert steps[-1]["ended"].startswith("no improvement of more than 0.99 in ")
    assert f"after step {last} of 200: no improvement" in " ".join(output.split())
    assert run.read_run()["status"] == "finished"
    assert (run.checkpoint_dir(last) / "hf").is_dir()
    final = [row for row in run.read_evaluations() if row["version"] == last + 1]
    assert final[0]["num_prompts"] == 8  # num_prompts_final, not the 4 of a measurement during the run
    resumed = start(["train", "--resume", str(run.path)])
    assert "it ended early: no improvement" in resumed.communicate(timeout=60)[0]
