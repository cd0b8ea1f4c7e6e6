"""Settings that every buffer service of one run must have in common: the first writes them, the others compare.

Two that differ would assemble batches by two rules, or take each other's leases away.
"""

from __future__ import annotations

import json
from typing import Any

from bapo.config.layers import dotted, flatten
from bapo.config.tree import Config
from bapo.errors import ConfigError
from buffer_service.redis_keys import Keys
from buffer_service.redis_link import RedisLink

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
