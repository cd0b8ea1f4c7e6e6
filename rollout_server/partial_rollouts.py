"""Partial rollouts (Kimi k1.5): responses are sampled in segments of `rollout.generation_budget` tokens.

    submit --engine, at most `budget` tokens--> all rows done ------------------------------------> group
                                            \'--> some are not: PAUSED, stored in RUN/segments/<request id>
    PAUSED --new weights, or nothing else to sample--> each open row is resumed for another budget --> repeat

A few long responses thus block neither their batch nor the engine: while a group is paused, others are sampled. Every
token keeps its log-prob and version. Only fresh groups have a budget: evaluations and re-evaluations are sampled with
the weights of one version.

A file is one frame of kind 3 (header: rows, done, truncated, texts, spans; body as of a group). It is written when a
segment ends and removed when the buffer has the group, so another worker can continue a group.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from bapo.core.errors import BapoError, ContractError
from bapo.core.frames import KIND_PART, frame_start, open_frame
from bapo.core.token_arrays import Float32s, Int32s, pairs_of, runs_of, versions_of
from bapo.core.types import Prompt, Purpose, RolloutRequest
from bapo.runtime.run_directory.files import replace_file, storing
from bapo.runtime.vision import ReadImage
from rollout_server.engines.base import Continuation, Engine, Occupancy, SampledGroup

log = logging.getLogger(__name__)

FOLDER = "segments"
"""Directory in the run directory."""
IDLE_S = 0.5
"""An engine idle for this long has nothing else to sample: the maximum duration of a claim."""
NAP_S = 0.005


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """The sampled part of one response."""

    token_ids: Int32s
    logprobs: Float32s
    versions: Int32s
    """[L] policy version of each token."""
    done: bool
    truncated: bool
    text: str
    """Text of a finished response."""


@dataclass(slots=True, kw_only=True, eq=False)
class Draft:
    """A group with unfinished responses."""

    request: RolloutRequest
    prompt_token_ids: Int32s
    rows: list[Row]
    open: int = field(default=0)
    """Responses in the engine."""

    @property
    def unfinished(self) -> list[int]:
        """Indices of unfinished rows."""
        return [i for i, row in enumerate(self.rows) if not row.done]

    @property
    def newest_version(self) -> int:
        """Newest version of any token."""
        return max(int(row.versions.max()) for row in self.rows)

    def continuation(self, row: int, budget: int, limit: int) -> Continuation:
        """The next segment of a row."""
        so_far = self.rows[row].token_ids
        return Continuation(
            part_id=part_id(self.request.request_id, row),
            request=self.request,
            row=row,
            prompt_token_ids=self.prompt_token_ids,
            token_ids=so_far,
            most=min(budget, limit - len(so_far)),
        )

    def extend(self, row: int, part: SampledGroup, limit: int) -> None:
        """Append a segment to a row."""
        had, new = self.rows[row], rows_of(part, limit)[0]
        length = len(had.token_ids) + len(new.token_ids)
        self.rows[row] = Row(
            token_ids=np.concatenate([had.token_ids, new.token_ids]),
            logprobs=np.concatenate([had.logprobs, new.logprobs]),
            versions=np.concatenate([had.versions, new.versions]),
            done=not new.truncated or length >= limit,
            truncated=new.truncated,
            text=new.text,
        )

    def group(self) -> SampledGroup:
        """All rows as one group."""
        versions = np.concatenate([row.versions for row in self.rows])
        lengths = np.array([len(row.token_ids) for row in self.rows], np.int32)
        return SampledGroup(
            request_id=self.request.request_id,
            prompt_token_ids=self.prompt_token_ids,
            token_ids=np.concatenate([row.token_ids for row in self.rows]),
            logprobs=np.concatenate([row.logprobs for row in self.rows]),
            lengths=lengths,
            truncated=np.array([row.truncated for row in self.rows]),
            versions=pairs_of(versions, lengths),
            texts=tuple(row.text for row in self.rows),
            spans=runs_of(versions),
        )


def part_id(request_id: str, row: int) -> str:
    """Engine id of a row's next segment."""
    return f"{request_id}#{row}"


def rows_of(group: SampledGroup, limit: int) -> list[Row]:
    """The rows of a group; truncated ones below `limit` tokens are unfinished."""
    ends = np.cumsum(group.lengths)
    by_pair = np.repeat(group.versions[:, 0], group.lengths)
    versions = by_pair if group.spans is None else versions_of(group.spans)
    rows = []
    for i, end in enumerate(ends.tolist()):
        span = slice(end - int(group.lengths[i]), end)
        truncated = bool(group.truncated[i])
        done = not truncated or int(group.lengths[i]) >= limit
        rows.append(
            Row(
                token_ids=group.token_ids[span],
                logprobs=group.logprobs[span],
                versions=versions[span],
                done=done,
                truncated=truncated,
                text=group.texts[i],
            )
        )
    return rows


class PartialRolloutStore:
    """The segment files of one run. Without a folder nothing is stored."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def save(self, draft: Draft) -> None:
        """Write the file of a group. A disk error is logged and does not stop the run."""
        if self._folder is None:
            return
        path = self._path(draft.request.request_id)
        try:
            with storing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, pack_draft(draft))
        except BapoError as error:
            log.warning("could not store the segments of group %s: %s", draft.request.request_id, error)

    def load(self, request: RolloutRequest, version: int) -> Draft | None:
        """The segments that another worker has stored; None if there are none that match.

        Segments of weights newer than `version` are from before a rollback of the learner.
        """
        path = None if self._folder is None else self._path(request.request_id)
        if path is None or not path.is_file():
            return None
        try:
            draft = unpack_draft(path.read_bytes(), request)
        except (ContractError, OSError) as error:
            log.warning("the segments of group %s cannot be used: %s", request.request_id, error)
            return None
        if len(draft.rows) != request.group_size or draft.newest_version > version:
            return None
        log.info("group %s resumed from stored segments: %d rows open", request.request_id, len(draft.unfinished))
        return draft

    def remove(self, request_id: str) -> None:
        """Delete the file of a delivered or failed group."""
        if self._folder is not None:
            self._path(request_id).unlink(missing_ok=True)

    def _path(self, request_id: str) -> Path:
        assert self._folder is not None
        return self._folder / quote(request_id, safe="")


def pack_draft(draft: Draft) -> bytes:
    """Pack a draft as a frame."""
    group = draft.group()
    assert group.spans is not None
    header = {
        "id": group.request_id,
        "prompt_id": draft.request.prompt.prompt_id,
        "num_prompt": len(group.prompt_token_ids),
        "lengths": group.lengths.astype("<i4").tobytes(),
        "done": bytes(row.done for row in draft.rows),
        "truncated": bytes(row.truncated for row in draft.rows),
        "texts": list(group.texts),
        "spans": group.spans.astype("<i4").tobytes(),
    }
    ids = np.concatenate([group.prompt_token_ids, group.token_ids]).astype("<i4").tobytes()
    body = ids + group.logprobs.astype("<f4").tobytes()
    return frame_start(KIND_PART, header, len(body)) + body


def unpack_draft(frame: bytes, request: RolloutRequest) -> Draft:
    """Inverse of `pack_draft`. Raises: ContractError for a damaged frame or another request."""
    header, body = open_frame(frame, KIND_PART)
    try:
        if (header["id"], header["prompt_id"]) != (request.request_id, request.prompt.prompt_id):
            raise ContractError(f"segments belong to {header['id']} of prompt {header['prompt_id']}")
        lengths = np.frombuffer(header["lengths"], "<i4")
        num_ids = header["num_prompt"] + int(lengths.sum())
        if len(body) != 4 * (num_ids + int(lengths.sum())) or int(lengths.min()) < 1:
            raise ContractError(f"{len(body)} body bytes for {num_ids} tokens")
        ids, logprobs = np.frombuffer(body, "<i4", num_ids), np.frombuffer(body, "<f4", offset=4 * num_ids)
        versions = versions_of(np.frombuffer(header["spans"], "<i4").reshape(-1, 2))
        fields = zip(_spans_of(lengths), header["done"], header["truncated"], header["texts"], strict=True)
        rows = [
            Row(
                token_ids=ids[header["num_prompt"] :][span],
                logprobs=logprobs[span],
                versions=versions[span],
                done=bool(done),
                truncated=bool(truncated),
                text=text,
            )
            for span, done, truncated, text in fields
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ContractError(f"segments are malformed: {error!r}") from error
    return Draft(request=request, prompt_token_ids=ids[: header["num_prompt"]], rows=rows)


def _spans_of(lengths: Int32s) -> Sequence[slice]:
    ends = np.cumsum(lengths).tolist()
    return [slice(end - int(length), end) for end, length in zip(ends, lengths, strict=True)]


class SegmentedEngine:
    """An `Engine` that samples fresh groups of another engine in segments. Owned by one thread."""

    def __init__(
        self,
        engine: Engine,
        *,
        budget: int,
        limit: int,
        store: PartialRolloutStore,
        on_pause: Callable[[str, bool], None] = lambda request_id, paused: None,
        on_refusal: Callable[[str, ContractError], None] = lambda request_id, error: None,
        now: Callable[[], float] = time.monotonic,
        idle_s: float | None = None,
    ) -> None:
        """
        Args:
            limit: response length limit, in tokens.
            on_pause: called when a group begins (True) or ends (False) to wait for its next budget.
            on_refusal: called when the engine cannot continue a group.
        """
        self._engine, self._store = engine, store
        self._budget, self._limit = budget, limit
        self._on_pause, self._on_refusal, self._now = on_pause, on_refusal, now
        self._idle_s = IDLE_S if idle_s is None else idle_s
        self._requests: dict[str, RolloutRequest] = {}
        self._drafts: dict[str, Draft] = {}
        self._paused: dict[str, int] = {}
        self._complete: list[SampledGroup] = []
        self._busy_at = now()

    @property
    def policy_version(self) -> int:
        """As of the engine."""
        return self._engine.policy_version

    @property
    def num_sampling(self) -> int:
        """Includes paused groups, so that `step` is called and can resume them."""
        return self._engine.num_sampling + len(self._paused) + len(self._complete)

    @property
    def occupancy(self) -> Occupancy:
        """As of the engine: paused groups do not use it."""
        return self._engine.occupancy

    def check_prompts(self, prompts: Sequence[Prompt], image: ReadImage) -> None:
        """As of the engine."""
        self._engine.check_prompts(prompts, image)

    def encode_response(self, text: str) -> Int32s:
        """As of the engine."""
        return self._engine.encode_response(text)

    def submit(self, request: RolloutRequest, most: int | None = None) -> None:
        """Start a group, or continue the stored segments of another worker."""
        if request.purpose is not Purpose.FRESH:
            self._engine.submit(request, most)
            return
        draft = self._store.load(request, self.policy_version)
        if draft is None:
            self._engine.submit(request, most=min(self._budget, self._limit))
            self._requests[request.request_id] = request
        else:
            self._drafts[request.request_id] = draft
            try:
                self._continue(draft)
            except ContractError:
                self.abort(request.request_id)  # with the rows that have begun
                raise

    def resume(self, part: Continuation) -> None:
        """As of the engine."""
        self._engine.resume(part)

    def abort(self, request_id: str) -> None:
        """Stop sampling a group; its file stays, because another worker may continue it."""
        draft = self._drafts.pop(request_id, None)
        for row in () if draft is None else draft.unfinished:
            self._engine.abort(part_id(request_id, row))
        self._requests.pop(request_id, None)
        self._paused.pop(request_id, None)
        self._engine.abort(request_id)

    def step(self) -> list[SampledGroup]:
        """One engine step; returns the groups whose rows are all done."""
        finished, self._complete = self._complete, []
        if self._engine.num_sampling:
            self._busy_at = self._now()
            for group in self._engine.step():
                finished += self._handle(group)
        elif not finished:
            time.sleep(NAP_S)
        self._resume_due()
        return finished

    def load_weights(self, path: str, version: int) -> None:
        """As of the engine; paused groups continue with the new weights."""
        self._engine.load_weights(path, version)

    def join_transfer(self, backend: str, init_info: Mapping[str, Any]) -> None:
        """As of the engine."""
        self._engine.join_transfer(backend, init_info)

    def receive_weights(self, update_info: Mapping[str, Any], version: int) -> None:
        """As `load_weights`."""
        self._engine.receive_weights(update_info, version)

    def logprobs(self, token_ids: Sequence[int]) -> Float32s | None:
        """As of the engine."""
        return self._engine.logprobs(token_ids)

    def close(self) -> None:
        """Free the engine; paused groups stay in the store."""
        self._engine.close()

    def _handle(self, group: SampledGroup) -> list[SampledGroup]:
        """Handle a result of the engine: a first segment, a further one, or a group without a budget."""
        request = self._requests.pop(group.request_id, None)
        if request is not None:
            rows = rows_of(group, self._limit)
            if all(row.done for row in rows):
                return [group]
            draft = Draft(request=request, prompt_token_ids=group.prompt_token_ids, rows=rows)
            self._drafts[request.request_id] = draft
            self._pause(draft)
            return []
        request_id, _, row = group.request_id.rpartition("#")
        found = self._drafts.get(request_id)
        if found is None:
            return [group]
        found.extend(int(row), group, self._limit)
        found.open -= 1
        if found.open:
            return []
        if found.unfinished:
            self._pause(found)
            return []
        self._store.save(found)
        del self._drafts[request_id]
        return [found.group()]

    def _pause(self, draft: Draft) -> None:
        self._store.save(draft)
        self._paused[draft.request.request_id] = self.policy_version
        self._on_pause(draft.request.request_id, True)

    def _resume_due(self) -> None:
        idle = not self._engine.num_sampling and self._now() - self._busy_at >= self._idle_s
        due = [name for name, version in self._paused.items() if idle or version < self.policy_version]
        for request_id in due:
            del self._paused[request_id]
            self._on_pause(request_id, False)
            try:
                self._continue(self._drafts[request_id])
            except ContractError as error:
                self.abort(request_id)
                self._on_refusal(request_id, error)

    def _continue(self, draft: Draft) -> None:
        rows = draft.unfinished
        if not rows:  # its worker died between the last token and the buffer's acknowledgement
            del self._drafts[draft.request.request_id]
            self._complete.append(draft.group())
            return
        draft.open = len(rows)
        for row in rows:
            self._engine.resume(draft.continuation(row, self._budget, self._limit))
