"""The report of several runs: figures that say what is missing, files beside it, and a page that needs nothing."""

from __future__ import annotations

import csv
import struct
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bapo.cli import app
from bapo.comparison.bar_figures import chosen, migrations, training_bins
from bapo.comparison.catalogue import CATALOGUE
from bapo.comparison.cells import Table
from bapo.comparison.gather import Compared, changed_keys, gather
from bapo.comparison.line_figures import ablations, draw, filters, with_critic
from bapo.comparison.page import as_markdown, write_comparison
from bapo.comparison.series import Series, cumulative_rollouts, over_seeds, parts, response_length, reward
from bapo.errors import ConfigError
from bapo.report import drawing
from bapo.types import Origin
from tests.made_up_runs import evaluation_row, fate, metrics_row, write_run
from tests.unit.test_comparison import make_pair


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
        visits = {1: [fate("a", "0001", step=1, origin=Origin.X1)], 2: [fate("a", "0011", step=2, origin=Origin.X1)]}
        write_run(root / f"{name}-s1", preset=preset, overrides=overrides, evaluations=rows, groups=visits)
    return gather([root / f"{name}-s1" for name in changes])


def test_a_line_is_the_mean_over_seeds_with_their_range_at_shared_steps() -> None:
    line = over_seeds("x", [[(1, 0.0), (2, 4.0), (3, 9.0)], [(2, 2.0), (1, 1.0)]])
    assert line == Series(label="x", steps=[1, 2], mean=[0.5, 3.0], low=[0.0, 2.0], high=[1.0, 4.0])
    assert line.best == (2, 3.0)
    assert over_seeds("x", [[(1, 0.0)], [(2, 0.0)]]) is None
    assert over_seeds("x", []) is None


def test_lines_are_columns_of_the_records(tmp_path: Path) -> None:
    rows = [metrics_row(1, reward_mean=0.5, x2=1), metrics_row(2, reward_mean=0.25, grad_norm=None)]
    groups = {1: [fate("a", "0001", step=1)], 2: [fate("b", "0001", step=2), fate("a", "0001", step=1)]}
    method = gather([write_run(tmp_path / "one", metrics=rows, groups=groups).path]).reference
    found = reward(method)
    assert found is not None
    assert (found.label, found.steps, found.mean) == ("one", [1, 2], [0.5, 0.25])
    rollouts, lengths = cumulative_rollouts(method), response_length(method)
    assert rollouts is not None
    assert lengths is not None
    assert (rollouts.mean, lengths.mean) == ([4, 8], [10.0, 10.0])
    assert parts(method)[Origin.X2].mean == [1.0, 0.0]


def test_ablations_are_put_where_their_change_belongs(tmp_path: Path) -> None:
    compared = make_ablation(tmp_path)
    bapo, no_x2 = compared.methods[1:3]
    assert changed_keys(bapo, no_x2) == {"algorithm.use_x2"}
    with drawing.settings():
        figure, filtered = ablations(compared), filters(compared)
    assert not isinstance(figure, str)
    assert [axes.get_title() for axes in figure.axes] == ["buffer subsets"]
    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["bapo", "bapo-no-x2"]
    assert not isinstance(filtered, str)
    assert [axes.get_title() for axes in filtered.axes] == ["gradient norm", "held-out accuracy"]


def test_a_migration_matrix_counts_in_every_cell_and_names_both_directions(tmp_path: Path) -> None:
    with drawing.settings():
        figure = migrations(make_ablation(tmp_path))
    assert not isinstance(figure, str)
    first = next(axes for axes in figure.axes if axes.get_title().startswith("grpo, cd4"))
    # p rises from 0/4 to 1/4, q falls from 1/4 to 0.
    assert first.get_title() == "grpo, cd4\nbetter 50%, worse 50%"
    assert sorted((*text.get_position(), text.get_text()) for text in first.texts) == [(0, 1, "1"), (1, 0, "1")]
    better, worse = (patch.get_alpha() for patch in first.patches)
    assert better == worse  # as many prompts, as strong a colour


def test_figures_of_many_pictures_take_the_reference_bapo_and_dapo_first(tmp_path: Path) -> None:
    for name in ("plain", "x", "y", "dapo", "z", "bapo"):
        write_run(tmp_path / f"{name}-s1")
    compared = gather([tmp_path / f"{name}-s1" for name in ("plain", "x", "y", "dapo", "z", "bapo")])
    assert [method.name for method in chosen(compared)] == ["plain", "bapo", "dapo", "x"]


def test_what_the_records_do_not_hold_is_said(tmp_path: Path) -> None:
    compared = gather([write_run(tmp_path / "one", groups={1: [fate("a", "0001", step=1)]}).path])
    reasons = [(entry.number, drawn) for entry in CATALOGUE if isinstance(drawn := entry.draw(compared), str)]
    assert [number for number, _ in reasons] == [1, 2, 3, 5, 6, 7, 10, 12, 13, 15, 16]
    assert all(reason for _, reason in reasons)
    assert with_critic(compared) == "it needs PPO and BA-PPO (methods with a critic), and no run here has one"
    assert training_bins(compared) == "no training prompt came twice: the run is shorter than an epoch"


def test_thirty_two_lines_of_a_figure_differ() -> None:
    assert len({tuple(drawing.line_style(index).values()) for index in range(32)}) == 32


class Outside(HTMLParser):
    """Collects whatever a page would fetch, and counts its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "data", "srcset") and value and not value.startswith("#"):
                self.fetched.append(value)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    return write_comparison(make_ablation(root), root / "report", paper=True)


def test_the_page_opens_offline_and_links_only_to_files_beside_it(report: Path) -> None:
    text = report.read_text()
    page = Outside()
    page.feed(text)
    assert "http" not in text
    assert page.fetched
    assert all((report.parent / link).is_file() for link in page.fetched)
    assert "script" not in page.tags
    assert page.tags.count("svg") == page.tags.count("figure") == 13
    assert "#010203" not in text  # ink follows the page


def test_the_page_names_the_figures_that_are_not_there(report: Path) -> None:
    text = report.read_text()
    assert "Figure 2, On- and off-policy frameworks: it is a drawing of the framework" in text
    assert "Figure 16, Batch adaptation with a critic: it needs PPO and BA-PPO" in text


def test_every_figure_is_a_png_and_a_pdf(report: Path) -> None:
    pictures = sorted(path.name for path in (report.parent / "figures").iterdir())
    numbers = (1, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    assert pictures == sorted(f"figure-{number:02d}.{kind}" for number in numbers for kind in ("png", "pdf"))
    for path in (report.parent / "figures").glob("*.png"):
        content = path.read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">I", content[16:20])[0] > 800  # pixels wide
    assert all(path.read_bytes()[:5] == b"%PDF-" for path in (report.parent / "figures").glob("*.pdf"))


def test_tables_are_written_for_other_programs(report: Path) -> None:
    with (report.parent / "tables" / "table-1.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0][:3] == ["method", "seeds", "cd4"]
    assert [row[0] for row in rows[1:]] == ["base model", "grpo", "bapo", "bapo-no-x2", "bapo-uniform"]
    table = Table(key="t", title="T", header=("a", "b"), rows=(("1", "2"),), note="N")
    assert as_markdown(table) == "### T\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\nN\n"


# -- commands


def test_compare_prints_tables_and_report_wants_a_folder_for_several_runs(tmp_path: Path) -> None:
    make_pair(tmp_path)
    runs = [str(tmp_path / f"{method}-s1") for method in ("plain", "ours")]
    result = CliRunner().invoke(app, ["compare", *runs, "--markdown"])
    assert (result.exit_code, "### At equal steps" in result.output) == (0, True), result.output
    assert "| ours | plain | cd4 | +25.0 [" in result.output
    result = CliRunner().invoke(app, ["compare", *runs])
    assert "Table 1: accuracy and rollouts" in result.output
    assert "left out" not in result.output
    error = CliRunner().invoke(app, ["report", *runs]).exception
    assert isinstance(error, ConfigError)
    assert "name one for their report with --out FOLDER" in str(error)


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
    compared = gather([study])
    assert [(method.label, method.may_differ) for method in compared.methods] == [
        ("Ours", ()), ("plain", ("learner.epochs",)),
    ]  # fmt: skip
    assert (compared.name, compared.unfinished) == ("mine", ("never-s1 (failed)",))
    result = CliRunner().invoke(app, ["report", str(study)])
    assert result.output.strip() == str(study / "report" / "index.html")
    text = (study / "report" / "index.html").read_text()
    assert "left out: never-s1 (failed)" in text
    assert "<td>plain *</td>" in text


def test_without_matplotlib_a_report_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what an import of a missing package finds
    with pytest.raises(ConfigError, match=r"pip install 'bapo\[records\]'"):
        drawing.settings()


def test_lines_without_points_are_left_out() -> None:
    with drawing.settings():
        figure, axes = drawing.canvas("x", "y")
        draw(axes, [None, Series(label="a", steps=[1], mean=[2.0], low=[2.0], high=[2.0])], star=True)
    assert next(line.get_label() for line in axes.get_lines()) == "a"
    assert figure.axes == [axes]
