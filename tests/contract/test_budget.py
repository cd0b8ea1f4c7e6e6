"""Responses in segments, by hand: what each token says, when groups wait, and what outlives a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapo.core.errors import ContractError
from bapo.core.token_arrays import Float32s, Int32s, pairs_of, require_spans, runs_of, versions_of
from bapo.core.types import Prompt, Purpose, RolloutRequest
from bapo.runtime.vision import ReadImage
from rollout_server.engines.base import Continuation, Occupancy, SampledGroup
from rollout_server.partial_rollouts import PartialRolloutStore, SegmentedEngine
from tests.support.clock import Clock
from tests.support.factories import make_prompt, make_request

LIMIT = 10
REQUEST = make_request(group_size=3)
WANTED = (3, 9, 99)
"""Tokens after which each row would end by itself."""


class Counting:
    """An engine whose i-th token of a row is 100 row + i, with log-prob -(version + i / 100); a step ends all."""

    def __init__(self) -> None:
        self.policy_version = 1
        self._groups: list[SampledGroup] = []
        self.resumed: list[Continuation] = []

    @property
    def num_sampling(self) -> int:
        return len(self._groups)

    @property
    def occupancy(self) -> Occupancy:
        return Occupancy(running=len(self._groups))

    def submit(self, request: RolloutRequest, most: int | None = None) -> None:
        rows = [(row, 0, most or LIMIT) for row in range(request.group_size)]
        self._groups.append(self._group(request.request_id, rows))

    def resume(self, part: Continuation) -> None:
        self.resumed.append(part)
        self._groups.append(self._group(part.part_id, [(part.row, len(part.token_ids), part.most)]))

    def _group(self, name: str, rows: Sequence[tuple[int, int, int]]) -> SampledGroup:
        lengths = [min(WANTED[row] - start, most) for row, start, most in rows]
        places = [(row, start + i) for (row, start, _), n in zip(rows, lengths, strict=True) for i in range(n)]
        return SampledGroup(
            request_id=name,
            prompt_token_ids=np.array([7, 8], np.int32),
            token_ids=np.array([100 * row + i for row, i in places], np.int32),
            logprobs=np.array([-(self.policy_version + i / 100) for _, i in places], np.float32),
            lengths=np.array(lengths, np.int32),
            truncated=np.array([WANTED[row] - start > most for row, start, most in rows]),
            versions=np.full((len(rows), 2), self.policy_version, np.int32),
            texts=tuple(f"row {row}" for row, _, _ in rows),
        )

    def abort(self, request_id: str) -> None:
        self._groups = [group for group in self._groups if group.request_id != request_id]

    def step(self) -> list[SampledGroup]:
        groups, self._groups = self._groups, []
        return groups

    def load_weights(self, path: str, version: int) -> None:
        self.policy_version = version

    def check_prompts(self, prompts: Sequence[Prompt], image: ReadImage) -> None: ...

    def encode_response(self, text: str) -> Int32s:
        return np.array([1], np.int32)

    def logprobs(self, token_ids: Sequence[int]) -> Float32s | None:
        return None

    def close(self) -> None: ...


def budgeted(folder: Path | None = None, engine: Counting | None = None, **fields: Any) -> SegmentedEngine:
    """Budget 4, limit 10."""
    fields = {"now": Clock()} | fields
    return SegmentedEngine(engine or Counting(), budget=4, limit=LIMIT, store=PartialRolloutStore(folder), **fields)


def by_versions(engine: SegmentedEngine, versions: Sequence[int]) -> list[SampledGroup]:
    """A step under each version, and what came out in all."""
    found: list[SampledGroup] = []
    for version in versions:
        engine.load_weights("", version)
        for _ in range(2):  # one resumes what waits, the next ends it
            found += engine.step()
    return found


class Refusing(Counting):
    """Cannot continue a response."""

    def resume(self, part: Continuation) -> None:
        if part.row == 2:
            raise ContractError("no room for this prompt")
        super().resume(part)


def test_a_group_that_the_engine_cannot_continue_is_refused_alone(tmp_path: Path) -> None:
    refused: list[tuple[str, type]] = []
    engine = budgeted(tmp_path, Refusing(), on_refusal=lambda name, error: refused.append((name, type(error))))
    engine.submit(REQUEST)
    engine.submit(make_request(prompt_id="short", group_size=1))
    assert [group.request_id for group in by_versions(engine, (1, 2, 3))] == ["g-short"]
    assert refused == [("g-p", ContractError)]
    assert engine.num_sampling == 0, "the rows that were continued are aborted"
    again = budgeted(tmp_path, Refusing())
    with pytest.raises(ContractError):
        again.submit(REQUEST)
    assert again.num_sampling == 0


def check_whole(group: SampledGroup) -> None:
    """3, 4 + 4 + 1 and 4 + 4 + 2 tokens: by version 1, then 2, then 5."""
    assert group.lengths.tolist() == [3, 9, 10]
    assert group.truncated.tolist() == [False, False, True]
    assert group.token_ids.tolist() == [*range(3), *range(100, 109), *range(200, 210)]
    second, third = [1] * 4 + [2] * 4 + [5], [1] * 4 + [2] * 4 + [5] * 2
    versions = [*[1] * 3, *second, *third]
    places = [*range(3), *range(9), *range(10)]
    assert group.spans is not None
    assert versions_of(group.spans).tolist() == versions
    assert group.versions.tolist() == [[1, 1], [1, 5], [1, 5]]
    want = np.array([-(v + i / 100) for v, i in zip(versions, places, strict=True)], np.float32)
    np.testing.assert_array_equal(group.logprobs, want)
    assert group.texts == ("row 0", "row 1", "row 2")


def test_every_token_keeps_the_version_and_the_log_prob_that_it_was_sampled_with() -> None:
    engine = budgeted()
    engine.submit(REQUEST)
    (group,) = by_versions(engine, [1, 2, 5])
    check_whole(group)
    assert engine.num_sampling == 0


def test_a_paused_group_waits_for_new_weights_and_others_are_sampled_meanwhile() -> None:
    heard: list[tuple[str, bool]] = []
    engine = budgeted(on_pause=lambda name, paused: heard.append((name, paused)))
    engine.submit(REQUEST)
    assert by_versions(engine, [1, 1, 1]) == []
    assert heard == [("g-p", True)]
    engine.submit(make_request(prompt_id="short", group_size=1))
    assert [group.request_id for group in by_versions(engine, [1])] == ["g-short"]
    by_versions(engine, [2])
    assert heard[1:] == [("g-p", False), ("g-p", True)]


def test_a_group_that_ends_within_its_budget_is_as_without_one(tmp_path: Path) -> None:
    engine = budgeted(tmp_path / "segments")
    engine.submit(make_request(group_size=1))
    (group,) = engine.step()
    assert (group.lengths.tolist(), group.spans) == ([3], None)
    assert not (tmp_path / "segments").exists()


@pytest.mark.parametrize("purpose", [Purpose.EVALUATE, Purpose.REEVALUATE])
def test_what_is_asked_of_one_version_has_no_budget(purpose: Purpose) -> None:
    engine = budgeted()
    engine.submit(make_request(group_size=3, purpose=purpose))
    (group,) = engine.step()
    assert group.lengths.tolist() == [3, 9, 10]


def test_another_worker_goes_on_where_one_was_killed(tmp_path: Path) -> None:
    first = budgeted(tmp_path)
    first.submit(REQUEST)
    by_versions(first, [1, 2])  # killed here: two segments are there
    engine = Counting()
    engine.policy_version = 5
    second = budgeted(tmp_path, engine)
    second.submit(REQUEST)
    assert [(part.row, len(part.token_ids), part.most) for part in engine.resumed] == [(1, 8, 2), (2, 8, 2)]
    (group,) = by_versions(second, [5])
    check_whole(group)


def test_a_group_that_was_done_but_not_delivered_is_not_sampled_again(tmp_path: Path) -> None:
    first = budgeted(tmp_path)
    first.submit(REQUEST)
    by_versions(first, [1, 2, 5])
    engine = Counting()
    engine.policy_version = 6
    second = budgeted(tmp_path, engine)
    second.submit(REQUEST)
    (group,) = second.step()
    check_whole(group)
    assert engine.resumed == []
    PartialRolloutStore(tmp_path).remove("g-p")
    assert list(tmp_path.iterdir()) == []
    PartialRolloutStore(tmp_path).remove("g-p")


def test_segments_of_weights_that_do_not_exist_any_more_are_not_used(tmp_path: Path) -> None:
    first = budgeted(tmp_path)
    first.submit(REQUEST)
    by_versions(first, [1, 2])
    assert PartialRolloutStore(tmp_path).load(REQUEST, 2) is not None
    assert PartialRolloutStore(tmp_path).load(REQUEST, 1) is None


# -- versions of tokens


def test_runs_and_versions_are_each_others_inverse() -> None:
    versions = np.array([1, 1, 2, 1, 3, 3], np.int32)
    assert runs_of(versions).tolist() == [[2, 1], [1, 2], [1, 1], [2, 3]]
    np.testing.assert_array_equal(versions_of(runs_of(versions)), versions)
    assert pairs_of(versions, np.array([3, 3], np.int32)).tolist() == [[1, 2], [1, 3]]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([[2, 1], [1, 2]], "spans of 3 tokens for 4"),
        ([[2, 1], [2, 2]], "inconsistent"),
        ([[4, 1], [0, 2]], "with at least one token each"),
    ],
)
def test_runs_that_say_something_else_than_the_pairs_are_refused(spans: list[list[int]], message: str) -> None:
    lengths, pairs = np.array([3, 1], np.int32), np.array([[1, 2], [1, 1]], np.int32)
    with pytest.raises(ContractError, match=message):
        require_spans("g", np.array(spans, np.int32), lengths, pairs)
    require_spans("g", np.array([[2, 1], [1, 2], [1, 1]], np.int32), lengths, pairs)


def test_segments_that_are_damaged_or_another_prompts_are_not_used(tmp_path: Path) -> None:
    first = budgeted(tmp_path)
    first.submit(REQUEST)
    by_versions(first, [1])
    (path,) = tmp_path.iterdir()
    other = replace(REQUEST, prompt=make_prompt(prompt_id="q"))
    assert PartialRolloutStore(tmp_path).load(other, 1) is None
    frame = path.read_bytes()
    for damaged in (b"", frame[:-4], frame[:40], b"x" * len(frame)):
        path.write_bytes(damaged)
        assert PartialRolloutStore(tmp_path).load(REQUEST, 1) is None
    path.write_bytes(frame)
    assert PartialRolloutStore(tmp_path).load(REQUEST, 1) is not None
