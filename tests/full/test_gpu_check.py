"""`make gpu-check` cannot rot: the same command with tiny models on the CPU, and the same pack installed elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.pack import pack, unpack
from benchmarks.gpu.runner import Item, items, run_all
from tests.support.launch import REPOSITORY

LIMIT_S = 420.0
"""It takes 45 s on two idle cores."""


def test_every_stage_passes_on_a_cpu_with_tiny_models(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "run", "--device", "cpu", "--size", "tiny"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    found = {item["name"]: item for item in result["items"]}
    assert list(found) == [item.name for item in items("tiny")]
    assert {name for name, item in found.items() if item["status"] != "passed"} <= {"peer"}, "TRL may be missing"
    assert found["update-tiny"]["figures"]["tflops"] > 0
    assert found["engine-tiny"]["figures"]["versions_in_flight"] == [[1, 2]]
    assert found["demo"]["goals"]["steps_not_trained_once"]["met"]
    table = done.stdout.splitlines()[-len(found) :]
    assert [line.split()[0] for line in table] == list(found), "the last lines are the table"


def stall(findings: Findings, device: str) -> None:
    """An item that hangs after its first figure."""
    findings.add(before=1)
    time.sleep(600)


def test_an_item_that_hangs_costs_only_itself_and_keeps_its_figures(tmp_path: Path) -> None:
    hangs = Item(name="hangs", stage="x", limit_s=10, action="tests.full.test_gpu_check:stall")
    records = run_all([hangs, items("tiny")[0]], "cpu", tmp_path, budget_s=120)
    assert [record["status"] for record in records] == ["timed out", "passed"]
    assert records[0]["figures"] == {"before": 1}


def test_a_pack_is_installed_from_its_parts(tmp_path: Path) -> None:
    wheel = tmp_path / "carried-1.0-py3-none-any.whl"
    info = "carried-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("carried.py", f"VALUE = {'7' * 900}\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", f"carried.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    folders = pack([wheel], tmp_path / "pack", limit=1000, parts=3)
    assert len(folders) > 1
    unpack(folders, tmp_path / "site")
    assert (tmp_path / "site" / "carried.py").read_text().startswith("VALUE = 777")
