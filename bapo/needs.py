"""What a run needs of a machine: memory and cores, by sums that hold for small models on CPUs."""

from __future__ import annotations

from bapo.config.tree import Config

GIB = 1 << 30
BASE_GIB = 3.5
"""Most resident memory of everything but the engines in the demo (learner 2.1, Ray 1.0, services 0.3)."""
ENGINE_GIB = 1.3
"""Of one vLLM engine on a CPU, in the same run."""


def memory_gib(config: Config) -> float:
    """A rough sum for a small model; large ones need their own."""
    return BASE_GIB + ENGINE_GIB * config.rollout.num_workers


def runs_at_once(config: Config, *, cores: int, free_gib: float, cores_per_run: float) -> int:
    """How many runs like this one fit on a machine at a time; at least one.

    Args:
        cores_per_run: what one run keeps busy on average, measured.
    """
    return max(1, min(int(cores / cores_per_run), int(free_gib / memory_gib(config))))
