"""How a model comes to the ranks: rank 0 reads it, checks it, and gives the others their parts, tensor by tensor.

    rank 0          reads the whole model in float32 into host memory
    every rank      builds it without data (on `meta`), spreads it, and takes its part of one tensor after the other

So no rank but 0 ever holds a whole model, and no accelerator holds more than one whole tensor of it. One rank in
float32 reads the model straight to its device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from bapo.errors import ConfigError
from learner.distributed import World, broadcast, is_spread, scatter_like, shard
from learner.onednn import use_onednn
from learner.recomputation import recompute_layers

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
            recompute_layers(module)
        return module.requires_grad_(False) if frozen else module
    source = _read_on_leader(read, check, world)
    with torch.device("meta"):
        module = build()
    if frozen:
        for parameter in module.requires_grad_(False).parameters():
            parameter.data = parameter.data.to(dtype)
    if recompute:
        recompute_layers(module)
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
