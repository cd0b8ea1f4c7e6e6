"""A group whose responses are sampled in segments: what each has so far, and how it outlives its worker.

    RUN/segments/<request id>   one frame of kind 3: header (rows, done, truncated, texts, spans), body as of a group

A file per group that has stopped at its budget: written when a segment ends, removed when the buffer has the group.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import numpy as np

from bapo.columns import Float32s, Int32s
from bapo.errors import BapoError, ContractError
from bapo.frames import KIND_PART, frame_start, open_frame
from bapo.spans import pairs_of, runs_of, versions_of
from bapo.storage import replace_file, storing
from bapo.types import RolloutRequest
from rollout_server.engines.base import Continuation, SampledGroup

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
