"""One step of a composer on groups of G = 4 that are written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bapo.algorithms.composer import AssemblyView, Composer, Decision, NeedMore
from bapo.algorithms.composers.registry import load_composer
from bapo.algorithms.randomness import rng_for
from bapo.algorithms.settings import AlgorithmConfig
from bapo.core.types import GroupStat
from tests.support.factories import make_stat


def composer(name: str, *, options: Mapping[str, object] | None = None, **algorithm: object) -> Composer:
    """A composer of groups of G = 4."""
    values = {"composer": name, "batch_size": 4, "group_size": 4, "options": dict(options or {}), **algorithm}
    return load_composer(AlgorithmConfig.model_validate(values))


def compose(
    rule: Composer, fresh: Sequence[GroupStat], high: Sequence[GroupStat] = (), *, step: int = 5, round: int = 1
) -> Decision | NeedMore:
    view = AssemblyView(
        step=step, fresh=tuple(fresh), reevaluated=(), bad=(), high=tuple(high), previous_r_tot=None, round=round
    )
    return rule.compose(view, lambda purpose: rng_for(0, step, purpose))


def decided(*args: Any, **options: Any) -> Decision:
    decision = compose(*args, **options)
    assert isinstance(decision, Decision)
    return decision


def group(name: str, rewards: str, *, birth: int = 0, **rows: Any) -> GroupStat:
    """Group `name` of the prompt that is its first letter."""
    return make_stat(rewards=rewards, prompt_id=name[0], group_id=name, birth=birth, **rows)


def names(stats: Sequence[GroupStat]) -> list[str]:
    return [stat.group_id for stat in stats]
