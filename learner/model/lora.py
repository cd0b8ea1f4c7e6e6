"""LoRA in the learner: the linear layers of a model get two small matrices that train, and the model is frozen.

    y = x W'^T       W' = round(W + scale B A), made for each pass and again for its gradient (`adapter_file.merged`)
    dA = scale (dY B)^T X       dB = scale dY^T (X A^T)       dX = dY W'       no dW

The layer's class is replaced in place, as `cpu_matmul` does: names of the base model stay, and FSDP, checkpoints and
`decoder_layers` see the same model. The engines multiply by the same W', so LoRA adds no difference to theirs.

Suffixes: N rows, I inputs, O outputs, R the rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bapo.algorithms.randomness import generator_for
from bapo.config.tree import LoraConfig
from bapo.runtime.adapter_file import merged
from bapo.runtime.lora import LORA_A, LORA_B, can_be_adapted, is_adapted, refuse_missing
from learner.distributed.shard_files import weights_of
from learner.distributed.sharding import whole
from learner.model.cpu_matmul import product


class LoraLinear(nn.Linear):
    """A frozen linear layer with an adapter."""

    lora_A: nn.Parameter
    """[R, I]"""
    lora_B: nn.Parameter
    """[O, R]"""
    scale: float
    is_on: bool

    def forward(self, input: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        if not self.is_on:
            return functional.linear(input, self.weight, self.bias)
        rows_NI = input.reshape(-1, input.shape[-1])
        output: Tensor = _MergedProduct.apply(  # type: ignore[no-untyped-call]
            rows_NI, self.weight, self.lora_A, self.lora_B, self.scale
        )
        output = output.view(*input.shape[:-1], -1)
        return output if self.bias is None else output + self.bias


class _MergedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI, a_RI, b_OR)
        ctx.scale = scale
        return product(x_NI, merged(weight_OI, a_RI, b_OR, scale))

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, None, Tensor, Tensor, None]:
        x_NI, weight_OI, a_RI, b_OR = ctx.saved_tensors
        grad_x_NI = None
        if ctx.needs_input_grad[0]:
            grad_x_NI = product(grad_NO, merged(weight_OI, a_RI, b_OR, ctx.scale).T)
        grad_b_OR = product(grad_NO.T, (product(x_NI, a_RI) * ctx.scale).T)
        grad_a_RI = product((product(grad_NO, b_OR.T) * ctx.scale).T, x_NI.T)
        return grad_x_NI, None, grad_a_RI, grad_b_OR, None


def add_adapters(model: nn.Module, settings: LoraConfig, *, seed: int, base: str) -> None:
    """Freeze the model and adapt its layers, in place: A as PEFT begins it (uniform in +-1/sqrt(I)), B = 0.

    Args:
        seed: of A, by the layer's name.
        base: model.path, for messages.
    Raises: ConfigError if no layer has a name of `targets`.
    """
    model.requires_grad_(False)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    refuse_missing({name.rpartition(".")[2] for name in layers if can_be_adapted(name)}, settings, base)
    for name, layer in layers.items():
        if is_adapted(name, settings):
            _adapt(layer, settings, seed=seed, name=name)


def _adapt(layer: nn.Linear, settings: LoraConfig, *, seed: int, name: str) -> None:
    layer.__class__ = LoraLinear
    assert isinstance(layer, LoraLinear)
    layer.scale, layer.is_on = settings.scale, True
    outputs, inputs = layer.weight.shape
    options: dict[str, Any] = {"dtype": torch.float32, "device": layer.weight.device}
    layer.lora_A = nn.Parameter(torch.empty(settings.rank, inputs, **options))
    layer.lora_B = nn.Parameter(torch.zeros(outputs, settings.rank, **options))
    if not layer.weight.is_meta:
        limit = 1.0 / math.sqrt(inputs)
        values = generator_for(seed, 0, f"lora/{name}").uniform(-limit, limit, (settings.rank, inputs))
        layer.lora_A.data.copy_(torch.from_numpy(values))


def adapted_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """By name; empty without LoRA."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Those with a gradient, in order."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def kept_weights(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint and an update have of a policy: its weights (`weights_of`), with LoRA the adapter alone."""
    found = weights_of(model)
    return {name: tensor for name, tensor in found.items() if is_adapter(name)} or found


def base_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights without the adapter."""
    return {name: tensor for name, tensor in weights_of(model).items() if not is_adapter(name)}


def merged_weights(model: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The full tensors with the adapter in them, one at a time. Collective.

    Args:
        tensors: of `base_weights`.
        dtype: of floating-point results, and of the weights that engines multiply by.
    """
    layers = adapted_layers(model)
    for name, tensor in tensors.items():
        full = whole(tensor.to(dtype) if tensor.is_floating_point() else tensor)
        layer = layers.get(name.removesuffix(".weight"))
        if layer is not None and name.endswith(".weight"):
            full = merged(full, whole(layer.lora_A.to(dtype)), whole(layer.lora_B.to(dtype)), layer.scale)
        yield name, full


def is_adapter(parameter: str) -> bool:
    """Whether a parameter of this name is of an adapter."""
    return parameter.endswith((f".{LORA_A}", f".{LORA_B}"))


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model is its base: pi_ref without a second copy."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True
