"""The output head of one chunk: by torch and by Triton's kernels, and the product before it."""

from __future__ import annotations

import torch

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.learner import seconds_of
from benchmarks.gpu.models import SHAPES, world_of
from learner.model import head_kernels
from learner.model.logprobs import _gradient, _logits, _statistics


def head(findings: Findings, device: str, *, model: str, chunks: list[int]) -> None:
    """Milliseconds per 1,024 tokens: logits; log-probs, entropies and their gradient, by either."""
    world, shape = world_of(device), SHAPES[model]
    usable = head_kernels.are_usable(world.device)
    findings.add(triton=usable)
    weight = torch.randn(shape.vocab, shape.width, device=world.device, dtype=torch.bfloat16) / shape.width**0.5
    for chunk in chunks:
        hidden = torch.randn(chunk, shape.width, device=world.device, dtype=torch.bfloat16)
        target = torch.randint(0, shape.vocab, (chunk,), device=world.device)
        grads = [torch.randn(chunk, device=world.device) for _ in range(2)]
        logits = _logits(hidden, weight, 1.0, None)

        def by_torch(logits=logits, target=target, grads=grads) -> None:  # type: ignore[no-untyped-def]
            _, entropy = _statistics(logits, target, with_entropy=True)
            assert entropy is not None
            _gradient(logits, target, entropy, *grads).to(torch.bfloat16)

        def by_triton(logits=logits, target=target, grads=grads) -> None:  # type: ignore[no-untyped-def]
            _, entropy, logz = head_kernels.statistics(logits, target)
            head_kernels.gradient(logits, logz, target, entropy, *grads, torch.bfloat16)

        ways = {"product": lambda h=hidden: _logits(h, weight, 1.0, None), "torch": by_torch}
        if usable:
            ways["triton"] = by_triton
        for name, way in ways.items():
            milliseconds = 1e3 * seconds_of(way, world) * 1024 / chunk
            findings.add(**{f"{name}_{chunk}_ms": milliseconds})
