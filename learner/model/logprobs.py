"""Log-probabilities and entropies of response tokens, without materializing [tokens x vocabulary].

Suffixes: M response tokens, D hidden size, V vocabulary, C tokens of one chunk.

    l = h W^T / temperature      logZ = logsumexp(l)      p = exp(l - logZ)
    log pi(y) = l_y - logZ       H = logZ - sum_v p_v l_v

Tokens that are never sampled are excluded from Z: their logits are `NEVER`, so that p is 0 and p l is not NaN.

Backward recomputes the logits of each chunk, with gradients g (of log pi) and e (of H, if the loss uses it):

    dL/dl_v = g (1[v = y] - p_v) - e p_v (log p_v + H)

Logits are float32 also where the products' inputs are bfloat16: rounded to bfloat16, logits of 16 to 32 would be
multiples of 0.125. Values over the vocabulary are read and written as rarely as torch's fused kernels allow, because
for small models these passes take as long as the products; on a GPU by kernels of our own (`head_kernels.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from learner.model import head_kernels
from learner.model.cpu_matmul import product

NEVER = -1e30


def response_logprobs(
    hidden_MD: Tensor,
    head_VD: Tensor,
    target_M: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    compute_dtype: torch.dtype = torch.float32,
    excluded: Tensor | None = None,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """log pi(target) and the entropy of pi, both [M] float32 in nats, differentiable in `hidden_MD` and `head_VD`.

    Args:
        temperature: sampling temperature; log-probs are those of the tempered distribution, like the engine's.
        chunk_tokens: rows of logits per chunk.
        compute_dtype: of the inputs of matrix products; logits and sums over the vocabulary are always float32.
        excluded: [X] int64 ids of tokens that the engine never samples.
        with_entropy: False: the entropy is NaN, and three passes over the logits are saved.
    """
    logprobs_M, entropy_M = _ChunkedHead.apply(  # type: ignore[no-untyped-call]
        hidden_MD, head_VD, target_M, temperature, chunk_tokens, compute_dtype, excluded, with_entropy
    )
    return logprobs_M, entropy_M


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        head_VD: Tensor,
        target_M: Tensor,
        temperature: float,
        chunk_tokens: int,
        compute_dtype: torch.dtype,
        excluded: Tensor | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs_M = hidden_MD.new_empty(len(target_M), dtype=torch.float32)
        entropy_M = torch.full_like(logprobs_M, torch.nan)
        head = head_VD.to(compute_dtype)
        logz_M = torch.empty_like(logprobs_M) if head_kernels.are_usable(hidden_MD.device) else None
        for span in _chunks(len(target_M), chunk_tokens):
            logits_CV = _logits(hidden_MD[span], head, temperature, excluded)
            entropy_C: Tensor | None
            if logz_M is not None:
                logprobs_M[span], entropy_C, logz_M[span] = head_kernels.statistics(logits_CV, target_M[span])
            else:
                logprobs_M[span], entropy_C = _statistics(logits_CV, target_M[span], with_entropy=with_entropy)
            if with_entropy and entropy_C is not None:
                entropy_M[span] = entropy_C
        ctx.save_for_backward(hidden_MD, head_VD, target_M, entropy_M, logz_M)
        ctx.settings = (temperature, chunk_tokens, compute_dtype, excluded)
        ctx.set_materialize_grads(False)
        return logprobs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, grad_logprobs_M: Tensor | None, grad_entropy_M: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_MD, head_VD, target_M, entropy_M, logz_M = ctx.saved_tensors
        temperature, chunk_tokens, compute_dtype, excluded = ctx.settings
        if grad_logprobs_M is None:
            grad_logprobs_M = torch.zeros_like(entropy_M)
        head = head_VD.to(compute_dtype)
        grad_hidden_MD = torch.empty_like(hidden_MD)
        # Accumulate chunks in float32: in bfloat16 the later ones would be rounded away. None for a frozen head.
        grad_head_VD = None
        if ctx.needs_input_grad[1]:
            grad_head_VD = torch.zeros_like(head_VD, dtype=torch.promote_types(head_VD.dtype, torch.float32))
        for span in _chunks(len(target_M), chunk_tokens):
            logits_CV = _logits(hidden_MD[span], head, temperature, excluded)
            grad_C = grad_logprobs_M[span] / temperature
            grad_entropy_C = None if grad_entropy_M is None else grad_entropy_M[span] / temperature
            given = (target_M[span], entropy_M[span], grad_C, grad_entropy_C)
            if logz_M is not None:
                scaled_CV = head_kernels.gradient(logits_CV, logz_M[span], *given, compute_dtype)
            else:
                scaled_CV = _gradient(logits_CV, *given).to(compute_dtype)
            grad_hidden_MD[span] = product(scaled_CV, head.T).to(hidden_MD.dtype)
            if grad_head_VD is not None:
                grad_head_VD += _exact_product(scaled_CV.T, hidden_MD[span].to(compute_dtype).T)
        grad_head = None if grad_head_VD is None else grad_head_VD.to(head_VD.dtype)
        return grad_hidden_MD, grad_head, None, None, None, None, None, None


def _statistics(logits_CV: Tensor, target_C: Tensor, *, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    """log pi(target) and the entropy, [C]."""
    log_p_CV = logits_CV.log_softmax(-1)
    logprob_C = log_p_CV.gather(1, target_C[:, None]).squeeze(1)
    return logprob_C, -log_p_CV.exp().mul_(log_p_CV).sum(-1) if with_entropy else None


def _gradient(
    logits_CV: Tensor, target_C: Tensor, entropy_C: Tensor, grad_C: Tensor, grad_entropy_C: Tensor | None
) -> Tensor:
    """dL / dlogits, [C, V] float32."""
    if grad_entropy_C is None:
        grad_logits_CV = logits_CV.softmax(-1).mul_(-grad_C[:, None])
    else:
        log_p_CV = logits_CV.log_softmax(-1)
        slope_CV = log_p_CV.mul(-grad_entropy_C[:, None])
        slope_CV.sub_((grad_C + grad_entropy_C * entropy_C)[:, None])
        grad_logits_CV = slope_CV.mul_(log_p_CV.exp_())
    return grad_logits_CV.scatter_add_(1, target_C[:, None], grad_C[:, None])


def _logits(hidden_CD: Tensor, head_VD: Tensor, temperature: float, excluded: Tensor | None) -> Tensor:
    """[C, V] float32; a new tensor, which callers modify in place."""
    logits_CV = _exact_product(hidden_CD.to(head_VD.dtype), head_VD)
    if temperature != 1.0:
        logits_CV.div_(temperature)
    return logits_CV if excluded is None else logits_CV.index_fill_(1, excluded, NEVER)


def _exact_product(left_NK: Tensor, right_MK: Tensor) -> Tensor:
    """left @ right^T, [N, M] float32, of inputs in float32 or bfloat16; never rounded to bfloat16."""
    if left_NK.dtype == torch.float32:
        return product(left_NK, right_MK)
    if left_NK.device.type == "cuda":
        return torch.mm(left_NK, right_MK.T, out_dtype=torch.float32)
    return product(left_NK.float(), right_MK.float())  # on the CPU, torch.mm has no out_dtype


def _chunks(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, start + chunk_tokens) for start in range(0, num_tokens, chunk_tokens)]
