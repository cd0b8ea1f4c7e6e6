"""AdamW's state as named tensors, for checkpoints: "<moment>/<parameter name>", and its number of updates."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from learner.distributed import gather, spread_like

MOMENTS = ("exp_avg", "exp_avg_sq")
UPDATES = "num_updates"
"""Name of the tensor that holds the number of updates, where it travels with the moments."""


def gather_moments(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Whole, on the CPU of rank 0. All ranks must call it, with the parameters that they keep (`reshard`)."""
    states = {name: optimizer.state.get(parameter) for name, parameter in module.named_parameters()}
    return gather({f"{moment}/{name}": state[moment] for name, state in states.items() if state for moment in MOMENTS})


def load_moments(
    module: nn.Module, optimizer: torch.optim.Optimizer, stored: Mapping[str, Tensor], updates: int
) -> None:
    """Spread like the parameters. A parameter without moments never had a gradient."""
    for name, parameter in module.named_parameters():
        if f"{MOMENTS[0]}/{name}" in stored:
            optimizer.state[parameter] = {
                "step": torch.tensor(float(updates), device=parameter.device),
                **{moment: spread_like(stored[f"{moment}/{name}"], parameter) for moment in MOMENTS},
            }


def num_updates(optimizer: torch.optim.Optimizer) -> int:
    """Optimizer steps so far."""
    return max((int(state["step"]) for state in optimizer.state.values()), default=0)


def gather_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Moments with their number of updates, on rank 0; empty before the first. All ranks must call it."""
    moments = gather_moments(module, optimizer)
    return {**moments, UPDATES: torch.tensor(num_updates(optimizer))} if moments else {}


def load_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, stored: Mapping[str, Tensor]) -> None:
    """What `gather_optimizer` gave."""
    if UPDATES in stored:
        load_moments(module, optimizer, stored, int(stored[UPDATES]))
