"""Which Redis can keep what the buffer promises: one primary, 6.2 or newer, that evicts nothing.

A Cluster and what a Sentinel watches replace a dead primary by a replica that has not seen the newest writes, so groups
that were acknowledged would be gone. Both are refused at the start, with a message that says what to name instead.
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
"""What `role` of INFO may say."""
USE_PRIMARY = "name one primary that is not a member of a Cluster"


def refuse_unsuited(link: RedisLink) -> None:
    """Raises: ConfigError for a server that cannot keep acknowledged groups; UnavailableError when it does not answer.

    A setting that a server does not report is not refused: managed ones hide many.
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
    """Why a server with this INFO is not suited, to be printed after its address; '' when it is."""
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


# Settings that every buffer service of one run must have in common: the first writes them, the others compare.
#
# Two that differ would assemble batches by two rules, or take each other's leases away.

SHARED: dict[str, Any] = {
    "algorithm": True,
    "cadence": True,
    "selector": True,
    "buffer": {"max_fresh_groups", "max_fresh_mb", "lease_s", "max_attempts", "max_failures_in_a_row"},
}
"""Sections and keys of the configuration; the others belong to one process, or to no service."""


def refuse_other_settings(link: RedisLink, config: Config) -> None:
    """Keep the settings of this service for the run, or compare them with those that are kept.

    A key that only one of them knows is of another version, and no difference.
    Raises: ConfigError naming every key that differs; UnavailableError.
    """
    key, ours = Keys(config.run.name).settings, _shared(config)
    with link.errors_named():
        kept = link.client.get(key)
        if kept is None:  # asked first: a full Redis refuses to write
            link.client.set(key, json.dumps(ours), nx=True)
            kept = link.client.get(key)
    theirs: dict[str, Any] = json.loads(kept) if kept else ours
    different = [name for name in ours if name in theirs and theirs[name] != ours[name]]
    if different:
        found = ", ".join(f"{name} = {ours[name]!r} instead of {theirs[name]!r}" for name in different)
        raise ConfigError(
            f"the buffer of run {config.run.name!r} is served with other settings than these: {found}; start this "
            "service with the run's own configuration, or choose another run.name"
        )


def _shared(config: Config) -> dict[str, Any]:
    """Dotted key -> JSON value."""
    return {dotted(key): value for key, value in flatten(config.model_dump(mode="json", include=SHARED))}
