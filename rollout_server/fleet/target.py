"""The number of workers set by `bapo scale`, recorded in RUN/weights for a restarted rollout server.

It is valid until the run is started again or rollout.num_workers changes: a number that was too large for the machine
must not return with `--resume`.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass

from bapo.config.tree import Config
from bapo.core.errors import ContractError
from bapo.core.json_values import from_map
from bapo.runtime.run_directory.files import replace_file, storing
from bapo.runtime.run_directory.layout import RunDirectory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """
    Args:
        num: workers set by `bapo scale`.
        num_workers: rollout.num_workers at that time.
        started_at: in run.json, Unix seconds; None for a run without a launcher.
    """

    num: int
    num_workers: int
    started_at: float | None = None


def remember_target(run: RunDirectory, host: str, config: Config, num: int) -> None:
    """Record the number of workers of this host ("" for the only one). Raises: StorageError."""
    path = run.weights_path / f"{host}workers.json"
    target = Target(num, config.rollout.num_workers, run.read_run().get("started_at"))
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(asdict(target)).encode())


def recall_target(run: RunDirectory, host: str, config: Config) -> int:
    """The recorded number of workers, at most rollout.max_workers, if it is still valid, else rollout.num_workers."""
    path, configured = run.weights_path / f"{host}workers.json", config.rollout.num_workers
    if not path.exists():
        return configured
    try:
        target = from_map(json.loads(path.read_text()), Target, "number of workers")
    except (ValueError, ContractError) as error:
        log.warning("rollout.num_workers = %d is used: %s is damaged: %s", configured, path, error)
        return configured
    if target != Target(target.num, configured, run.read_run().get("started_at")):
        return configured
    log.info("%d workers, as set by bapo scale before the restart", target.num)
    return max(1, min(target.num, config.rollout.max_workers))
