"""The records of a study as one file."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from bapo.analysis.study.archive import pack, unpack
from bapo.analysis.study.plan import Study
from bapo.analysis.study.state import Results, State, inspect_run
from bapo.config.load import dump_toml
from bapo.core.errors import ConfigError
from bapo.runtime.run_directory.layout import RunDirectory
from tests.support.factories import make_result
from tests.support.run_rows import make_evaluation, make_row
from tests.unit.test_study_plan import plan, study_values


def finish(study: Study, index: int) -> RunDirectory:
    """A run with one step, as a launcher leaves it behind."""
    run = RunDirectory.create(study.runs[index].path, dump_toml(study.runs[index].config))
    run.append_metrics(make_row(1))
    run.append_evaluation(make_evaluation("held_out", 1, 0.25))
    run.write_groups(1, [make_result()])
    run.write_batch(1, b"a frame")
    run.update_run(status="finished", host="secret-host", command=["/home/me/bapo"], exit_code=0)
    Results(study.path).remember(study.runs[index], exit_code=0, reason="", wall_s=7.0, is_new=True)
    return run


def test_what_was_packed_comes_out_the_same_elsewhere_and_counts_as_finished(tmp_path: Path) -> None:
    here, there = plan(tmp_path / "here"), plan(tmp_path / "there")
    before = finish(here, 0)
    assert pack(here, tmp_path / "study.tar.xz").left == ("ours-s1", "plain-s2", "ours-s2")

    assert unpack(tmp_path / "study.tar.xz", there).runs == ("plain-s1",)

    after = RunDirectory.open(there.runs[0].path)
    assert inspect_run(there.runs[0]).state is State.FINISHED
    assert after.read_metrics() == before.read_metrics()
    assert after.read_evaluations() == before.read_evaluations()
    assert list(after.read_groups()) == list(before.read_groups())
    assert [row["wall_s"] for row in Results(there.path).read()] == [7.0]


def test_batches_and_what_belongs_to_the_machine_stay_behind(tmp_path: Path) -> None:
    study = plan(tmp_path)
    finish(study, 0)
    pack(study, tmp_path / "study.tar.xz")
    with tarfile.open(tmp_path / "study.tar.xz") as archive:
        names = archive.getnames()
        content = b"".join(file.read() for file in map(archive.extractfile, archive) if file)
    assert sorted(names) == [
        "results.jsonl",
        "runs/plain-s1/config.toml",
        "runs/plain-s1/evaluations.jsonl",
        "runs/plain-s1/groups/step-000001.parquet",
        "runs/plain-s1/metrics.jsonl",
        "runs/plain-s1/run.json",
        "study.toml",
    ]
    assert b"secret-host" not in content
    assert b"/home/me" not in content


def test_what_no_table_reads_stays_behind(tmp_path: Path) -> None:
    here, there = plan(tmp_path / "here"), plan(tmp_path / "there")
    run = finish(here, 0)
    cell = {"policy": "theta_t", "origin": "x1", "age": None, "num_groups": 5}
    run.append_metrics(make_row(2, divergences=[cell], loss=0.5))
    run.write_groups(2, [replace(make_result(num_tokens=7), sample_s=1.5, claimed_at=1e9)])

    pack(here, tmp_path / "study.tar.xz")
    unpack(tmp_path / "study.tar.xz", there)

    after = RunDirectory.open(there.runs[0].path)
    assert after.read_metrics()[1] == make_row(2, loss=0.5)
    assert list(after.read_groups([2])) == [(2, [make_result(num_tokens=7)])]


def test_a_run_that_is_there_already_is_not_touched(tmp_path: Path) -> None:
    here, there = plan(tmp_path / "here"), plan(tmp_path / "there")
    finish(here, 0)
    pack(here, tmp_path / "study.tar.xz")
    own = RunDirectory.create(there.runs[0].path, dump_toml(there.runs[0].config))

    moved = unpack(tmp_path / "study.tar.xz", there)

    assert (moved.runs, moved.left) == ((), ("plain-s1",))
    assert own.read_metrics() == []
    assert Results(there.path).read() == []


def test_runs_that_the_study_does_not_plan_and_other_files_are_refused(tmp_path: Path) -> None:
    here = plan(tmp_path / "here")
    finish(here, 0)
    pack(here, tmp_path / "study.tar.xz")
    with pytest.raises(ConfigError, match="does not plan: plain-s1"):
        unpack(tmp_path / "study.tar.xz", plan(tmp_path / "there", only=("ours",)))
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(ConfigError, match=r"text is not a readable study archive"):
        unpack(tmp_path / "text", here)


def test_an_archive_that_is_cut_off_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    here, there = plan(tmp_path / "here"), plan(tmp_path / "there")
    finish(here, 0)
    pack(here, tmp_path / "study.tar.xz")
    whole = (tmp_path / "study.tar.xz").read_bytes()
    for size in (len(whole) // 2, 3 * len(whole) // 4):
        (tmp_path / "part").write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"part is not a readable study archive"):
            unpack(tmp_path / "part", there)
    assert not there.runs[0].path.exists()


def test_runs_of_other_settings_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    here = plan(tmp_path / "here")
    finish(here, 0)
    pack(here, tmp_path / "study.tar.xz")
    values = study_values()
    values["common"]["learner"]["lr"] = 0.5
    there = plan(tmp_path / "there", values)

    with pytest.raises(ConfigError, match=r"plain-s1 has different settings.*learner\.lr"):
        unpack(tmp_path / "study.tar.xz", there)

    assert inspect_run(there.runs[0]).state is State.NEW
    assert [path.name for path in there.path.iterdir()] == ["runs"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, tarfile.REGTYPE) for name in ("../outside", "/etc/passwd", "runs/../../x/config.toml")),
        ("runs/plain-s1/weights.safetensors", tarfile.REGTYPE),
        ("study.toml", tarfile.SYMTYPE),
    ],
)
def test_a_member_that_is_no_record_is_refused(tmp_path: Path, name: str, kind: bytes) -> None:
    with tarfile.open(tmp_path / "study.tar.xz", "w:xz") as archive:
        member = tarfile.TarInfo(name)
        member.size, member.type = int(kind == tarfile.REGTYPE), kind
        member.linkname = "/etc/passwd" * (kind == tarfile.SYMTYPE)
        archive.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(ConfigError, match="is not a record of a study"):
        unpack(tmp_path / "study.tar.xz", plan(tmp_path))
