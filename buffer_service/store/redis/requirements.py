"""Requirements on Redis: one primary, 6.2 or newer, that evicts nothing.

Cluster and Sentinel replace a dead primary by a replica that may not have the latest writes, so acknowledged groups
would be lost. Both are rejected at startup.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bapo.config.layers import dotted, flatten
from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from buffer_service.store.redis.connection import RedisLink
from buffer_service.store.redis.errors import other_format
from buffer_service.store.redis.keys import FORMAT, Keys

OLDEST = (6, 2)
REPLICA = ("slave", "replica")
"""Values of `role` in INFO."""
USE_PRIMARY = "use a single primary that is not part of a Cluster"


def refuse_unsuited(link: RedisLink) -> None:
    """Raises: ConfigError for a server that may lose acknowledged groups; UnavailableError if it does not respond.

    Settings that a server does not report are accepted: managed services hide many.
    """
    info: dict[str, Any] = {}
    with link.errors_named():
        for section in ("server", "replication", "memory"):
            info.update(link.client.info(section))
    if problem := problem_of(info):
        raise ConfigError(f"buffer.redis_url {link.where} {problem}")


def refuse_other_format(link: RedisLink, keys: Keys) -> None:
    """Raises: ConfigError for a run stored in another format; UnavailableError."""
    with link.errors_named():
        is_there = link.client.exists(keys["meta"])
        found = link.client.hget(keys["meta"], "format")
    if is_there and found != FORMAT.encode():
        raise other_format(link.where, (found or b"").decode())


def problem_of(info: Mapping[str, Any]) -> str:
    """Why a server with this INFO is unsuitable, as a message after its address; '' if it is suitable."""
    mode = info.get("server_mode", info.get("redis_mode", "standalone"))
    if mode == "sentinel":
        return f"is a Sentinel, which stores no data: {USE_PRIMARY}"
    if mode == "cluster":
        return f"is a Redis Cluster node, whose failover may lose acknowledged writes: {USE_PRIMARY}"
    if info.get("role") in REPLICA:
        host, port = info.get("master_host"), info.get("master_port")
        return f"is a replica of {host}:{port} and rejects writes: {USE_PRIMARY}"
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy.startswith("allkeys"):
        return (
            f"evicts groups when it is full (maxmemory-policy {policy}): set maxmemory-policy noeviction there; "
            "workers then wait while Redis is full"
        )
    version = str(info.get("redis_version", ""))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers and numbers < OLDEST:
        return f"is Redis {version}; 6.2 or newer is needed, or Valkey"
    return ""


# Settings that every buffer service of a run must share: the first writes them, the others compare.
#
# Services with different settings would assemble batches by different rules, or expire each other's leases.

SHARED: dict[str, Any] = {
    "algorithm": True,
    "cadence": True,
    "selector": True,
    "buffer": {"max_fresh_groups", "max_fresh_mb", "lease_s", "max_attempts", "max_failures_in_a_row"},
}
"""Config sections and keys; others concern a single process, or no service."""


def refuse_other_settings(link: RedisLink, config: Config) -> None:
    """Store the settings of this service for the run, or compare them with the stored ones.

    A key that exists on one side only comes from another version and is ignored.
    Raises: ConfigError listing every key that differs; UnavailableError.
    """
    key, ours = Keys(config.run.name).settings, _shared(config)
    with link.errors_named():
        kept = link.client.get(key)
        if kept is None:  # read first: a full Redis rejects writes
            link.client.set(key, json.dumps(ours), nx=True)
            kept = link.client.get(key)
    theirs: dict[str, Any] = json.loads(kept) if kept else ours
    different = [name for name in ours if name in theirs and theirs[name] != ours[name]]
    if different:
        found = ", ".join(f"{name} = {ours[name]!r} instead of {theirs[name]!r}" for name in different)
        raise ConfigError(
            f"the buffer of run {config.run.name!r} is served with different settings: {found}; start this "
            "service with the run's config, or choose another run.name"
        )


def _shared(config: Config) -> dict[str, Any]:
    """Dotted key -> JSON value."""
    return {dotted(key): value for key, value in flatten(config.model_dump(mode="json", include=SHARED))}
