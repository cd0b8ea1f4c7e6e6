"""The distributed pipeline gives the batches of Algorithm 1, also when it is killed in the middle and resumed.

Real launcher, Redis, buffer service, scheduler, fleet and learner; the scripted engine stands for the model, so that
a plain loop (tests/support/plain_loop.py) can say what every batch must hold.
"""

from __future__ import annotations

from pathlib import Path

from bapo.config.load import load_resolved
from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.launch import kill_family, start, train_arguments
from tests.support.paper_order import NUM_STEPS, PAPER_ORDER, assert_same, batches_of
from tests.support.plain_loop import algorithm_1

WAIT_S = 150.0


def test_the_plain_loop_uses_every_part_of_the_algorithm(tmp_path: Path) -> None:
    process = start(["config", "show", *train_arguments(tmp_path, *PAPER_ORDER, num_steps=NUM_STEPS)[1:]])
    resolved, _ = process.communicate(timeout=60)
    config_path = tmp_path / "resolved.toml"
    config_path.write_text(resolved)
    batches = algorithm_1(load_resolved(config_path))
    assert sum(len(batch.x1) for batch in batches) > 20
    assert sum(len(batch.x2) for batch in batches) > 4
    assert sum(len(batch.x3) for batch in batches) > 4


def test_without_slack_every_batch_is_that_of_the_plain_loop(tmp_path: Path) -> None:
    process = start(train_arguments(tmp_path, *PAPER_ORDER, num_steps=NUM_STEPS))
    try:
        output, _ = process.communicate(timeout=WAIT_S)
    finally:
        kill_family(process)
    assert process.returncode == 0, output
    run = RunDirectory.open(tmp_path / "outputs" / "run")
    assert_same(batches_of(run), algorithm_1(load_resolved(run.config_path)))
    assert [row["staleness_x1_max"] for row in run.read_metrics()][:4] == [0, 0, 1, 0]  # versions 1, 2, 2, 4
