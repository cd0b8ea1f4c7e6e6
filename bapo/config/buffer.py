"""Address and limits of the buffer."""

from __future__ import annotations

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from bapo.algorithms.settings import MAX_SECONDS, Frozen
from bapo.core.addresses import bare_host

MAXMEMORY_SHARE = 0.9
"""Share of max_memory_mb used as maxmemory. Redis counts allocated bytes; a buffer that was full for ten minutes used
1.21 times as much resident memory."""

Host = Annotated[str, AfterValidator(bare_host)]
"""A name, an IPv4 or an IPv6 address, without a port; brackets are taken off."""


class BufferConfig(Frozen):
    """The buffer service and its Redis."""

    host: Host = "127.0.0.1"
    """127.0.0.1, ::1, :: ...; overridden by BAPO_HOST."""
    port: int = Field(8700, ge=0, le=65535)
    """Of the API."""
    url: str | None = None
    """A running buffer service, or its replicas separated by commas; null: one is started."""
    redis_url: str | None = None
    """A running Redis, without its password (BAPO_REDIS_PASSWORD_FILE); null: an embedded one."""
    appendfsync: Literal["everysec", "always"] = "everysec"
    """Of the embedded Redis: everysec may lose the last second on power loss, always nothing (docs/reliability.md)."""
    max_memory_mb: int = Field(2048, ge=16)
    """Of the embedded Redis; above 90 % pushes get 503, and nothing is evicted."""
    direct: bool = True
    """A learner on the machine of a Redis with a unix socket reads frames from it; false: through the service."""
    max_fresh_groups: int | None = Field(None, ge=1)
    """Most fresh groups queued; then, once the next batch is complete, workers get no fresh requests and pushes wait
    (429). At least algorithm.batch_size; null: unlimited."""
    max_fresh_mb: int | None = Field(None, ge=1)
    """The same in MB; null: only max_memory_mb applies."""
    lease_s: float = Field(120.0, ge=0.1, le=MAX_SECONDS)
    """Seconds after which a claimed request returns to the queue, unless its worker renews it."""
    max_attempts: int = Field(3, ge=1)
    """Failures after which a group is dropped and counted."""
    max_failures_in_a_row: int = Field(20, ge=1)
    """Failed groups in a row after which the run stops with the last reason."""

    @property
    def maxmemory(self) -> int:
        """`maxmemory` of the embedded Redis, in bytes."""
        return int(MAXMEMORY_SHARE * self.max_memory_mb * 2**20)

    @model_validator(mode="after")
    def url_holds_no_password(self) -> Self:
        if self.redis_url and (urlsplit(self.redis_url).password or "password=" in self.redis_url):
            raise ValueError(
                "redis_url contains a password, but configs are copied, printed and committed; remove it, "
                "and set BAPO_REDIS_PASSWORD_FILE to a file with the password"
            )
        return self

    @model_validator(mode="after")
    def redis_has_one_owner(self) -> Self:
        if self.url and self.redis_url:
            raise ValueError(
                f"url = {self.url} is a running service with its own Redis, so "
                f"redis_url = {self.redis_url} would have no effect; remove one of them"
            )
        return self
