"""Which kernel the learner's attention runs on this machine, and the rate of each that can."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.learner import seconds_of
from benchmarks.gpu.models import SHAPES, world_of
from learner.distributed.world import World

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
REPEATS = 5


def attention(findings: Findings, device: str, *, models: list[str]) -> None:
    """Forward and backward of one layer over one response of the longest length, by each kernel and by torch's choice.

    TFLOP/s count causal attention: 2 products of half the positions forward, 5 backward.
    """
    world = world_of(device)
    if world.device.type == "cuda":
        findings.add(cudnn=torch.backends.cudnn.version())
    for model in models:
        shape = SHAPES[model]
        size = (1, shape.heads, shape.longest, shape.head_size)
        inputs = [_random(size, world), *(_random((1, shape.kv_heads, *size[2:]), world) for _ in range(2))]
        flops = 7 * size[1] * size[2] ** 2 * size[3]
        for name, backend in BACKENDS.items():
            if name == "math" and world.device.type == "cuda":  # all scores at once: gigabytes
                continue
            try:
                with sdpa_kernel(backend):
                    seconds = seconds_of(lambda inputs=inputs: _pass(inputs), world, REPEATS)
            except RuntimeError as error:
                findings.add(**{f"{model}_{name}": f"not here: {str(error).splitlines()[0]}"})
                continue
            findings.add(**{f"{model}_{name}_tflops": flops / seconds / 1e12})
        findings.add(**{f"{model}_chosen_tflops": flops / seconds_of(lambda i=inputs: _pass(i), world, REPEATS) / 1e12})


def _random(size: tuple[int, ...], world: World) -> Tensor:
    return torch.randn(size, device=world.device, dtype=torch.bfloat16, requires_grad=True)


def _pass(inputs: list[Tensor]) -> None:
    scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True).sum().backward()
