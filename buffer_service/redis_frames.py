"""Frames out of Redis: all at once, or in chunks that are sent on while the next one is on its way."""

from __future__ import annotations

from collections.abc import Sequence

from buffer_service.redis_keys import Keys
from buffer_service.redis_link import RedisLink
from buffer_service.store import FrameChunks

FRAMES_AT_ONCE = 32
"""One reply of Redis: at most some ten megabytes."""
CHUNK_BYTES = 1 << 20
"""Frames that are read and sent on at once: few enough to stay in the processor's cache."""


def read_frames(link: RedisLink, keys: Keys, group_ids: Sequence[str]) -> list[bytes | memoryview | None]:
    """See `Store.frames`."""
    found: list[bytes | memoryview | None] = []
    for first in range(0, len(group_ids), FRAMES_AT_ONCE):
        found += link.values([keys.group(key) for key in group_ids[first : first + FRAMES_AT_ONCE]])
    return found


def read_frame_chunks(link: RedisLink, keys: Keys, group_ids: Sequence[str], num_bytes: int) -> FrameChunks:
    """See `Store.frame_chunks`. Redis is asked for the next frames before the last ones are read."""
    size = max(1, num_bytes // max(1, len(group_ids)))
    number = max(1, CHUNK_BYTES // size)
    parts = [
        [keys.group(key) for key in group_ids[first : first + number]] for first in range(0, len(group_ids), number)
    ]
    with link.reading() as stream:
        for part, following in zip(parts, [*parts[1:], None], strict=False):
            if part is parts[0]:
                stream.ask(part)
            if following is not None:
                stream.ask(following)
            yield list(stream.read(len(part), expected_bytes=2 * CHUNK_BYTES, reuse=True))
