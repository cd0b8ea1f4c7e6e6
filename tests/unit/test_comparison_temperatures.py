"""Splits that are also measured at a further temperature, before and after training alone, as by default."""

from __future__ import annotations

from pathlib import Path

import pytest

from studies.compare.figures import migrations, pairs, test_curves
from studies.compare.gather import Compared, gather
from studies.compare.tables import table_1, table_dynamics
from tests.support.synthetic_runs import evaluation_row, metrics_row, write_run

test_curves.__test__ = False  # type: ignore[attr-defined] - a figure, not a test
CD4 = {
    0: {"p": "0000", "q": "1000"},  # 1/8
    3: {"p": "1100", "q": "1100"},  # 1/2
    6: {"p": "1111", "q": "1110"},  # 7/8: the best
    10: {"p": "1000", "q": "1000"},  # 1/4
}
COLD = {0: {"p": "1111", "q": "0000"}, 10: {"p": "1111", "q": "1111"}}  # 1/2 and 1


@pytest.fixture
def compared(tmp_path: Path) -> Compared:
    """Two methods with the same ten steps; cd4 was measured during the run, cd4@0.3 only at its ends."""
    rows = [evaluation_row("cd4", step + 1, right) for step, right in CD4.items()]
    rows += [evaluation_row("cd4@0.3", step + 1, right) for step, right in COLD.items()]
    rows.sort(key=lambda row: int(row["version"]))
    metrics = [metrics_row(step) for step in range(1, 11)]
    paths = [write_run(tmp_path / f"{name}-s1", metrics=metrics, evaluations=rows).path for name in ("plain", "ours")]
    return gather(paths)


def test_a_curve_of_the_mean_has_what_was_measured_during_the_run_and_its_star_is_the_best(compared: Compared) -> None:
    figure = pairs(compared)
    assert not isinstance(figure, str)
    line, star = figure.axes[0].lines[:2]
    assert list(zip(line.get_xdata(), line.get_ydata(), strict=True)) == [(0, 0.125), (3, 0.5), (6, 0.875), (10, 0.25)]
    assert (list(star.get_xdata()), list(star.get_ydata())) == ([6], [0.875])


def test_each_temperature_keeps_a_curve_of_its_own(compared: Compared) -> None:
    figure = test_curves(compared)
    assert not isinstance(figure, str)
    shown = {axes.get_title(): list(axes.lines[0].get_xdata()) for axes in figure.axes}
    assert shown == {"cd4": [0, 3, 6, 10], "cd4@0.3": [0, 10]}


def test_held_out_prompts_are_followed_at_measurements_during_the_run(compared: Compared) -> None:
    # 150/471 and 300/471 of ten steps are 3.2 and 6.4.
    figure = migrations(compared)
    assert not isinstance(figure, str)
    found = [axes.get_title() for axes in figure.axes if "plain, step" in axes.get_title()]
    assert [title.split(",")[1].split("of")[0].strip() for title in found] == ["step 3", "step 6", "step 10"]


def test_one_split_at_two_temperatures_has_no_average_and_its_prompts_count_once(compared: Compared) -> None:
    table, dynamics = table_1(compared), table_dynamics(compared)
    assert table.header == ("method", "seeds", "cd4", "cd4@0.3", "rollouts", "type", "staleness")
    assert [row[3].partition(" ")[0] for row in table.rows] == ["50.0", "100.0", "100.0"]
    # p rises from 0/4 to 1/4, q stays at 1/4; at temperature 0.3 q rises too.
    assert dynamics.rows[-1][dynamics.header.index("held out b:w")] == "1:0"


def test_the_average_is_over_splits_at_their_own_temperature(tmp_path: Path) -> None:
    # After training 1/4 and 3/4, so 1/2; at temperature 0.3 both are 1.
    final = {"cd4": "1000", "cd34": "1110", "cd4@0.3": "1111", "cd34@0.3": "1111"}
    rows = [evaluation_row(split, 1, {"p": "0000", "q": "0000"}) for split in final]
    rows += [evaluation_row(split, 3, {"p": right, "q": right}) for split, right in final.items()]
    table = table_1(gather([write_run(tmp_path / "one", evaluations=rows).path]))
    assert [row[table.header.index("average")] for row in table.rows] == ["0.0", "50.0"]
