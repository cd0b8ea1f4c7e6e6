"""Responses in segments on disk, so that another worker can continue a group.

A file RUN/segments/<request id> is a frame of kind 3: the texts in its header; its body is the frame of the group so
far, with rewards of 0. It is written when a segment ends and removed when the buffer has the group.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import numpy as np

from bapo.core.codec import pack_group, unpack_group
from bapo.core.errors import BapoError, ContractError
from bapo.core.frames import KIND_PART, frame_start, open_frame
from bapo.core.sequences import sequences_of
from bapo.core.types import RolloutRequest, Timing
from bapo.runtime.run_directory.files import replace_file, storing
from rollout_server.rollouts.base import Rollout

log = logging.getLogger(__name__)

FOLDER = "segments"
"""Directory in the run directory."""


class SegmentFiles:
    """The segment files of one run. Without a folder nothing is stored."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def save(self, rollout: Rollout) -> None:
        """Write the file of a group. A disk error is logged and does not stop the run."""
        if self._folder is None:
            return
        path = self._path(rollout.request.request_id)
        try:
            with storing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, packed(rollout))
        except BapoError as error:
            log.warning("could not store the segments of group %s: %s", rollout.request.request_id, error)

    def load(self, request: RolloutRequest) -> Rollout | None:
        """The segments that another worker has stored; None if there are none that match."""
        path = None if self._folder is None else self._path(request.request_id)
        if path is None or not path.is_file():
            return None
        try:
            return unpacked(path.read_bytes(), request)
        except (ContractError, OSError) as error:
            log.warning("the segments of group %s cannot be used, it is sampled again: %s", request.request_id, error)
            return None

    def remove(self, request_id: str) -> None:
        """Delete the file of a delivered or failed group."""
        if self._folder is not None:
            self._path(request_id).unlink(missing_ok=True)

    def _path(self, request_id: str) -> Path:
        assert self._folder is not None
        return self._folder / quote(request_id, safe="")


def packed(rollout: Rollout) -> bytes:
    """The file of a group. Raises: ContractError."""
    rewards = np.zeros(len(rollout.sequences), np.float32)
    timing = Timing(claimed_at=0.0, sample_s=0.0, grade_s=0.0)
    body = pack_group(rollout.group(rewards, worker_id="", timing=timing))
    texts = [sequence.text for sequence in rollout.sequences]
    return frame_start(KIND_PART, {"texts": texts}, len(body)) + body


def unpacked(frame: bytes, request: RolloutRequest) -> Rollout:
    """Inverse of `packed`. Raises: ContractError for a damaged file, or one of another request."""
    header, body = open_frame(frame, KIND_PART)
    group, texts = unpack_group(body), header.get("texts")
    prompt_id = request.prompt.prompt_id
    if (group.group_id, group.prompt.prompt_id, group.size) != (request.request_id, prompt_id, request.group_size):
        raise ContractError(f"they are {group.size} responses of {group.group_id} to prompt {group.prompt.prompt_id}")
    if not isinstance(texts, list) or len(texts) != group.size:
        raise ContractError(f"they have the texts {texts!r:.200}")
    sequences = tuple(replace(sequence, text=text) for sequence, text in zip(sequences_of(group), texts, strict=True))
    return Rollout(request=request, prompt_token_ids=group.prompt_token_ids, sequences=sequences)
