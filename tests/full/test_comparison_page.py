"""The report of several runs: figures that say what is missing, files beside it, and a page that needs nothing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bapo.cli.app import app
from bapo.core.errors import ConfigError
from bapo.core.types import Origin
from bapo.runtime.run_directory.layout import RunDirectory
from studies import drawing
from studies.compare.gather import Compared, gather
from studies.compare.page import write_comparison
from tests.support.synthetic_runs import evaluation_row, result, write_run


def make_ablation(root: Path) -> Compared:
    """BAPO, without X2, with the uniform filter, and GRPO."""
    changes = {
        "grpo": ("grpo", []),
        "bapo": ("bapo", []),
        "bapo-no-x2": ("bapo", ["--algorithm.use_x2", "false"]),
        "bapo-uniform": ("bapo", ["--algorithm.online_filter", "uniform"]),
    }
    for name, (preset, overrides) in changes.items():
        rows = [evaluation_row("cd4", 1, {"p": "0000", "q": "1000"}), evaluation_row("cd4", 3, {"p": "1000", "q": "0"})]
        visits = {
            1: [result("a", "0001", step=1, origin=Origin.X1)],
            2: [result("a", "0011", step=2, origin=Origin.X1)],
        }
        write_run(root / f"{name}-s1", preset=preset, overrides=overrides, evaluations=rows, groups=visits)
    return gather([root / f"{name}-s1" for name in changes])


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    return write_comparison(make_ablation(root), root / "report", paper=True)


def test_the_page_links_only_to_files_beside_it(report: Path) -> None:
    text = report.read_text()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) == 2 * 13
    assert all((report.parent / link).is_file() for link in links)


# -- commands


def test_a_study_is_reported_in_its_own_order_without_its_unfinished_runs(tmp_path: Path) -> None:
    study = tmp_path / "mine"
    study.mkdir()
    (study / "study.toml").write_text(
        '[study]\nname = "mine"\nseeds = [1]\n[methods.ours]\npreset = "bapo"\nlabel = "Ours"\n'
        '[methods.plain]\npreset = "grpo"\nmay_differ = ["learner.epochs"]\n[methods.never]\npreset = "grpo"\n'
    )
    rows = [evaluation_row("cd4", 3, {"p": "0001", "q": "0000"})]
    write_run(study / "runs" / "plain-s1", preset="grpo", evaluations=rows)
    write_run(study / "runs" / "ours-s1", evaluations=rows)
    write_run(study / "runs" / "never-s1", preset="grpo", status="failed")
    RunDirectory.create(study / "runs" / "ours-s1-eval-001").update_run(status="finished")  # what `bapo eval` leaves
    compared = gather([study])
    assert [(method.label, method.may_differ) for method in compared.methods] == [
        ("Ours", ()), ("plain", ("learner.epochs",)),
    ]  # fmt: skip
    assert (compared.name, compared.unfinished) == ("mine", ("never-s1 (failed)",))
    result = CliRunner().invoke(app, ["report", str(study)])
    assert result.stdout.strip() == str(study / "report" / "report.md")
    text = (study / "report" / "report.md").read_text()
    assert "excluded: never-s1 (failed)" in text
    assert "| plain * |" in text


def test_without_matplotlib_a_report_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what an import of a missing package finds
    with pytest.raises(ConfigError, match=r"pip install 'bapo\[records\]'"):
        drawing.settings()
