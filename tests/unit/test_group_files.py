"""Groups in parquet: what is written is read back to the byte, and what is wrong is named with its row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bapo.errors import ContractError, StorageError
from bapo.group_files import SCHEMA, GroupWriter, read_groups
from bapo.types import Group, Prompt, Purpose
from bapo.wire import pack_group
from tests.factories import make_group

TRICKY = Prompt(prompt_id="q", text="äß\n\u2603 'x'", task="t", answer={"z": [1.5, None], "a": {"b": True}})
GROUPS = [
    make_group(prompt_id="p", rewards="10010000", truncated=[2], version=7, logprob=-1 / 3),
    make_group(prompt=TRICKY, group_id="g-q", rewards=[0.25, 1.0], num_prompt_tokens=0, lengths=[1, 40]),
    make_group(prompt_id="e", purpose=Purpose.EVALUATE, label="cd@3", step=3, worker_id="w2"),
]
PLACES = [["high", "batch 3"], ["fresh"], ["evaluation cd@3"]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "groups.parquet"
    with GroupWriter(path) as writer:
        writer.write(GROUPS[:2], PLACES[:2])
        writer.write(GROUPS[2:], PLACES[2:])
    return path


def test_groups_are_read_back_to_the_byte(file: Path) -> None:
    rows = list(read_groups(file))
    assert [pack_group(row.group) for row in rows] == [pack_group(group) for group in GROUPS]
    assert [(row.number, list(row.places)) for row in rows] == [(1, PLACES[0]), (2, PLACES[1]), (3, PLACES[2])]


def test_the_columns_have_the_names_of_a_group_and_of_the_runs_group_records() -> None:
    own = {field.name for field in fields(Group)} - {"prompt", "lengths", "timing"}
    assert own <= set(SCHEMA.names)
    assert {"prompt_id", "policy_version", "num_tokens", "sample_s", "grade_s", "claimed_at"} <= set(SCHEMA.names)


def test_a_file_that_another_tool_wrote_needs_no_derived_columns_and_may_be_wider(file: Path, tmp_path: Path) -> None:
    table = pq.read_table(file).drop(["places", "num_tokens", "policy_version"])
    wide = [pa.list_(pa.list_(pa.int64())) if f.name == "token_ids" else f.type for f in table.schema]
    names = table.schema.names
    wide_table = pa.table({n: table[n].cast(t) for n, t in zip(names, wide, strict=True)})
    pq.write_table(wide_table.append_column("note", pa.array(["x"] * 3)), tmp_path / "wide.parquet")
    rows = list(read_groups(tmp_path / "wide.parquet"))
    assert [pack_group(row.group) for row in rows] == [pack_group(group) for group in GROUPS]
    assert rows[0].places == ()


def test_rewards_may_be_whole_numbers_and_a_file_without_rows_may_have_any_type(file: Path, tmp_path: Path) -> None:
    rows = pq.read_table(file).to_pylist()
    rows[0].update(rewards=[1, 0, 0, 1, 0, 0, 0, 0])
    schema = SCHEMA.set(SCHEMA.names.index("rewards"), pa.field("rewards", pa.list_(pa.int64())))
    pq.write_table(pa.Table.from_pylist(rows[:1], schema), tmp_path / "whole.parquet")
    assert pack_group(next(read_groups(tmp_path / "whole.parquet")).group) == pack_group(GROUPS[0])
    untyped = pa.schema([(name, pa.null()) for name in SCHEMA.names])
    pq.write_table(untyped.empty_table(), tmp_path / "none.parquet")
    assert list(read_groups(tmp_path / "none.parquet")) == []


def test_a_column_of_another_kind_or_one_that_is_there_twice_is_named(file: Path, tmp_path: Path) -> None:
    table = pq.read_table(file)
    pq.write_table(table.append_column("rewards", table["rewards"]), tmp_path / "twice.parquet")
    with pytest.raises(ContractError, match=r"twice\.parquet has more than one column rewards; leave one of each"):
        list(read_groups(tmp_path / "twice.parquet"))
    answers = pa.array([{"sum": 2}] * 3)
    struct = table.set_column(table.schema.names.index("answer"), "answer", answers)
    pq.write_table(struct, tmp_path / "struct.parquet")
    with pytest.raises(ContractError, match=r"column answer is struct<.*>, not string that holds JSON \(json.dumps"):
        list(read_groups(tmp_path / "struct.parquet"))


Change = Callable[[dict[str, Any]], object]
BROKEN: list[tuple[str, Change]] = [
    ("token_ids and rollout_logprobs have other lengths", lambda row: row["token_ids"][0].append(5)),
    ("rewards must be in", lambda row: row.update(rewards=[2.0] * 8)),
    ("log-probs from -inf", lambda row: row["rollout_logprobs"][0].__setitem__(0, float("-inf"))),
    ("log-probs from nan", lambda row: row["rollout_logprobs"][0].__setitem__(0, float("nan"))),
    ("token ids must not be negative", lambda row: row["token_ids"][0].__setitem__(0, -1)),
    ("rewards must be \\[8\\]", lambda row: row["rewards"].pop()),
    ("purpose: 'nonsense' is none of fresh, reevaluate, evaluate", lambda row: row.update(purpose="nonsense")),
    ("outcomes: 'bored' is none of graded, truncated, expert", lambda row: row["outcomes"].__setitem__(0, "bored")),
    ("versions must be pairs", lambda row: row["versions"][0].append(1)),
    ("answer must be a JSON object", lambda row: row.update(answer="[1]")),
    ("Expecting value", lambda row: row.update(answer="")),
    ("worker_id is empty", lambda row: row.update(worker_id=None)),
    ("rewards: a value is missing in a list", lambda row: row["rewards"].__setitem__(3, None)),
    ("rewards: 2 values are missing in a list", lambda row: row["rewards"].__setitem__(slice(2), [None, None])),
    ("token_ids: a value is missing in a list", lambda row: row["token_ids"][0].__setitem__(0, None)),
    ("outcomes: a word is missing in a list", lambda row: row["outcomes"].__setitem__(3, None)),
    ("places: a word is missing in a list", lambda row: row.update(places=[None])),
    ("is missing in a list", lambda row: row.update(spans=[None])),
    ("is missing in a list", lambda row: row.update(spans=[[1, None]])),
    ("spans must be pairs", lambda row: row.update(spans=[[1, 1], [2]])),
    ("maximum recursion depth", lambda row: row.update(answer='{"a":' + "[" * 5000 + "]" * 5000 + "}")),
    ("each needs a token", lambda row: row.update(token_ids=[[]] * 8, rollout_logprobs=[[]] * 8)),
]


@pytest.mark.parametrize(("message", "change"), BROKEN)
def test_a_malformed_row_is_named(file: Path, message: str, change: Change) -> None:
    rows = pq.read_table(file).to_pylist()
    change(rows[0])
    rows = [rows[1], rows[0], rows[2]]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), file)
    with pytest.raises(ContractError, match=rf"row 2 of .*groups.parquet \(group g-p\): .*{message}"):
        list(read_groups(file))


def test_a_missing_column_or_another_type_is_named(file: Path) -> None:
    table = pq.read_table(file)
    pq.write_table(table.drop(["rollout_logprobs", "label"]), file)
    with pytest.raises(ContractError, match=r"has no column label, rollout_logprobs; `bapo buffer export` writes"):
        list(read_groups(file))
    pq.write_table(table.set_column(0, "group_id", pa.array([1, 2, 3])), file)
    with pytest.raises(ContractError, match="column group_id is int64, not string"):
        list(read_groups(file))


def test_a_file_that_is_not_parquet_or_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="there is no file"):
        list(read_groups(tmp_path / "none.parquet"))
    (tmp_path / "text.parquet").write_text("group_id,rewards\n")
    with pytest.raises(ContractError, match=r"text.parquet is not a parquet file"):
        list(read_groups(tmp_path / "text.parquet"))


def test_a_writer_that_fails_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "groups.parquet"
    with pytest.raises(IndexError), GroupWriter(path) as writer:
        writer.write(GROUPS, [PLACES[7]])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError, match="cannot write"), GroupWriter(tmp_path / "no folder" / "x.parquet"):
        pass


def test_runs_of_versions_are_exported_and_a_file_without_them_is_read(tmp_path: Path) -> None:
    group = make_group(rewards="10", lengths=[3, 1])
    spans, pairs = np.array([[2, 1], [1, 2], [1, 1]], np.int32), np.array([[1, 2], [1, 1]], np.int32)
    mixed = replace(group, group_id="mixed", spans=spans, versions=pairs)
    with GroupWriter(tmp_path / "groups.parquet") as writer:
        writer.write([group, mixed], [(), ()])
    found = [row.group.spans for row in read_groups(tmp_path / "groups.parquet")]
    assert found[0] is None
    assert found[1] is not None
    assert found[1].tolist() == spans.tolist()
    pq.write_table(pq.read_table(tmp_path / "groups.parquet").drop(["spans"]), tmp_path / "old.parquet")
    assert [row.group.spans for row in read_groups(tmp_path / "old.parquet")] == [None, None]
