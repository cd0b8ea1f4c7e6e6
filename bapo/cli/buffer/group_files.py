"""Groups in a parquet file, one row each, for pandas and datasets: `bapo buffer export`.

The columns have the names of `bapo.core.types.Group` and of the run's group records
(`bapo.runtime.run_directory.layout`). Tokens and log-probs are lists of lists, response by response; `answer` and
`reward_details` are JSON. `places` says where the buffer had the group.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from bapo.core.reward_details import details_of
from bapo.core.types import Group, Outcome
from bapo.runtime.run_directory.files import ELSEWHERE, storing, to_disk

PER_RESPONSE = {"token_ids": pa.int32(), "rollout_logprobs": pa.float32(), "versions": pa.int32()}
"""Columns with one list per response."""
SCHEMA = pa.schema(
    [
        ("group_id", pa.string()),
        ("prompt_id", pa.string()),
        ("prompt", pa.string()),
        ("task", pa.string()),
        ("answer", pa.string()),
        ("images", pa.list_(pa.string())),
        ("purpose", pa.string()),
        ("step", pa.int32()),
        ("label", pa.string()),
        ("worker_id", pa.string()),
        ("rewards", pa.list_(pa.float32())),
        ("reward_details", pa.string()),
        ("outcomes", pa.list_(pa.string())),
        ("prompt_token_ids", pa.list_(pa.int32())),
        *((name, pa.list_(pa.list_(kind))) for name, kind in PER_RESPONSE.items()),
        ("spans", pa.list_(pa.list_(pa.int32()))),
        ("turns", pa.list_(pa.list_(pa.int32()))),
        ("context_ids", pa.list_(pa.int32())),
        ("teacher_logprobs", pa.list_(pa.list_(pa.float32()))),
        ("claimed_at", pa.float64()),
        ("sample_s", pa.float64()),
        ("grade_s", pa.float64()),
        ("policy_version", pa.int32()),
        ("num_tokens", pa.int32()),
        ("places", pa.list_(pa.string())),
    ]
)


class GroupWriter:
    """A parquet file that is written in parts and there when the block ends without an error, whole."""

    def __init__(self, path: Path) -> None:
        self._path, self._temporary = path, path.with_name(f".{path.name}.tmp")

    def __enter__(self) -> Self:
        with self._cleared_up():
            self._writer = pq.ParquetWriter(self._temporary, SCHEMA, compression="zstd")
        return self

    @contextmanager
    def _cleared_up(self) -> Iterator[None]:
        """Nothing is left of a file that cannot be written. Raises: StorageError."""
        try:
            with storing(self._path, when_full=ELSEWHERE):
                yield
        except BaseException:  # Ctrl-C, too
            self._temporary.unlink(missing_ok=True)
            raise

    def write(self, groups: Sequence[Group], places: Sequence[Sequence[str]]) -> None:
        with storing(self._path, when_full=ELSEWHERE):
            self._writer.write_table(_table(groups, places))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._cleared_up():
            self._writer.close()
            if error is None:
                to_disk(self._temporary)
                self._temporary.replace(self._path)
            else:
                self._temporary.unlink()


def _table(groups: Sequence[Group], places: Sequence[Sequence[str]]) -> pa.Table:
    columns: dict[str, Any] = {
        "group_id": [group.group_id for group in groups],
        "prompt_id": [group.prompt.prompt_id for group in groups],
        "prompt": [group.prompt.text for group in groups],
        "task": [group.prompt.task for group in groups],
        "answer": [json.dumps(dict(group.prompt.answer)) for group in groups],
        "images": [list(group.prompt.images) for group in groups],
        "purpose": [group.purpose.value for group in groups],
        "step": [group.step for group in groups],
        "label": [group.label for group in groups],
        "worker_id": [group.worker_id for group in groups],
        "rewards": [group.rewards for group in groups],
        "reward_details": [_details_as_json(group) for group in groups],
        "outcomes": [[Outcome(value).name.lower() for value in group.outcomes] for group in groups],
        "prompt_token_ids": [group.prompt_token_ids for group in groups],
        "token_ids": _nested([(group.token_ids, group.lengths) for group in groups]),
        "rollout_logprobs": _nested([(group.rollout_logprobs, group.lengths) for group in groups]),
        "versions": _nested([(group.versions.reshape(-1), np.full(group.size, 2)) for group in groups]),
        "spans": [[] if group.spans is None else group.spans.tolist() for group in groups],
        "turns": [[] if group.turns is None else group.turns.tolist() for group in groups],
        "context_ids": [[] if group.context_ids is None else group.context_ids for group in groups],
        "teacher_logprobs": [
            [] if (taught := group.teacher_logprobs) is None else np.split(taught, np.cumsum(group.lengths)[:-1])
            for group in groups
        ],
        "claimed_at": [group.timing.claimed_at for group in groups],
        "sample_s": [group.timing.sample_s for group in groups],
        "grade_s": [group.timing.grade_s for group in groups],
        "policy_version": [group.policy_version for group in groups],
        "num_tokens": [len(group.token_ids) for group in groups],
        "places": [list(found) for found in places],
    }
    return pa.table(columns, schema=SCHEMA)


def _details_as_json(group: Group) -> str:
    """[G] values of each, null where one is not known of a response."""
    rows = [details_of(group.reward_details, row) for row in range(group.size)]
    return json.dumps({name: [row.get(name) for row in rows] for name in group.reward_details})


def _nested(columns: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> pa.ListArray:
    """[(values of a group [T], lengths of its responses [G])] as lists of lists, without a step per token."""
    values = pa.array(np.concatenate([flat for flat, _ in columns]))
    inner = np.concatenate([lengths for _, lengths in columns])
    outer = [len(lengths) for _, lengths in columns]
    responses = pa.ListArray.from_arrays(_offsets(inner), values)
    return pa.ListArray.from_arrays(_offsets(outer), responses)


def _offsets(lengths: Any) -> pa.Array:
    return pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32())
