"""Groups in parquet: every value of a group is there, as plain lists that any reader understands."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from bapo.cli.buffer.group_files import SCHEMA, GroupWriter
from bapo.core.errors import StorageError
from bapo.core.types import Group, Prompt
from tests.support.factories import make_group

TRICKY = Prompt(prompt_id="q", text="äß\n\u2603 'x'", task="t", answer={"z": [1.5, None], "a": {"b": True}})
GROUPS = [
    make_group(prompt_id="p", rewards="10010000", truncated=[2], version=7, logprob=-1 / 3),
    make_group(prompt=TRICKY, group_id="g-q", rewards=[0.25, 1.0], num_prompt_tokens=0, lengths=[1, 40]),
]


PLACES = [["high", "batch 3"], ["fresh"]]


def test_the_columns_have_the_names_of_a_group_and_of_the_runs_group_records() -> None:
    own = {field.name for field in fields(Group)} - {"prompt", "lengths", "timing"}
    assert own <= set(SCHEMA.names)
    assert {"prompt_id", "policy_version", "num_tokens", "sample_s", "grade_s", "claimed_at"} <= set(SCHEMA.names)


def test_a_writer_that_fails_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(IndexError), GroupWriter(tmp_path / "groups.parquet") as writer:
        writer.write(GROUPS, [PLACES[7]])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError), GroupWriter(tmp_path / "no folder" / "x.parquet"):
        pass


def test_a_teachers_log_probs_are_exported_per_response(tmp_path: Path) -> None:
    group = make_group(rewards="10", lengths=[3, 1])
    taught = replace(group, group_id="taught", teacher_logprobs=np.array([-1, -2, -3, -4], np.float32))
    with GroupWriter(tmp_path / "groups.parquet") as writer:
        writer.write([group, taught], [(), ()])
    assert pq.read_table(tmp_path / "groups.parquet")["teacher_logprobs"].to_pylist() == [[], [[-1, -2, -3], [-4]]]


def test_runs_of_versions_are_exported(tmp_path: Path) -> None:
    group = make_group(rewards="10", lengths=[3, 1])
    spans, pairs = np.array([[2, 1], [1, 2], [1, 1]], np.int32), np.array([[1, 2], [1, 1]], np.int32)
    mixed = replace(group, group_id="mixed", spans=spans, versions=pairs)
    with GroupWriter(tmp_path / "groups.parquet") as writer:
        writer.write([group, mixed], [(), ()])
    assert pq.read_table(tmp_path / "groups.parquet")["spans"].to_pylist() == [[], spans.tolist()]
