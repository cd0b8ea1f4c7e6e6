"""A group whose responses are sampled in segments: what each has so far, and how it outlives its worker.

    RUN/segments/<request id>   one frame of kind 3: header (rows, done, truncated, texts, spans), body as of a group

A file per group that has stopped at its budget: written when a segment ends, removed when the buffer has the group.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import numpy as np

from bapo.core.errors import BapoError, ContractError
from bapo.core.frames import KIND_PART, frame_start, open_frame
from bapo.core.token_arrays import Float32s, Int32s, pairs_of, runs_of, versions_of
from bapo.core.types import Purpose, RolloutRequest
from bapo.runtime.run_directory.files import replace_file, storing
from rollout_server.engines.base import Continuation, Engine, Occupancy, SampledGroup

log = logging.getLogger(__name__)

FOLDER = "segments"
"""Of a run directory."""


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """One response so far."""

    token_ids: Int32s
    logprobs: Float32s
    versions: Int32s
    """[L] of each token."""
    done: bool
    truncated: bool
    text: str
    """Of a response that is done."""


@dataclass(slots=True, kw_only=True, eq=False)
class Draft:
    """A group of which some responses are not done."""

    request: RolloutRequest
    prompt_token_ids: Int32s
    rows: list[Row]
    open: int = field(default=0)
    """Responses that the engine has now."""

    @property
    def unfinished(self) -> list[int]:
        """Rows that go on."""
        return [i for i, row in enumerate(self.rows) if not row.done]

    @property
    def newest_version(self) -> int:
        """That sampled any token."""
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
        """Append a segment: what was there is not touched."""
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
        """All rows, as one group with the versions of its tokens."""
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
    """Id of a row's next segment in the engine."""
    return f"{request_id}#{row}"


def rows_of(group: SampledGroup, limit: int) -> list[Row]:
    """The rows of a group whose truncated responses may go on up to `limit` tokens."""
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


class Shelf:
    """The files of one run. Without a folder nothing is kept: a draft then dies with its worker."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def save(self, draft: Draft) -> None:
        """Replace what was kept of this group. A disk that fails costs the draft's safety, not the run."""
        if self._folder is None:
            return
        path = self._path(draft.request.request_id)
        try:
            with storing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, pack_draft(draft))
        except BapoError as error:
            log.warning("the segments of group %s are not kept: %s", draft.request.request_id, error)

    def load(self, request: RolloutRequest, version: int) -> Draft | None:
        """What another worker has left of this group; None when there is nothing that fits.

        A draft of weights newer than `version` is from before the learner went back to a checkpoint.
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
        log.info("group %s goes on where its worker ended: %d rows open", request.request_id, len(draft.unfinished))
        return draft

    def remove(self, request_id: str) -> None:
        """The buffer has the group, or nobody wants it."""
        if self._folder is not None:
            self._path(request_id).unlink(missing_ok=True)

    def _path(self, request_id: str) -> Path:
        assert self._folder is not None
        return self._folder / quote(request_id, safe="")


def pack_draft(draft: Draft) -> bytes:
    """One frame."""
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
    """Inverse of `pack_draft`. Raises: ContractError for a damaged frame, or one of another request."""
    header, body = open_frame(frame, KIND_PART)
    try:
        if (header["id"], header["prompt_id"]) != (request.request_id, request.prompt.prompt_id):
            raise ContractError(f"these are the segments of {header['id']} of prompt {header['prompt_id']}")
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


# A generation budget: an engine whose responses get so many tokens per policy version (Kimi k1.5).
#
#     submit --engine, at most `budget` tokens--> all rows done ------------------------------------> group
#                                            '--> some are not: PAUSED, kept on the shelf
#     PAUSED --new weights, or nothing else to sample--> each open row is resumed for another budget --> and again
#
# So a few long responses hold up neither their batch nor the engine: while a group is paused, others are sampled. A
# group
# comes out when its last row is done; every token keeps the log-prob and the version that it was sampled with. Fresh
# groups alone have a budget: evaluations and re-evaluations ask for the weights of one version.

IDLE_S = 0.5
"""An engine without work for so long has nothing else to sample: as long as a worker's claim may take."""
NAP_S = 0.005


class Budgeted:
    """An `Engine` over another one. Like it, it belongs to one thread."""

    def __init__(
        self,
        engine: Engine,
        *,
        budget: int,
        limit: int,
        shelf: Shelf,
        on_pause: Callable[[str, bool], None] = lambda request_id, paused: None,
        now: Callable[[], float] = time.monotonic,
        idle_s: float | None = None,
    ) -> None:
        """
        Args:
            limit: tokens at which a response is truncated for good.
            on_pause: hears of a group that waits for its next budget, or no longer does.
        """
        self._engine, self._shelf = engine, shelf
        self._budget, self._limit = budget, limit
        self._on_pause, self._now = on_pause, now
        self._idle_s = IDLE_S if idle_s is None else idle_s
        self._requests: dict[str, RolloutRequest] = {}
        self._drafts: dict[str, Draft] = {}
        self._paused: dict[str, int] = {}
        self._complete: list[SampledGroup] = []
        self._busy_at = now()

    @property
    def policy_version(self) -> int:
        """Of the engine."""
        return self._engine.policy_version

    @property
    def num_sampling(self) -> int:
        """Also counts what is paused, so that `step` is called and can resume it."""
        return self._engine.num_sampling + len(self._paused) + len(self._complete)

    @property
    def occupancy(self) -> Occupancy:
        """Of the engine: what is paused takes no room in it."""
        return self._engine.occupancy

    def check_prompts(self, texts: Sequence[str]) -> None:
        """As the engine does."""
        self._engine.check_prompts(texts)

    def encode_response(self, text: str) -> Int32s:
        """As the engine does."""
        return self._engine.encode_response(text)

    def submit(self, request: RolloutRequest, most: int | None = None) -> None:
        """Begin a group, or go on with what another worker has left of it."""
        if request.purpose is not Purpose.FRESH:
            self._engine.submit(request, most)
            return
        draft = self._shelf.load(request, self.policy_version)
        if draft is None:
            self._engine.submit(request, most=min(self._budget, self._limit))
            self._requests[request.request_id] = request
        else:
            self._drafts[request.request_id] = draft
            self._go_on(draft)

    def resume(self, part: Continuation) -> None:
        """As the engine does."""
        self._engine.resume(part)

    def abort(self, request_id: str) -> None:
        """Forget a group; what is kept of it stays, because somebody else may sample it now."""
        draft = self._drafts.pop(request_id, None)
        for row in () if draft is None else draft.unfinished:
            self._engine.abort(part_id(request_id, row))
        self._requests.pop(request_id, None)
        self._paused.pop(request_id, None)
        self._engine.abort(request_id)

    def step(self) -> list[SampledGroup]:
        """One step of the engine; returns groups all of whose rows are done."""
        finished, self._complete = self._complete, []
        if self._engine.num_sampling:
            self._busy_at = self._now()
            for group in self._engine.step():
                finished += self._taken(group)
        elif not finished:
            time.sleep(NAP_S)
        self._resume_due()
        return finished

    def load_weights(self, path: str, version: int) -> None:
        """As the engine does; what is paused goes on with them."""
        self._engine.load_weights(path, version)

    def logprobs(self, token_ids: Sequence[int]) -> Float32s | None:
        """As the engine does."""
        return self._engine.logprobs(token_ids)

    def close(self) -> None:
        """Free the engine; what is paused is on the shelf."""
        self._engine.close()

    def _taken(self, group: SampledGroup) -> list[SampledGroup]:
        """What the engine has finished: a first segment, a further one, or something without a budget."""
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
        self._shelf.save(found)
        del self._drafts[request_id]
        return [found.group()]

    def _pause(self, draft: Draft) -> None:
        self._shelf.save(draft)
        self._paused[draft.request.request_id] = self.policy_version
        self._on_pause(draft.request.request_id, True)

    def _resume_due(self) -> None:
        idle = not self._engine.num_sampling and self._now() - self._busy_at >= self._idle_s
        due = [name for name, version in self._paused.items() if idle or version < self.policy_version]
        for request_id in due:
            del self._paused[request_id]
            self._on_pause(request_id, False)
            self._go_on(self._drafts[request_id])

    def _go_on(self, draft: Draft) -> None:
        rows = draft.unfinished
        if not rows:  # its worker died between the last token and the buffer's acknowledgement
            del self._drafts[draft.request.request_id]
            self._complete.append(draft.group())
            return
        draft.open = len(rows)
        for row in rows:
            self._engine.resume(draft.continuation(row, self._budget, self._limit))
