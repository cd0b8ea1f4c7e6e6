"""How a model comes to the ranks: rank 0 reads it, checks it, and gives the others their parts, tensor by tensor.

    rank 0          reads the whole model in float32 into host memory
    every rank      builds it without data (on `meta`), spreads it, and takes its part of one tensor after the other

So no rank but 0 ever holds a whole model, and no accelerator holds more than one whole tensor of it. One rank in
float32 reads the model straight to its device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bapo.core.errors import ConfigError
from learner.distributed.sharding import broadcast, decoder_layers, is_spread, scatter_like, shard
from learner.distributed.world import World
from learner.model.cpu_matmul import use_onednn

Module = TypeVar("Module", bound=nn.Module)


def load_module(
    read: Callable[[], Module],
    build: Callable[[], Module],
    *,
    world: World,
    dtype: torch.dtype,
    check: Callable[[Module], None] = lambda module: None,
    recompute: bool = False,
    frozen: bool = False,
) -> Module:
    """A module with a transformers model as `.model`, ready to compute. All ranks must call it.

    Args:
        read: the module with its weights, float32, on the CPU; called on rank 0 alone.
        build: the same without weights.
        dtype: of the forward pass.
        check: refuses a module that cannot be trained, before it is spread.
        frozen: kept in `dtype` where it is spread, without gradients.
    Raises: ConfigError, on every rank, when rank 0 cannot read it or refuses it.
    """
    if not is_spread(world, dtype):
        module = _ready(read().to(world.device))
        check(module)
        if recompute:
            checkpoint_activations(module)
        return module.requires_grad_(False) if frozen else module
    source = _read_on_leader(read, check, world)
    with torch.device("meta"):
        module = build()
    if frozen:
        for parameter in module.requires_grad_(False).parameters():
            parameter.data = parameter.data.to(dtype)
    if recompute:
        checkpoint_activations(module)
    shard(module, world, dtype)
    module.to_empty(device=world.device)
    _fill(module, source, world)
    return _ready(module)


def _ready(module: Module) -> Module:
    use_onednn(module.get_submodule("model"))
    return module.eval()


def _read_on_leader(read: Callable[[], Module], check: Callable[[Module], None], world: World) -> Mapping[str, Tensor]:
    """Parameters and buffers on rank 0, nothing elsewhere; a refusal is everybody's."""
    refusal: bytes | memoryview | None = None
    tensors: dict[str, Tensor] = {}
    if world.leads:
        try:
            source = _ready(read())
            check(source)
            tensors = {**dict(source.named_parameters()), **dict(source.named_buffers())}
        except ConfigError as error:
            refusal = str(error).encode()
    refusal = world.share(refusal)
    if refusal is not None:
        raise ConfigError(bytes(refusal).decode())
    return tensors


@torch.no_grad()
def _fill(module: nn.Module, source: Mapping[str, Tensor], world: World) -> None:
    """Rank 0's values into the parameters and buffers of all."""
    for name, parameter in module.named_parameters():
        parameter.copy_(scatter_like(source.get(name), parameter))
    for name, buffer in module.named_buffers():  # also those in no file, such as the frequencies of rotary positions
        if world.leads:
            buffer.copy_(source[name])
        broadcast(buffer)


def checkpoints_activations(setting: bool | Literal["auto"], device: torch.device) -> bool:
    """learner.gradient_checkpointing; auto: where memory is scarce, on CUDA."""
    return device.type == "cuda" if setting == "auto" else setting


def checkpoint_activations(module: nn.Module) -> None:
    """Activation checkpointing, in place, before the module is spread over ranks: every decoder layer of `module.model`
    keeps its input alone and computes the rest again on the way back.

    Without it the activations of every layer stay until the backward pass: in bfloat16 34 D bytes a token and layer,
    or some 60 D where the MLP is gated and wide (Korthikanti et al. 2022, section 4.1, without scores), with it 2 D,
    and those of one layer at a time. The price is one more forward pass through the layers, a third of a step's
    arithmetic.

    The numbers are the same to the last bit: a layer sees the same tensors and the same `Packing`, which travel as its
    arguments, and draws nothing at random, because the model is always in eval mode. For that reason the random state
    is not kept either, and transformers' own switch, which only acts in training mode, is not used.

    The forward function is replaced, not the layer: parameters keep their names, and FSDP, whose hooks stand around
    the forward function, gathers a layer's weights before it is computed again.
    """
    for layer in decoder_layers(module):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
