"""Loading a model: rank 0 reads and checks it, and scatters it to the other ranks, tensor by tensor.

    rank 0          reads the whole model in float32 into host memory
    every rank      builds it without data (on `meta`), shards it, and receives its shard of each tensor in turn

So only rank 0 ever has a whole model, and no accelerator has more than one whole tensor of it. A single rank in float32
reads the model directly to its device.
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
    """Load a module with a transformers model as `.model`, ready to compute. Collective.

    Args:
        read: returns the module with its weights, float32, on the CPU; called only on rank 0.
        build: returns it without weights.
        dtype: of the forward pass.
        check: raises for a module that cannot be trained, before it is sharded.
        frozen: without gradients; sharded in `dtype`.
    Raises: ConfigError on every rank if `read` or `check` fails on rank 0.
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
    """Parameters and buffers on rank 0, empty elsewhere; an error is raised on every rank."""
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
    """Copy rank 0's values into the parameters and buffers of all ranks."""
    for name, parameter in module.named_parameters():
        parameter.copy_(scatter_like(source.get(name), parameter))
    for name, buffer in module.named_buffers():  # including non-persistent ones, such as rotary frequencies
        if world.leads:
            buffer.copy_(source[name])
        broadcast(buffer)


def checkpoints_activations(setting: bool | Literal["auto"], device: torch.device) -> bool:
    """Resolve learner.gradient_checkpointing; auto: only on CUDA."""
    return device.type == "cuda" if setting == "auto" else setting


def checkpoint_activations(module: nn.Module) -> None:
    """Enable activation checkpointing in place, before sharding: every decoder layer of `module.model` keeps only its
    input and recomputes the rest in the backward pass.

    Without it the activations of every layer are kept until the backward pass: in bfloat16 34 D bytes per token and
    layer, or about 60 D with a wide gated MLP (Korthikanti et al. 2022, section 4.1, without scores); with it 2 D,
    plus the activations of one layer at a time. The cost is an extra forward pass through the layers, about a third
    of a step's FLOPs.

    Results are bitwise identical: a layer gets the same tensors and the same `Packing` as arguments, and there is no
    randomness, because the model is always in eval mode. So the RNG state is not saved, and transformers' own switch,
    which requires training mode, is not used.

    The forward function is replaced, not the layer: parameter names are unchanged, and FSDP, whose hooks wrap the
    forward function, gathers a layer's weights before it is recomputed.
    """
    for layer in decoder_layers(module):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
