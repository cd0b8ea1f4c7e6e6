"""The output head's passes over the vocabulary as Triton kernels: one read forward, one read and one write backward.

torch's own operations read and write [C, V] float32 six times for log-probs, entropies and their gradients, which is a
sixth of a step on a GPU. The formulas are those of `logprobs.py`, which stays the reference: where the kernels cannot
run, or give other numbers on this GPU, it is used instead.

Suffixes: V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

import importlib
import logging
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

BLOCK = 4096
"""Logits of one row that a program reads at a time."""
CHECKED_ROWS, CHECKED_WORDS = 4, 5000
"""Of the check at the start: more than one block, and no multiple of it."""
TOLERANCE = 1e-4


def statistics(logits_CV: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log pi(target), the entropy, and log Z, all [C] float32. `logits_CV`: float32, contiguous."""
    target_C = target_C.contiguous()
    logprob_C, entropy_C, logz_C = (torch.empty_like(logits_CV[:, 0], dtype=torch.float32) for _ in range(3))
    _kernels().read[(len(logits_CV),)](
        logits_CV, target_C, logprob_C, entropy_C, logz_C, logits_CV.shape[1], logits_CV.stride(0), BLOCK=BLOCK
    )
    return logprob_C, entropy_C, logz_C


def gradient(
    logits_CV: Tensor,
    logz_C: Tensor,
    target_C: Tensor,
    entropy_C: Tensor,
    grad_logprob_C: Tensor,
    grad_entropy_C: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """[C, V] in `dtype`: dL / dlogits.

    Args:
        logz_C: log Z of `statistics`.
        grad_entropy_C: None: the loss has no entropy.
    """
    target_C, grad_logprob_C = target_C.contiguous(), grad_logprob_C.contiguous()
    grad_entropy_C = None if grad_entropy_C is None else grad_entropy_C.contiguous()
    grad_CV = torch.empty_like(logits_CV, dtype=dtype)
    _kernels().write[(len(logits_CV),)](
        logits_CV, target_C, logz_C, entropy_C, grad_logprob_C,
        grad_logprob_C if grad_entropy_C is None else grad_entropy_C,
        grad_CV, logits_CV.shape[1], logits_CV.stride(0), HAS_ENTROPY=grad_entropy_C is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return grad_CV


@lru_cache
def are_usable(device: torch.device) -> bool:
    """Whether the kernels run on this device and give torch's numbers; tried once per process, on random logits."""
    if device.type != "cuda":
        return False
    try:
        gap = _largest_gap(device)
    except Exception as error:  # noqa: BLE001 - whatever Triton raises on this GPU, the step can be computed without it
        log.warning("the head's Triton kernels do not run here, torch computes its passes: %s", _first_line(error))
        return False
    if not gap <= TOLERANCE:
        log.warning("the head's Triton kernels differ from torch by %.2g here, torch computes its passes", gap)
    return gap <= TOLERANCE


@torch.enable_grad()
def _largest_gap(device: torch.device) -> float:
    """Between the kernels and torch's autograd, of all results. Called in passes with and without gradients."""
    rng = torch.Generator().manual_seed(0)
    logits_CV = (4 * torch.randn(CHECKED_ROWS, CHECKED_WORDS, generator=rng)).to(device)
    target_C = torch.randint(0, CHECKED_WORDS, (CHECKED_ROWS,), generator=rng).to(device)
    first, second = (torch.randn(CHECKED_ROWS, generator=rng).to(device) for _ in range(2))
    inputs_CV = logits_CV.clone().requires_grad_()
    log_p_CV = inputs_CV.log_softmax(-1)
    logprob_C = log_p_CV.gather(1, target_C[:, None]).squeeze(1)
    entropy_C = -(log_p_CV.exp() * log_p_CV).sum(-1)
    (want_CV,) = torch.autograd.grad((logprob_C * first + entropy_C * second).sum(), inputs_CV)
    mine, mine_entropy, logz_C = statistics(logits_CV, target_C)
    found_CV = gradient(logits_CV, logz_C, target_C, mine_entropy, first, second, torch.float32)
    pairs = ((mine, logprob_C), (mine_entropy, entropy_C), (found_CV, want_CV))
    return max(float((found - want).detach().abs().max()) for found, want in pairs)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


@lru_cache
def _kernels() -> Any:
    """The module, which needs Triton: no machine without a GPU does."""
    return importlib.import_module("learner.model._head_triton")
