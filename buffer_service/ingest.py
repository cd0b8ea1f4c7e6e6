"""Validation of pushed groups before the store sees them: headers, valid names, published versions, one content per id
of a push. Also checks that the groups of a claiming worker would be accepted.

The store checks atomically that a group matches its request, that its frame exists and that it does not differ from a
stored one; the reader of a frame checks its content (`bapo.core.codec.frame_problem`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from bapo.core.call_limits import MAX_GROUPS
from bapo.core.codec import PushedGroup, read_group_header
from bapo.core.errors import ContractError, Refusal
from bapo.core.frames import declared_bytes, head_digest
from bapo.core.types import NAME, PROMPT_ID
from buffer_service.state import Incoming, record_of
from buffer_service.store.redis.store import RedisStore

_NAME, _LABEL, _PROMPT_ID = re.compile(NAME), re.compile(f"({NAME})?"), re.compile(PROMPT_ID)
KNOWN_S = 1.0
"""How long a version is cached as published: another service may restore a state with lower versions."""
FRAME_NAME = re.compile("[0-9a-f]{32}")
DIGEST = re.compile("[0-9a-f]{32}")


def incoming(group: PushedGroup) -> Incoming:
    """Convert a pushed group from its header. Raises: ContractError."""
    header = read_group_header(group.head)
    if not FRAME_NAME.fullmatch(group.name) or not DIGEST.fullmatch(group.digest):
        raise ContractError(f"group {header.group_id}: invalid frame name or missing digest", Refusal.NAME)
    if group.digest[:16] != head_digest(group.head):
        raise ContractError(f"group {header.group_id}: the frame digest does not match the header", Refusal.FRAME)
    record = record_of(header, declared_bytes(group.head), group.digest)
    return Incoming(record=record, frame_name=group.name, newest_version=header.newest_version)


class Ingest:
    """The checks of one service instance. All methods raise ContractError."""

    def __init__(self, store: RedisStore, now: Callable[[], float] = time.monotonic) -> None:
        self._store, self._now = store, now
        self._newest = 0
        """Highest version known to be published; cached, so that the store is rarely read."""
        self._asked_at = -KNOWN_S

    def checked(self, pushed: Sequence[PushedGroup]) -> list[Incoming]:
        """Validate all groups of one push before any is stored."""
        if not 0 < len(pushed) <= MAX_GROUPS:
            message = f"{len(pushed)} groups in one push, must be 1 to {MAX_GROUPS}: split them into several pushes"
            raise ContractError(message, Refusal.TOO_MANY)
        groups = [incoming(group) for group in pushed]
        if len({group.frame_name for group in groups}) < len(groups):
            raise ContractError("two groups of this push reference the same frame", Refusal.FRAME)
        digests: dict[str, str] = {}
        for group in groups:
            _check_names(group)
            if digests.setdefault(group.record.group_id, group.record.digest) != group.record.digest:
                message = f"group {group.record.group_id} occurs twice in this push with different content"
                raise ContractError(message, Refusal.OTHER_CONTENT)
        newest = max(groups, key=lambda group: group.newest_version)
        if ahead := self.ahead(newest.newest_version):
            raise ContractError(
                f"group {newest.record.group_id} was sampled with {ahead}; the learner reports its progress before "
                "workers use a version",
                Refusal.FUTURE_VERSION,
            )
        return groups

    def ahead(self, version: int) -> str:
        """Why the learner cannot have published this version in the current state of the run; '' if it can."""
        if self._is_known(version):
            return ""
        # The learner publishes theta_{t+1} before it reports it, at most one after the newest assembled batch.
        published = max(self._store.readiness(1).assembled + 1, self._store.progress().policy_version)
        if version > published:
            return f"policy version {version}, but the learner has published {published} at most"
        self._newest, self._asked_at = published, self._now()
        return ""

    def forget(self) -> None:
        """Clear the cache after a restore: versions may be lower now."""
        self._newest = 0

    def _is_known(self, version: int) -> bool:
        return version <= self._newest and self._now() - self._asked_at < KNOWN_S


def _check_names(group: Incoming) -> None:
    record = group.record
    if not (_NAME.fullmatch(record.group_id) and _NAME.fullmatch(record.worker_id)):
        message = f"group id {record.group_id!r:.200} or worker id {record.worker_id!r:.200} is not a plain name"
        raise ContractError(message, Refusal.NAME)
    if not (_PROMPT_ID.fullmatch(record.prompt_id) and _LABEL.fullmatch(record.label)):
        message = f"prompt id {record.prompt_id!r:.200} or label {record.label!r:.200} is not a plain name"
        raise ContractError(message, Refusal.NAME)
