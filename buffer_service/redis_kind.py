"""Which Redis can keep what the buffer promises: one primary, 6.2 or newer, that evicts nothing.

A Cluster and what a Sentinel watches replace a dead primary by a replica that has not seen the newest writes, so groups
that were acknowledged would be gone. Both are refused at the start, with a message that says what to name instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bapo.errors import ConfigError
from buffer_service.redis_errors import other_format
from buffer_service.redis_keys import FORMAT, Keys
from buffer_service.redis_link import RedisLink

OLDEST = (6, 2)
REPLICA = ("slave", "replica")
"""What `role` of INFO may say."""
USE_PRIMARY = "name one primary that is no member of a Cluster"


def refuse_unsuited(link: RedisLink) -> None:
    """Raises: ConfigError for a server that cannot keep acknowledged groups; UnavailableError when it does not answer.

    What a server does not tell is no reason to refuse it: managed ones are silent about much.
    """
    info: dict[str, Any] = {}
    with link.errors_named():
        for section in ("server", "replication", "memory"):
            info.update(link.client.info(section))
    if problem := problem_of(info):
        raise ConfigError(f"buffer.redis_url {link.where} {problem}")


def refuse_other_format(link: RedisLink, keys: Keys) -> None:
    """Raises: ConfigError for a run that was stored in another format; UnavailableError."""
    with link.errors_named():
        is_there = link.client.exists(keys["meta"])
        found = link.client.hget(keys["meta"], "format")
    if is_there and found != FORMAT.encode():
        raise other_format(link.where, (found or b"").decode())


def problem_of(info: Mapping[str, Any]) -> str:
    """Why a server with this INFO is not suited, to be said behind its address; '' when it is."""
    mode = info.get("server_mode", info.get("redis_mode", "standalone"))
    if mode == "sentinel":
        return f"is a Sentinel, which holds no data: {USE_PRIMARY}"
    if mode == "cluster":
        return f"is a node of a Redis Cluster, whose failover forgets what was acknowledged: {USE_PRIMARY}"
    if info.get("role") in REPLICA:
        host, port = info.get("master_host"), info.get("master_port")
        return f"is a replica of {host}:{port} and takes no writes: {USE_PRIMARY}"
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy.startswith("allkeys"):
        return (
            f"deletes groups when it is full (maxmemory-policy {policy}): set maxmemory-policy noeviction there; "
            "a full Redis then makes workers wait"
        )
    version = str(info.get("redis_version", ""))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers and numbers < OLDEST:
        return f"is Redis {version}; 6.2 or newer is needed, or Valkey"
    return ""
