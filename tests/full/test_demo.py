"""`make demo` in small: the shipped model, real vLLM on Ray, every other part real too, three steps."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM

from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.launch import FREE_PORTS, REPOSITORY, alive, family, kill_family, start
from tests.support.wait import wait_until

SMALL = [
    "--run.name", "run", "--run.num_steps", "3", "--algorithm.batch_size", "8", "--learner.minibatch_size", "4",
    "--evaluation.num_prompts_final", "8", "--evaluation.every", "0", "--checkpoint.every", "3",
]  # fmt: skip
WAIT_S = 240.0


def test_three_steps_of_the_demo_train_the_shipped_model(tmp_path: Path) -> None:
    config = str(REPOSITORY / "deploy/configs/demo.toml")
    process = start(["train", config, "--run.root", str(tmp_path), *SMALL, *FREE_PORTS])
    run = RunDirectory(tmp_path / "run")
    try:
        wait_until(lambda: bool(run.read_metrics()) or process.poll() is not None, timeout_s=WAIT_S, what="step 1")
        members = family(process) if process.poll() is None else []
        output, _ = process.communicate(timeout=WAIT_S)
    finally:
        kill_family(process)
    assert process.returncode == 0, output
    assert alive(members) == []

    rows = run.read_metrics()
    assert [row["step"] for row in rows] == [1, 2, 3]
    # Step 1 trains what theta_1 itself sampled: the engine's log-probs and the learner's are the same.
    assert rows[0]["staleness_x1_max"] == 0
    assert rows[0]["tv_x1"] < 1e-4
    assert {(row["split"], row["version"]) for row in run.read_evaluations()} == {
        ("cd34", 1), ("cd4", 1), ("cd34", 4), ("cd4", 4),
    }  # fmt: skip
    exported = run.checkpoint_dir(3) / "hf"
    assert AutoModelForCausalLM.from_pretrained(exported).num_parameters() == 646_784
