"""What an update may have in addition to the policy loss: one class each, which decides by the config if it is there.

    PROX         prepare         before the anchors are computed: leave groups out, fill log-probs
    UPDATE       before_passes   before the first mini-batch: replace advantages
                 computed        a micro-batch of this rank
                 after_minibatch
                 after_passes    further optimizer steps
    DIAGNOSTICS  report          what it adds to the report

The core's own come first, in the order of `update.py`; those that a composer, a loss or an advantage brings
(`update_hooks`) follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bapo.algorithms.methods import ADVANTAGE, COMPOSER, LOSS
from bapo.config.methods import part_of
from bapo.config.tree import Config
from bapo.core.user_code import load_function
from learner.diagnostics.step_report import UpdateReport
from learner.distributed.shard_files import StoredShards
from learner.losses.objective import TokenLosses
from learner.model.policy import Policy
from learner.update.passes import Passes
from learner.update.step import Step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroPass:
    """Results of one forward and backward pass of this rank."""

    slot_M: Tensor
    """Positions of its response tokens in the batch."""
    loss: Tensor
    """Scalar: its contribution to the loss of the mini-batch."""
    losses: TokenLosses
    logprobs_M: Tensor
    """Detached."""
    entropy_M: Tensor
    is_last: bool
    """Of the step's last mini-batch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Given:
    """What the hooks of a run work with."""

    config: Config
    policy: Policy
    passes: Passes


class UpdateHook:
    """One concern. Every rank has the same ones in the same order; by default none of them does anything."""

    name = ""
    """Of its state in a checkpoint."""
    trains_sft = False
    """Whether it trains the entries of kind sft."""

    def __init__(self, given: Given, own: Any = None) -> None:
        """`own`: the Settings of the part of the method that brings it. Collective."""
        self.config, self.policy, self.passes = given.config, given.policy, given.passes
        self.own = own

    @classmethod
    def is_wanted(cls, given: Given) -> bool:
        """Whether the update has it."""
        del given
        return True

    def prepare(self, step: Step) -> None:
        """Before the anchors are computed."""

    def before_passes(self, step: Step) -> None:
        """Before the first mini-batch."""

    def computed(self, step: Step, micro: MicroPass) -> None:
        """After each forward and backward pass of this rank; all passes of a mini-batch come again if one of them
        runs out of memory."""

    def after_minibatch(self, step: Step) -> None:
        """After the last pass of each mini-batch, on every rank."""

    def after_passes(self, step: Step) -> None:
        """After the last mini-batch."""

    def report(self, step: Step, report: UpdateReport) -> UpdateReport:
        """The report with what it found."""
        del step
        return report

    def tensors(self) -> dict[str, Tensor]:
        """Its state for a checkpoint, by name, sharded ones as DTensor; empty while there is nothing to save."""
        return {}

    def load(self, stored: StoredShards) -> None:
        """Load the result of `tensors`."""
        del stored


def make_hooks(own: Sequence[type[UpdateHook]], given: Given) -> tuple[UpdateHook, ...]:
    """Those of the core that the config wants, and those of the method's parts. Collective. Raises: ConfigError."""
    kinds = [*((kind, None) for kind in own), *_brought(given.config)]
    return tuple(kind(given, settings) for kind, settings in kinds if kind.is_wanted(given))


def _brought(config: Config) -> Iterator[tuple[type[UpdateHook], Any]]:
    """(hook, the settings of the part that brings it)."""
    for kind in (COMPOSER, LOSS, ADVANTAGE):
        part, own = part_of(kind, config)
        for place in part.update_hooks:
            hook: Any = load_function(place, key=f"update_hooks of {part.__name__}:")
            yield hook, own
