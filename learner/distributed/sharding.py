"""Sharding of parameters and gradients over the ranks (FSDP2).

With one rank in float32 every function here is the identity. Functions that gather or scatter are collective.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported without __all__
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from learner.distributed.world import World, backend

log = logging.getLogger(__name__)


def is_spread(world: World, dtype: torch.dtype) -> bool:
    """Whether parameters are managed by FSDP: with several ranks, or a forward pass that is not float32."""
    return world.size > 1 or dtype != torch.float32


def shard(module: nn.Module, world: World, dtype: torch.dtype = torch.float32) -> None:
    """Shard the parameters over the ranks with FSDP2: one unit per decoder layer, embeddings and head, and the rest.

    With a mesh of two dimensions, each replica shards them over its own ranks (HSDP).

    FSDP averages gradients over all ranks, so the loss of each rank is multiplied by `world.size`.

    Args:
        module: has a transformers model as `.model`, and optionally `float32_parts`: modules that compute in float32.
        dtype: of the forward and backward pass. Parameters are gathered in it, layer by layer; the sharded
            parameters, the gradient reduction and the optimizer stay in float32.
    """
    if not is_spread(world, dtype):
        return
    _init_single_process_group(world)
    mesh = world.mesh or init_device_mesh(world.device.type, (world.size,))
    layers = decoder_layers(module)
    if not layers:
        log.warning("no decoder layers found in %s: FSDP gathers the whole model at once", type(module.model).__name__)
    precision = MixedPrecisionPolicy()
    if dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for part in getattr(module, "float32_parts", ()):
            fully_shard(part, mesh=mesh)
    for unit in (*layers, *_embeddings_and_head(module)):
        fully_shard(unit, mesh=mesh, mp_policy=precision)
    fully_shard(module, mesh=mesh, mp_policy=precision)


def _embeddings_and_head(module: nn.Module) -> list[nn.Module]:
    """Those of `module.model`, unless they share their weights: then the root gathers them once, for both."""
    model: Any = module.model
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    found = [end for end in ends if isinstance(end, nn.Module)]
    weights = {id(parameter) for end in found for parameter in end.parameters()}
    return found if len(weights) == len(found) else []


def _init_single_process_group(world: World) -> None:
    """FSDP requires a process group even for one process."""
    if dist.is_initialized():
        return
    dist.init_process_group(backend(world.device), store=HashStore(), rank=0, world_size=1)
    atexit.register(_destroy_process_group)


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def reshard(module: nn.Module) -> None:
    """Reshard the parameters: after a pass without gradients, FSDP's root still has unsharded ones in the dtype of the
    pass."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def abandon_pass(module: nn.Module) -> None:
    """Forget a pass that an exception has ended in its middle, so that it can be computed again.

    Otherwise FSDP waits for the end of that pass for ever, and reduces no gradient any more; and gradients that it has
    not reduced yet would be counted twice. One unit is unsharded at a time: memory is scarce here.
    """
    if not isinstance(module, FSDPModule):
        module.zero_grad(set_to_none=True)
        return
    module.reset_iter_state()
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.unshard()
            unit.zero_grad(set_to_none=True)
            unit.reshard()
    module.zero_grad(set_to_none=True)
    module.reset_iter_state()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a possibly sharded one, detached. Collective."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather(
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    into: dict[str, Tensor] | None = None,
    visit: Callable[[Tensor], None] = lambda _: None,
    convert: Callable[[str, Tensor], Mapping[str, Tensor]] = lambda name, full: {name: full},
) -> dict[str, Tensor]:
    """Full tensors on the CPU of rank 0; empty on other ranks. Collective.

    Args:
        dtype: of floating-point results; default: unchanged. Shards are cast before they are gathered.
        into: result of an earlier call, which is overwritten and returned; an empty one is filled. Its tensors never
            share memory with `tensors`, and are page-locked if these are on a GPU.
        visit: called on rank 0 with each result on its device.
        convert: makes the results of a full tensor, of its dtype and number of elements, from its name.
    """
    keeps = not dist.is_initialized() or dist.get_rank() == 0
    found: dict[str, Tensor] = {} if into is None else into
    for name, tensor in tensors.items():
        full = whole(tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor)
        if keeps:
            parts = convert(name, full)
            if into is not None and not parts.keys() <= into.keys():
                into |= _empty_on_host(parts, full)
            for key, part in parts.items():
                visit(part)
                if into is None:
                    found[key] = part.to("cpu").contiguous()
                else:
                    into[key].copy_(part, non_blocking=True)
            del parts, part
        del full  # before the next one is gathered
    if into is not None and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return found


def _empty_on_host(parts: Mapping[str, Tensor], full: Tensor) -> dict[str, Tensor]:
    """Memory for the parts of `full` in one allocation, because page-locking many small ones is slow."""
    flat = torch.empty(full.numel(), dtype=full.dtype, pin_memory=full.is_cuda)
    pieces = flat.split([part.numel() for part in parts.values()])
    return {name: piece.view(part.shape) for (name, part), piece in zip(parts.items(), pieces, strict=True)}


def scatter_like(value: Tensor | None, model: Tensor) -> Tensor:
    """Shard `value` of rank 0 like `model`. Collective; other ranks pass None."""
    assert isinstance(model, DTensor)
    if value is None:
        value = torch.empty(model.shape, dtype=model.dtype, device=model.device)
    return distribute_tensor(value.to(model.device, model.dtype), model.device_mesh, model.placements)


def broadcast(tensor: Tensor) -> None:
    """Copy rank 0's values to the same tensor of every rank. Collective."""
    dist.broadcast(tensor, src=0)


@torch.no_grad()
def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """Copy the parameters of `source` to `target`, which is sharded in the same way. Collective."""
    reshard(source)
    reshard(target)
    for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
        mine.copy_(theirs)


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The decoder layers of `module.model`, a transformers model."""
    classes = set(getattr(module.model, "_no_split_modules", None) or ())
    return [layer for layer in module.modules() if type(layer).__name__ in classes]
