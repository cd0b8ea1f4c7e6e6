"""Where the buffer is, and how much it holds."""

from __future__ import annotations

from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from bapo.algorithms.settings import MAX_SECONDS, Frozen

MAXMEMORY_SHARE = 0.9
"""Of the memory that the embedded Redis may have. It counts what it has asked for; a buffer that was full for ten
minutes occupied 1.21 times as much."""


class BufferConfig(Frozen):
    """The buffer service and its Redis."""

    host: str = "127.0.0.1"
    """Address that the service listens on, unless BAPO_HOST says otherwise."""
    port: int = Field(8700, ge=0, le=65535)
    """Port of the API; 0 takes a free port."""
    url: str | None = None
    """A buffer service that is already running, or several replicas of it with commas between their URLs; null: the
    launcher starts one."""
    redis_url: str | None = None
    """A Redis that is already running, without its password (BAPO_REDIS_PASSWORD_FILE has that); null: the launcher
    starts an embedded one."""
    appendfsync: Literal["everysec", "always"] = "everysec"
    """Durability of the embedded Redis: everysec may lose about the last second at power loss, always loses nothing."""
    max_memory_mb: int = Field(2048, ge=16)
    """Memory limit of the embedded Redis: nine tenths are its maxmemory, beyond which pushes are refused with 503 and
    nothing is evicted; the rest is for what its allocator holds besides."""
    direct: bool = True
    """A learner on the machine of a Redis with a unix socket (the embedded one) may read the frames of its batches
    there, as a Redis user that can do nothing else; false: all batches go through the service."""
    max_fresh_groups: int | None = Field(None, ge=1)
    """Fresh groups that may wait for the learner: beyond it, while the next batch is complete, workers get no fresh
    requests and their pushes wait (429). At least algorithm.batch_size; null: as many as were asked for."""
    max_fresh_mb: int | None = Field(None, ge=1)
    """The same limit in MB of their frames; null: none but max_memory_mb."""
    lease_s: float = Field(120.0, ge=0.1, le=MAX_SECONDS)
    """A claimed request returns to the queue after this, unless its worker renews it."""
    max_attempts: int = Field(3, ge=1)
    """A group that fails this often is dropped and counted."""
    max_failures_in_a_row: int = Field(20, ge=1)
    """This many failed groups without one success stop the run with the last reason."""

    @property
    def maxmemory(self) -> int:
        """`maxmemory` of the embedded Redis, in bytes."""
        return int(MAXMEMORY_SHARE * self.max_memory_mb * 2**20)

    @model_validator(mode="after")
    def url_holds_no_password(self) -> Self:
        if self.redis_url and (urlsplit(self.redis_url).password or "password=" in self.redis_url):
            raise ValueError(
                "redis_url holds a password, and a configuration is copied, printed and committed; write it without, "
                "and name a file with the password in BAPO_REDIS_PASSWORD_FILE"
            )
        return self

    @model_validator(mode="after")
    def redis_has_one_owner(self) -> Self:
        if self.url and self.redis_url:
            raise ValueError(
                f"url = {self.url} is a service that is already running with a Redis of its own, so "
                f"redis_url = {self.redis_url} would never be used; remove one of them"
            )
        return self
