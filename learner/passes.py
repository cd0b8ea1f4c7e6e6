"""Forward passes over responses of a batch: cut for this rank, or gathered over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from learner.batching import Int64s, MicroBatch, microbatches_of
from learner.distributed import World
from learner.step import Step


class Passes:
    """How this rank walks over a step; the same for policy, reference and critic."""

    def __init__(self, world: World, budget: int) -> None:
        """`budget`: packed tokens of one pass."""
        self.world = world
        self._budget = budget

    def microbatches(self, step: Step, responses: Int64s) -> Iterator[MicroBatch]:
        """This rank's share of these responses. Every rank runs equally many."""
        world = self.world
        return microbatches_of(
            step.columns, responses, budget=self._budget, rank=world.rank, num_ranks=world.size, device=world.device
        )

    @torch.no_grad()
    def evaluate(self, per_token: Callable[[MicroBatch], Tensor], step: Step, responses: Int64s) -> Tensor:
        """[M] what `per_token` gives for the tokens of these responses, on every rank; 0 elsewhere."""
        found_M = torch.zeros_like(step.rollout_M)
        for micro in self.microbatches(step, responses):
            found_M[micro.slot_M] = per_token(micro)
        return self.world.sum(found_M)
