"""The report: the numbers of its figures, and a page that needs nothing from outside."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bapo.config.load import dump_toml, load_config
from bapo.errors import ConfigError, StorageError
from bapo.records import RunDirectory
from bapo.report import data
from bapo.report.page import make_page, write_report
from bapo.types import Fate, Purpose
from tests.factories import make_fate
from tests.unit.test_launcher_display import make_evaluation, make_row

PHASES = {"prox_s": 0.1, "update_s": 0.8, "sync_s": 0.05, "checkpoint_s": 0.0}


def make_run(tmp_path: Path, *, num_steps: int = 8) -> RunDirectory:
    config = load_config([], ["--algorithm.batch_size", "32", "--learner.minibatch_size", "8"])
    run = RunDirectory.create(tmp_path / "demo<1>", dump_toml(config))
    for step in range(1, num_steps + 1):
        run.append_metrics(make_row(step, **PHASES))
        run.write_groups(step, [make_fate(rewards="10000000"), make_fate(rewards="00000000", origin=None)])
    run.append_evaluation(make_evaluation("cd34", 1, 0.34))
    run.append_evaluation(make_evaluation("cd34", 9, 0.42))
    run.update_run(status="finished", started_at=1_700_000_000, processes={"redis": {"ready_after_s": 0.1}})
    return run


def test_bins_count_new_groups_by_right_answers() -> None:
    def fate(rewards: str, **fields: Any) -> Fate:
        return make_fate(rewards=rewards, **fields)

    reevaluated = Fate(
        group_id="r", prompt_id="p", purpose=Purpose.REEVALUATE, policy_version=1, rewards=(1.0,) * 4, origin=None,
        reason="solved", birth=1,
    )  # fmt: skip
    first = [[fate("0000"), fate("1000"), fate("0001"), fate("1111")], [reevaluated, fate("1111", reason="reused")]]
    bins = data.accuracy_bins(first, [[fate("1100")]], group_size=4)
    assert bins.first == [0.25, 0.5, 0.0, 0.0, 0.25]
    assert bins.last == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_no_groups_have_no_bins() -> None:
    assert data.accuracy_bins([], [[]], group_size=2) == data.Bins(first=[0.0] * 3, last=[0.0] * 3)


def test_held_out_curves_are_one_per_split_in_order_of_steps() -> None:
    rows = [make_evaluation("a", 5, 0.5), make_evaluation("b", 1, 0.1), make_evaluation("a", 1, 0.25)]
    first, second = data.held_out_curves(rows)
    assert (first.name, first.steps, first.values) == ("a", [0, 4], [0.25, 0.5])
    assert (second.name, second.low, second.high) == ("b", [0.1 - 0.02], [0.1 + 0.02])


def test_a_held_out_curve_compares_the_same_prompts() -> None:
    """The base was measured on three prompts, later versions on two: .5 on those two, not 2/3."""
    base = make_evaluation("a", 1, 2 / 3, rewards={"p": [1.0, 0.0], "q": [0.0, 1.0], "r": [1.0, 1.0]})
    later = make_evaluation("a", 5, 0.75, rewards={"p": [1.0, 1.0], "q": [0.0, 1.0]})
    (curve,) = data.held_out_curves([base, later])
    assert (curve.values, curve.num_prompts) == ([0.5, 0.75], 2)
    assert curve.low[0] < 0.5 < curve.high[0]


class Page(HTMLParser):
    """What a browser would fetch or show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outside: list[str] = []
        self.labels: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "data", "action") and not (value or "").startswith("#"):
                self.outside.append(f"{tag} {name}={value}")
            if name == "aria-label":
                self.labels.append(value or "")


def test_a_short_run_without_evaluations_has_a_report_too(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "short", dump_toml(load_config([], [])))
    run.append_metrics(make_row(1))
    assert Page(make_page(run)).tags.count("svg") == 2


def test_a_run_without_a_step_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no finished step"):
        make_page(RunDirectory.create(tmp_path / "empty"))


def test_a_report_that_cannot_be_written_names_its_path(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.report_path.symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"report\.html: No space left"):
        write_report(run)
