"""The head's Triton kernels in Triton's interpreter, next to float64: `python -m tests.support.head_kernels`.

A process of its own, because Triton reads TRITON_INTERPRET when it is imported. Prints one JSON line: the largest
differences of log-probs, entropies, and gradients of hidden states and head.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

from learner.model import head_kernels
from learner.model.logprobs import NEVER, response_logprobs

NUM_TOKENS, SIZE, VOCAB = 13, 24, 1003
"""Three blocks of words and a part of a fourth."""


def differences(seed: int, *, temperature: float, excluded: list[int]) -> dict[str, float]:
    """Between the kernels in float32 and autograd in float64, on fresh random inputs."""
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(NUM_TOKENS, SIZE, generator=rng)
    head = torch.randn(VOCAB, SIZE, generator=rng)
    target = torch.randint(0, VOCAB, (NUM_TOKENS,), generator=rng)
    weights = torch.randn(2, NUM_TOKENS, generator=rng)
    words = torch.tensor(excluded, dtype=torch.long)
    inputs = [each.clone().requires_grad_() for each in (hidden, head)]
    mine: Any = response_logprobs(
        *inputs, target, temperature=temperature, chunk_tokens=5, excluded=words if excluded else None
    )
    exact = [each.double().requires_grad_() for each in (hidden, head)]
    log_p = (exact[0] @ exact[1].T / temperature).index_fill(1, words, NEVER).log_softmax(-1)
    theirs = (log_p.gather(1, target[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1))
    for found in (mine, theirs):
        (found[0] * weights[0] + found[1] * weights[1]).sum().backward()
    pairs = {"logprobs": (mine[0], theirs[0]), "entropies": (mine[1], theirs[1])}
    pairs |= {name: (inputs[i].grad, exact[i].grad) for i, name in enumerate(("hidden", "head"))}
    return {name: float((one.double() - other).detach().abs().max()) for name, (one, other) in pairs.items()}


def main() -> None:
    """The largest of some."""
    with torch.no_grad():  # as in the pass that asks first
        gap = head_kernels._largest_gap(torch.device("cpu"))
    head_kernels.BLOCK = 256
    head_kernels.are_usable = lambda _: True  # type: ignore[assignment]
    seed = time.time_ns() % 2**31
    never = [0, 7, 1002]
    found = [
        differences(seed, temperature=1.0, excluded=[]),
        differences(seed + 1, temperature=0.7, excluded=never),
    ]
    sys.stdout.write(
        json.dumps({"seed": seed, "check": gap} | {name: max(each[name] for each in found) for name in found[0]}) + "\n"
    )


if __name__ == "__main__":
    main()
