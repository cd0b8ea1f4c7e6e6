"""Loading a model: rank 0 reads and checks it, and scatters it to the other ranks, tensor by tensor.

    rank 0          reads the whole model in float32 into host memory
    every rank      builds it without data (on `meta`), shards it, and receives its shard of each tensor in turn

So only rank 0 ever has a whole model, and no accelerator has more than one whole tensor of it. A single rank in float32
reads the model directly to its device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from bapo.core.errors import ConfigError
from learner.distributed.sharding import broadcast, is_spread, scatter_like, shard
from learner.distributed.world import World
from learner.model.cpu_matmul import use_onednn
from learner.model.layers import LayerOptions, prepare_layers

Module = TypeVar("Module", bound=nn.Module)

PLAIN_LAYERS = LayerOptions()


def load_module(
    read: Callable[[], Module],
    build: Callable[[], Module],
    *,
    world: World,
    dtype: torch.dtype,
    check: Callable[[Module], None] = lambda module: None,
    layers: LayerOptions = PLAIN_LAYERS,
    frozen: bool = False,
) -> Module:
    """Load a module with a transformers model as `.model`, ready to compute. Collective.

    Args:
        read: returns the module with its weights, float32, on the CPU; called only on rank 0.
        build: returns it without weights.
        dtype: of the forward pass.
        layers: how decoder layers run.
        check: raises for a module that cannot be trained, before it is sharded.
        frozen: without gradients; sharded in `dtype`.
    Raises: ConfigError on every rank if `read` or `check` fails on rank 0.
    """
    if not is_spread(world, dtype):
        module = _ready(read().to(world.device), layers)
        check(module)
        prepare_layers(module, layers)
        return module.requires_grad_(False) if frozen else module
    source = _read_on_leader(lambda: _ready(read(), layers), check, world)
    with torch.device("meta"):
        module = build()
    if frozen:
        cast_frozen(module.requires_grad_(False), dtype)
    prepare_layers(module, layers)
    shard(module, world, dtype)
    module.to_empty(device=world.device)
    _fill(module, source, world)
    return _ready(module, layers)


def cast_frozen(module: nn.Module, dtype: torch.dtype) -> None:
    """Give parameters without gradients the dtype of the pass: no optimizer needs more."""
    for parameter in module.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _ready(module: Module, layers: LayerOptions) -> Module:
    if not layers.compiled:  # Inductor chooses the products itself, and cannot compile this one
        use_onednn(module.get_submodule("model"))
    return module.eval()


def _read_on_leader(read: Callable[[], Module], check: Callable[[Module], None], world: World) -> Mapping[str, Tensor]:
    """Parameters and buffers on rank 0, empty elsewhere; an error is raised on every rank."""
    refusal: bytes | memoryview | None = None
    tensors: dict[str, Tensor] = {}
    if world.leads:
        try:
            source = read()
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
    """Copy rank 0's values into the parameters and buffers of all ranks."""
    for name, parameter in module.named_parameters():
        parameter.copy_(scatter_like(source.get(name), parameter))
    for name, buffer in module.named_buffers():  # including non-persistent ones, such as rotary frequencies
        if world.leads:
            buffer.copy_(source[name])
        broadcast(buffer)
