"""Responses in segments, by hand: what each token says, when groups wait, and what outlives a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bapo.core.errors import ContractError
from bapo.core.sequences import SampledSequence
from bapo.core.token_arrays import pairs_of, require_spans, runs_of, versions_of
from bapo.core.types import Outcome, Purpose, Timing
from rollout_server.engines.base import Completed, Completion, Occupancy
from rollout_server.engines.scripted import CharacterTokenization
from rollout_server.rollouts.base import Rollout
from rollout_server.rollouts.segment_files import SegmentFiles
from rollout_server.rollouts.segmented import Segmented
from rollout_server.sampler import Sampler
from tests.support.factories import make_prompt, make_request
from tests.support.rollout import make_config

LIMIT = 10
REQUEST = make_request(group_size=3)
WANTED = (3, 9, 99)
"""Tokens after which each response would end by itself."""
PROMPT = len(REQUEST.prompt.text)
ROLLOUT = make_config(max_response_tokens=LIMIT).rollout.model_copy(update={"generation_budget": 4})
CONFIG = make_config().model_copy(update={"rollout": ROLLOUT})


class Counting:
    """An engine whose i-th token of a response is 100 row + i, with log-prob -(version + i / 100); a step ends all."""

    def __init__(self) -> None:
        self.policy_version = 1
        self._done: dict[str, Completed] = {}
        self.continued: list[tuple[int, int, int]] = []
        """Response, its tokens before, and the most new ones."""

    @property
    def occupancy(self) -> Occupancy:
        return Occupancy(running=len(self._done))

    def add(self, completion: Completion) -> None:
        start = len(completion.token_ids) - PROMPT
        rows = range(completion.num)
        if start:
            row = int(completion.call_id.rpartition("#")[2])
            rows = range(row, row + 1)
            self.continued.append((row, start, completion.max_tokens))
        self._done[completion.call_id] = Completed(
            call_id=completion.call_id,
            token_ids=np.array(completion.token_ids, np.int32),
            sequences=tuple(self._sequence(row, start, completion.max_tokens) for row in rows),
        )

    def _sequence(self, row: int, start: int, most: int) -> SampledSequence:
        places = np.arange(start, min(WANTED[row], start + most))
        return SampledSequence(
            token_ids=(100 * row + places).astype(np.int32),
            rollout_logprobs=-(self.policy_version + places / 100).astype(np.float32),
            versions=np.full(len(places), self.policy_version, np.int32),
            outcome=Outcome.TRUNCATED if WANTED[row] > start + most else Outcome.GRADED,
            text=f"row {row}",
        )

    def abort(self, call_id: str) -> None:
        self._done.pop(call_id, None)

    def step(self) -> list[Completed]:
        done, self._done = list(self._done.values()), {}
        return done

    def load_weights(self, path: str, version: int) -> bool:
        self.policy_version = version
        return True

    def close(self) -> None: ...


class Lettered(CharacterTokenization):
    """Token 100 row + i is a letter: a, b, c, ..."""

    def num_until_stop(self, token_ids: Sequence[int], stop: Sequence[str]) -> int | None:
        text = "".join(chr(ord("a") + token % 100) for token in token_ids)
        ends = [text.find(each) + len(each) for each in stop if each in text]
        return min(ends, default=None)


class Worker:
    """What samples in segments: budget 4, limit 10."""

    def __init__(
        self, folder: Path | None = None, engine: Counting | None = None, version: int = 1, stop: tuple[str, ...] = ()
    ) -> None:
        self.engine = engine or Counting()
        self.sampler = Sampler(lambda: self.engine)
        self.sampler.start()
        self.sampler.call(lambda engine: engine.load_weights("", version)).result(10.0)
        self.pauses: list[tuple[str, bool]] = []
        self._heard = asyncio.Event()
        tokenization, files = Lettered(300, LIMIT), SegmentFiles(folder)
        config = CONFIG.model_copy(update={"rollout": ROLLOUT.model_copy(update={"stop": stop})})
        self.program = Segmented(config, tokenization, self.sampler, files=files, on_pause=self._note)

    def _note(self, request_id: str, paused: bool) -> None:
        self.pauses.append((request_id, paused))
        self._heard.set()

    async def load(self, version: int) -> None:
        await asyncio.wrap_future(self.sampler.call(lambda engine: engine.load_weights("", version)))

    async def paused(self, times: int) -> None:
        """Wait until groups have been paused this often."""
        while sum(paused for _, paused in self.pauses) < times:
            self._heard.clear()
            await self._heard.wait()


StartWorker = Callable[..., Worker]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[StartWorker]:
    """Paused groups wait for new weights alone."""
    monkeypatch.setattr("rollout_server.rollouts.segmented.IDLE_S", 1e9)
    started: list[Worker] = []

    def begin(*arguments: Any, **keywords: Any) -> Worker:
        started.append(Worker(*arguments, **keywords))
        return started[-1]

    yield begin
    for worker in started:
        worker.sampler.stop(5.0)


def run(story: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(story, 20))


async def by_versions(worker: Worker, versions: Sequence[int]) -> Rollout | None:
    """The request, with new weights at each pause; None if it is paused still when there are no more: killed."""
    task = asyncio.ensure_future(worker.program.run(REQUEST))
    for times, version in enumerate(versions, 1):
        await worker.paused(times)
        await worker.load(version)
    if len(versions) < 2:
        await worker.paused(len(versions) + 1)
        task.cancel()
        return None
    return await task


def check_whole(rollout: Rollout | None) -> None:
    """3, 4 + 4 + 1 and 4 + 4 + 2 tokens: by version 1, then 2, then 5."""
    assert rollout is not None
    group = rollout.group(np.zeros(3, np.float32), worker_id="", timing=Timing(claimed_at=0, sample_s=0, grade_s=0))
    assert group.lengths.tolist() == [3, 9, 10]
    assert group.outcomes.tolist() == [Outcome.GRADED, Outcome.GRADED, Outcome.TRUNCATED]
    assert group.token_ids.tolist() == [*range(3), *range(100, 109), *range(200, 210)]
    versions = [*[1] * 3, *[1] * 4, *[2] * 4, 5, *[1] * 4, *[2] * 4, 5, 5]
    places = [*range(3), *range(9), *range(10)]
    assert group.token_versions.tolist() == versions
    assert group.versions.tolist() == [[1, 1], [1, 5], [1, 5]]
    want = np.array([-(v + i / 100) for v, i in zip(versions, places, strict=True)], np.float32)
    np.testing.assert_allclose(group.rollout_logprobs, want, rtol=1e-6)
    assert [sequence.text for sequence in rollout.sequences] == ["row 0", "row 1", "row 2"]
    assert len(rollout.prompt_token_ids) == PROMPT


def test_every_token_keeps_the_version_and_the_log_prob_that_it_was_sampled_with(start: StartWorker) -> None:
    worker = start()
    check_whole(run(by_versions(worker, [2, 5])))
    assert worker.engine.occupancy.running == 0


def test_a_paused_group_waits_for_new_weights_and_others_are_sampled_meanwhile(start: StartWorker) -> None:
    worker = start()

    async def story() -> None:
        long = asyncio.ensure_future(worker.program.run(REQUEST))
        await worker.paused(1)
        short = await worker.program.run(make_request(prompt_id="short", group_size=1))
        assert len(short.sequences[0].token_ids) == 3
        assert (long.done(), worker.pauses) == (False, [("g-p", True)])
        await worker.load(2)
        await worker.paused(2)
        assert worker.pauses[1:] == [("g-p", False), ("g-p", True)]
        long.cancel()

    run(story())


def test_a_stop_text_that_begins_in_one_segment_and_ends_in_the_next_ends_the_response(start: StartWorker) -> None:
    worker = start(stop=("de", "x"))

    async def story() -> Rollout:
        sampling = asyncio.ensure_future(worker.program.run(REQUEST))
        await worker.paused(1)
        await worker.load(2)
        return await sampling

    rollout = run(story())
    assert [row.token_ids.tolist() for row in rollout.sequences] == [
        [*range(3)],
        [*range(100, 105)],
        [*range(200, 205)],
    ]
    assert [row.versions.tolist() for row in rollout.sequences] == [[1, 1, 1], [1, 1, 1, 1, 2], [1, 1, 1, 1, 2]]
    assert {row.outcome for row in rollout.sequences} == {Outcome.GRADED}


def test_a_group_that_ends_within_its_budget_is_as_without_one(start: StartWorker, tmp_path: Path) -> None:
    worker = start(tmp_path / "segments")
    rollout = run(worker.program.run(make_request(group_size=1)))
    assert len(rollout.sequences[0].token_ids) == 3
    assert not (tmp_path / "segments").exists()


@pytest.mark.parametrize("purpose", [Purpose.EVALUATE, Purpose.REEVALUATE])
def test_what_is_asked_of_one_version_has_no_budget(start: StartWorker, purpose: Purpose) -> None:
    rollout = run(start().program.run(make_request(group_size=3, purpose=purpose)))
    assert [len(sequence.token_ids) for sequence in rollout.sequences] == [3, 9, 10]


class Refusing(Counting):
    """Cannot continue a response."""

    def add(self, completion: Completion) -> None:
        if completion.call_id.endswith("#2"):
            raise ContractError("no room for this prompt")
        super().add(completion)

    def step(self) -> list[Completed]:
        return []


def test_a_group_that_the_engine_cannot_continue_is_refused_and_its_other_responses_are_aborted(
    start: StartWorker, tmp_path: Path
) -> None:
    run(by_versions(start(tmp_path), [2]))
    worker = start(tmp_path, Refusing(), version=5)
    with pytest.raises(ContractError):
        run(worker.program.run(REQUEST))
    assert worker.engine.continued == [(1, 8, 1 + 1)]
    assert worker.sampler.call(lambda engine: engine.occupancy.running).result(10.0) == 0


def test_another_worker_goes_on_where_one_was_killed(start: StartWorker, tmp_path: Path) -> None:
    assert run(by_versions(start(tmp_path), [2])) is None  # killed here: two segments are there
    second = start(tmp_path, version=5)
    check_whole(run(second.program.run(REQUEST)))
    assert second.engine.continued == [(1, 8, 2), (2, 8, 2)]


def test_a_group_that_was_done_but_not_delivered_is_not_sampled_again(start: StartWorker, tmp_path: Path) -> None:
    run(by_versions(start(tmp_path), [2, 5]))
    second = start(tmp_path, version=6)
    check_whole(run(second.program.run(REQUEST)))
    assert second.engine.continued == []
    SegmentFiles(tmp_path).remove("g-p")
    assert list(tmp_path.iterdir()) == []
    SegmentFiles(tmp_path).remove("g-p")


def test_segments_of_weights_that_do_not_exist_any_more_are_not_used(start: StartWorker, tmp_path: Path) -> None:
    run(by_versions(start(tmp_path), [2]))
    second = start(tmp_path, version=1)
    assert run(by_versions(second, [])) is None
    assert second.engine.continued == []


def test_segments_that_are_damaged_or_another_requests_are_not_used(start: StartWorker, tmp_path: Path) -> None:
    run(by_versions(start(tmp_path), []))
    (path,) = tmp_path.iterdir()
    files = SegmentFiles(tmp_path)
    for other in ({"prompt": make_prompt(prompt_id="q")}, {"group_size": 4}):
        assert files.load(msgspec.structs.replace(REQUEST, **other)) is None
    frame = path.read_bytes()
    for damaged in (b"", frame[:-4], frame[:40], b"x" * len(frame)):
        path.write_bytes(damaged)
        assert files.load(REQUEST) is None
    path.write_bytes(frame)
    assert files.load(REQUEST) is not None


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
