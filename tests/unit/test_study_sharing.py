"""A study takes finished runs of another one that have the same settings."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from bapo.analysis.study.plan import Study
from bapo.analysis.study.state import Results, State, look_at, take_shared, twin
from bapo.runtime.run_directory.files import append_line
from tests.unit.test_study_plan import make, plan, study_values


def two_studies(tmp_path: Path, changes: dict[str, Any] | None = None) -> tuple[Study, Study]:
    """The same methods and seeds; the second takes runs of the first, and `ours` may have other settings in it."""
    first = plan(tmp_path)
    values = study_values()
    values["study"] = values["study"] | {"name": "second", "share": [str(first.path)]}
    if changes:
        values["methods"]["ours"]["settings"] = changes
    return first, plan(tmp_path, values)


def taken(study: Study) -> list[str]:
    study.path.joinpath("runs").mkdir(parents=True, exist_ok=True)
    said: list[str] = []
    take_shared(study, said.append)
    return [line.split(":")[0] for line in said]


def test_a_finished_run_with_the_same_settings_is_linked_and_its_line_is_copied(tmp_path: Path) -> None:
    first, second = two_studies(tmp_path)
    make(first, 0, "finished")
    line = {"run": first.runs[0].name, "method": first.runs[0].method, "status": "finished", "starts": 1, "wall_s": 9.0}
    append_line(Results(first.path).path, line)
    assert [found.state for found in look_at(second)] == [State.FINISHED, *[State.NEW] * 3]
    assert taken(second) == [second.runs[0].name]
    assert second.runs[0].path.is_symlink()
    assert second.runs[0].path.resolve() == first.runs[0].path.resolve()
    assert [row["wall_s"] for row in Results(second.path).read()] == [9.0]
    assert taken(second) == [], "once"


@pytest.mark.parametrize("status", ["failed", "running", None])
def test_a_run_that_is_not_finished_is_not_shared(tmp_path: Path, status: str | None) -> None:
    first, second = two_studies(tmp_path)
    make(first, 0, status)
    assert taken(second) == []


def test_a_run_with_other_settings_is_not_shared(tmp_path: Path) -> None:
    first, second = two_studies(tmp_path, {"learner": {"lr": 0.25}})
    for index in range(2):
        make(first, index, "finished")
    assert [run.name for run in second.runs if twin(second, run)] == ["plain-s1"]
    assert taken(second) == ["plain-s1"]


def test_a_run_that_was_begun_here_stays_ours(tmp_path: Path) -> None:
    first, second = two_studies(tmp_path)
    make(first, 0, "finished")
    make(second, 0, "failed", checkpoint=2)
    assert look_at(second)[0].state is State.RESUME
    assert taken(second) == []
    assert not second.runs[0].path.is_symlink()


def test_a_link_whose_study_is_gone_is_a_run_to_be_made(tmp_path: Path) -> None:
    first, second = two_studies(tmp_path)
    make(first, 0, "finished")
    taken(second)
    shutil.rmtree(first.path)
    assert look_at(second)[0].state is State.NEW
    assert taken(second) == []
    assert not second.runs[0].path.is_symlink()
