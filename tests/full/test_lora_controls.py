"""An engine that merges an adapter wrongly ends at the first update that shows it. Real vLLM, all parts real."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bapo.runtime.run_directory.layout import RunDirectory
from tests.full.test_demo import SMALL
from tests.support.launch import FREE_PORTS, REPOSITORY, kill_family, start
from tests.support.wait import wait_until

CONFIG = REPOSITORY / "deploy/configs/demo-lora.toml"
SITE = Path(__file__).with_name("adapter_site")
WAIT_S = 240.0


@pytest.mark.parametrize("fault", ["frozen base", "twice the scale", "a layer missing", "old adapter"])
def test_an_engine_that_merges_wrongly_samples_nothing_with_it(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first update has B = 0 and shows nothing; the second, after step 1, does."""
    monkeypatch.setenv("BAPO_TEST_ADAPTER", fault)
    monkeypatch.setenv("PYTHONPATH", f"{SITE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    process = start(["train", str(CONFIG), "--run.root", str(tmp_path), *SMALL, *FREE_PORTS])
    run = RunDirectory(tmp_path / "run")
    log = run.path / "logs" / "rollout_server.log"
    noticed = "died: WeightMismatchError: after the update to version 2"
    try:
        wait_until(
            lambda: process.poll() is not None or (log.exists() and noticed in log.read_text()), timeout_s=WAIT_S
        )
    finally:
        kill_family(process)
    assert noticed in log.read_text()
    found = [group for _, groups in run.read_groups(run.group_steps()) for group in groups]
    assert {group.policy_version for group in found} <= {1}
