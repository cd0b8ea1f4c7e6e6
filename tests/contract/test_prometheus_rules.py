"""What promtool says of the generated files: their syntax, and each alert's case and near case."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from deploy.monitoring.__main__ import REPOSITORY


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool on PATH (Debian: apt-get install prometheus)")
@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "config", "--syntax-only", "prometheus.yml"],
        ["check", "rules", "rules.yml"],
        ["test", "rules", "rules_test.yml"],
    ],
)
def test_promtool_takes_the_files_and_each_alert_fires_in_its_case_and_not_in_the_near_one(
    arguments: list[str],
) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=REPOSITORY / "deploy/prometheus", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
