"""Passes over responses of a batch, split over the ranks: forward only, or an optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from bapo.core.codec import pack_batch
from bapo.core.errors import DivergenceError, StorageError
from bapo.core.types import Batch
from bapo.runtime.run_directory.layout import RunDirectory
from learner.batch.columns import Int64s
from learner.batch.microbatch import MicroBatch
from learner.batch.packing import TOKENS_ONLY, PassCost, microbatches_of
from learner.distributed.sharding import whole
from learner.distributed.world import World
from learner.update.step import StepInputs


class Passes:
    """Runs passes of this rank; used for policy, reference and critic."""

    def __init__(self, world: World, budget: int, run_path: Path, cost: PassCost = TOKENS_ONLY) -> None:
        """
        Args:
            budget: packed tokens per pass.
            run_path: run directory, for diverged batches.
            cost: of a pass, to balance the ranks.
        """
        self.world = world
        self._budget = budget
        self._cost = cost
        self._run = RunDirectory(run_path)

    def microbatches(self, inputs: StepInputs, responses: Int64s) -> Iterator[MicroBatch]:
        """This rank's share of these responses. All ranks get the same number of micro-batches."""
        world = self.world
        return microbatches_of(
            inputs.columns, responses, budget=self._budget, rank=world.rank, num_ranks=world.size,
            device=world.device, cost=self._cost,
        )  # fmt: skip

    @torch.no_grad()
    def evaluate(self, per_token: Callable[[MicroBatch], Tensor], inputs: StepInputs, responses: Int64s) -> Tensor:
        """[M] result of `per_token` for the tokens of these responses, on every rank; 0 elsewhere."""
        found_M = torch.zeros_like(inputs.rollout_M)
        for micro in self.microbatches(inputs, responses):
            found_M[micro.slot_M] = per_token(micro)
        return self.world.sum(found_M)

    def optimizer_step(
        self,
        loss_of: Callable[[MicroBatch], Tensor],
        inputs: StepInputs,
        groups: Sequence[int],
        responses: Int64s,
        *,
        optimizer: torch.optim.Optimizer,
        grad_clip: float,
        where: str,
    ) -> float:
        """One optimizer step on a loss that is a sum over micro-batches; returns it, over all ranks.

        Args:
            groups: indices of the groups; responses: their computed responses.
            where: description for errors.
        Raises: DivergenceError.
        """
        total = torch.zeros(1, device=self.world.device)
        optimizer.zero_grad(set_to_none=True)
        for micro in self.microbatches(inputs, responses):
            loss = loss_of(micro)
            (loss * self.world.size).backward()  # FSDP averages gradients over ranks, but the parts add up
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], grad_clip)
        found = float(self.world.sum(total))
        self.refuse_divergence(inputs.batch, groups, where, found, float(whole(norm)))
        optimizer.step()
        return found

    def refuse_divergence(self, batch: Batch, groups: Sequence[int], where: str, loss: float, grad_norm: float) -> None:
        """Check that loss and gradient norm are finite.

        Args:
            groups: indices of the groups in the mini-batch.
            where: description of the mini-batch.
        Raises: DivergenceError, after rank 0 has written the batch; StorageError.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        path = self._run.diverged_path(batch.step)
        if self.world.leads:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(pack_batch(batch))
            except OSError as error:
                raise StorageError(f"step {batch.step} diverged, and cannot write {path}: {error}") from error
        names = ", ".join(batch.entries[i].group.group_id for i in groups)
        raise DivergenceError(
            f"step {batch.step}, {where}: loss is {loss}, gradient norm {grad_norm}; the weights were not changed. "
            f"Groups: {names}. The batch is in {path}. "
            f"Replay it with `bapo replay RUN --step {batch.step}`; lower learner.lr, learner.grad_clip or "
            "loss.importance_cap, then resume from the latest checkpoint"
        )
