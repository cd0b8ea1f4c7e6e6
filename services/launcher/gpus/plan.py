"""Assignment of this machine's GPUs to the learner and the workers, computed before anything starts. Pure.

    visible GPUs + configuration --share_gpus--> GpuPlan --> CUDA_VISIBLE_DEVICES of the learner's ranks, and of the
                                                             rollout server, whose Ray node gives workers theirs

Without a list every process would use the first visible GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.runtime.machine import VLLM_FOR_GPUS, ranks_on_gpus, vllm_build, worker_resources, workers_on

VISIBLE = "CUDA_VISIBLE_DEVICES"
SHARED = "gpu_memory_utilization"
"""The engine option without which vLLM uses the whole GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """The assignment. Indices refer to `visible`."""

    visible: tuple[str, ...] = ()
    """Entries of CUDA_VISIBLE_DEVICES: "0", or the ids of GPUs and MIG slices."""
    learner: tuple[int, ...] = ()
    """Rank r uses the r-th of these; empty: CPU, or not started here."""
    workers: tuple[int, ...] = ()
    """Empty: workers use no GPU, or run in a cluster."""

    def learner_environment(self) -> dict[str, str]:
        """Environment of every rank; LOCAL_RANK selects among the GPUs."""
        return self._environment(self.learner)

    def worker_environment(self) -> dict[str, str]:
        """Environment of the rollout server: its Ray node counts exactly these GPUs."""
        return self._environment(self.workers)

    def sentence(self) -> str:
        """`GPU 0: learner; GPUs 1-3: workers`."""
        if not self.visible:
            return "no GPU: CPU profile"
        both = [i for i in self.learner if i in self.workers]
        parts = [
            ([i for i in self.learner if i not in both], "learner"),
            (both, "learner and workers"),
            ([i for i in self.workers if i not in both], "workers"),
            ([i for i in range(len(self.visible)) if i not in {*self.learner, *self.workers}], "not used"),
        ]
        return "; ".join(f"{named(self.visible[i] for i in part)}: {whose}" for part, whose in parts if part)

    def _environment(self, indices: tuple[int, ...]) -> dict[str, str]:
        return {VISIBLE: ",".join(self.visible[i] for i in indices)} if indices else {}


def visible_gpus(present: Sequence[str], outer: str | None) -> tuple[str, ...]:
    """GPUs visible to a process, as CUDA parses the variable: up to the first invalid entry.

    Args:
        present: GPU indices of the driver, or ids of MIG slices.
        outer: CUDA_VISIBLE_DEVICES; None: not set.
    """
    if outer is None:
        return tuple(present)
    seen: list[str] = []
    for entry in map(str.strip, outer.split(",")):
        is_there = entry in present or (bool(present) and entry.startswith(("GPU-", "MIG-")))
        if not is_there or entry in seen:
            break
        seen.append(entry)
    return tuple(seen)


def share_gpus(
    config: Config, visible: Sequence[str], *, with_learner: bool = True, is_cluster: bool = False
) -> GpuPlan:
    """Assign explicit lists first, then the learner's ranks from the first GPU, then the workers.

    Args:
        with_learner: a learner runs or will run on this machine.
        is_cluster: Ray places the workers, possibly on other machines (RAY_ADDRESS).
    Raises: ConfigError with a remedy.
    """
    return _Sharing(config, tuple(visible), with_learner=with_learner, is_cluster=is_cluster).plan()


class _Sharing:
    def __init__(self, config: Config, visible: tuple[str, ...], *, with_learner: bool, is_cluster: bool) -> None:
        self.visible = visible
        self.for_learner, self.for_workers = config.learner.gpus, config.rollout.gpus
        is_asked = config.learner.device == "cuda" or self.for_learner is not None
        self.ranks = ranks_on_gpus(config) if with_learner and (visible or is_asked) else 0
        self.num_workers = config.rollout.num_workers
        self.needs = worker_resources(config.rollout) if config.rollout.engine == "vllm" and not is_cluster else {}
        self.per_worker = self.needs.get("GPU", 0.0)
        self.is_blind = bool(self.needs) and not self.per_worker and vllm_build() == VLLM_FOR_GPUS
        self.may_share = SHARED in config.rollout.engine_options
        self.with_learner, self.is_cluster = with_learner, is_cluster

    def plan(self) -> GpuPlan:
        self._check_lists()
        learner = self._learner()
        workers = self._workers(learner)
        if set(learner) & set(workers) and not self.may_share:
            both = named(self.visible[i] for i in learner if i in workers)
            raise ConfigError(f"learner.gpus and rollout.gpus both include {both}: use different ones, or {SHARING}")
        if set(learner) & set(workers) and self.per_worker > 1:
            raise ConfigError(
                f"engines of {self.per_worker:g} GPUs cannot share GPUs with the learner: use more GPUs, fewer "
                "learner.num_ranks, or engines of one GPU"
            )
        return GpuPlan(visible=self.visible, learner=learner, workers=workers)

    def _check_lists(self) -> None:
        if self.is_blind:
            raise ConfigError(
                f"rollout.worker_resources = {self.needs} has no GPU, but the CUDA build of vLLM requires "
                "one: add GPU = 1, or remove the key"
            )
        for key, indices in (("learner.gpus", self.for_learner), ("rollout.gpus", self.for_workers)):
            if indices is not None and max(indices) >= len(self.visible):
                raise ConfigError(f"{key} includes GPU {max(indices)}, but {self._here()}")
        if self.for_learner is not None and self.with_learner and not self.ranks:
            raise ConfigError(
                "learner.gpus is set, but the learner runs on the CPU (learner.device = cpu, or a CPU build of torch): "
                "remove the key, or install the CUDA build (`make setup GPU=1`)"
            )
        if self.for_learner is not None and self.ranks and len(self.for_learner) != self.ranks:
            raise ConfigError(
                f"learner.gpus has {len(self.for_learner)} GPUs for learner.num_ranks = {self.ranks}: list one GPU per "
                "rank"
            )
        if self.for_workers is not None and not self.per_worker:
            why = (
                "RAY_ADDRESS is set, so the cluster assigns GPUs: set CUDA_VISIBLE_DEVICES for `ray start`"
                if self.is_cluster
                else "workers use no GPU here (rollout.engine, rollout.worker_resources, vLLM build): remove it"
            )
            raise ConfigError(f"rollout.gpus is set, but {why}")

    def _learner(self) -> tuple[int, ...]:
        if self.ranks == 0:
            return ()
        if self.for_learner is not None:
            return self.for_learner
        everything = range(len(self.visible))
        free = [i for i in everything if i not in (self.for_workers or ())]
        order = [*free, *(i for i in everything if i not in free)] if self.may_share else free
        if len(order) < self.ranks:
            left = f"rollout.gpus leaves {len(free)}" if self.for_workers else "no more are available"
            raise ConfigError(
                f"learner.num_ranks = {self.ranks} needs one GPU per rank, {self._here()}, and {left}: use fewer "
                f"ranks, or let workers share GPUs: {SHARING}"
            )
        return tuple(order[: self.ranks])

    def _workers(self, learner: tuple[int, ...]) -> tuple[int, ...]:
        if not self.per_worker:
            return ()
        if not self.visible:
            raise ConfigError(
                f"no worker can start: workers need GPUs, but {self._here()}. Use a machine with GPUs, or the CPU "
                "builds (`make setup`)"
            )
        if self.for_workers is not None:
            self._check_room(len(self.for_workers), f"rollout.gpus has {len(self.for_workers)} GPUs")
            return self.for_workers
        free = [i for i in range(len(self.visible)) if i not in learner]
        if self.may_share:
            # The learner's last GPU first: rank 0 also needs memory for gathering a checkpoint.
            shared = list(reversed(learner))
            while shared and workers_on(len(free), self.per_worker) < self.num_workers:
                free.append(shared.pop(0))
        taken = f" and the learner uses {named(self.visible[i] for i in learner)}" if learner else ""
        self._check_room(len(free), f"{self._here()}{taken}", can_share=bool(learner))
        return tuple(sorted(free))

    def _check_room(self, num_gpus: int, what: str, *, can_share: bool = False) -> None:
        room = workers_on(num_gpus, self.per_worker)
        if room >= self.num_workers:
            return
        fewer = f"use --rollout.num_workers {room}" if room else "there is no room for any"
        share = f", or let them share GPUs: {SHARING}" if can_share and not self.may_share else ""
        raise ConfigError(
            f"rollout.num_workers = {self.num_workers} with {self.per_worker:g} GPU each are too many: {what}; "
            f"{fewer}{share}"
        )

    def _here(self) -> str:
        number = len(self.visible)
        return f"{number or 'no'} GPU{' is' if number < 2 else 's are'} visible (`nvidia-smi -L`, {VISIBLE})"


SHARING = (
    f"rollout.engine_options = {{ {SHARED} = 0.4, kv_cache_memory_bytes = 4294967296 }} limits a worker to that share "
    "of a GPU (docs/cluster.md)"
)


def named(ids: Iterable[str]) -> str:
    """`GPU 0`, `GPUs 1-3, 5`; non-numeric ids unchanged."""
    whole = list(ids)
    numbers = sorted(int(entry) for entry in whole if entry.isdigit())
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    words += [entry for entry in whole if not entry.isdigit()]
    return f"GPU{'s' if len(whole) > 1 else ''} {', '.join(words)}"
