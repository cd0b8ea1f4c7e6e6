"""How decoder layers run: with kept or recomputed activations, compiled or not.

Without checkpointing the activations of every layer are kept until the backward pass: in bfloat16 34 D bytes per token
and layer, or about 60 D with a wide gated MLP (Korthikanti et al. 2022, section 4.1, without scores); with it 2 D, plus
the activations of one layer at a time. The cost is an extra forward pass through the layers, about a third of a step's
FLOPs. So with a budget (learner.activation_gib) as many layers as fit keep theirs, decided for each micro-batch. On one
GPU the budget is what two steps have left free (`ActivationBudget.measure`).

Results are bitwise identical: a layer gets the same tensors and the same `Packing` as arguments, and there is no
randomness, because the model is always in eval mode. So the RNG state is not saved, and transformers' own switch, which
requires training mode, is not used.

The forward function is replaced, not the layer: parameter names are unchanged, and FSDP, whose hooks wrap the forward
function, gathers a layer's weights before it is computed or recomputed.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from bapo.config.learner import LearnerConfig
from learner.distributed.sharding import decoder_layers

log = logging.getLogger(__name__)

Forward = Callable[..., Any]

GIB = 1 << 30
STEPS_TO_MEASURE = 2
"""The moments of the optimizer appear at the end of the first one."""
RESERVE_SHARE = 0.08
"""Of the GPU's memory, for longer batches and fragments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOptions:
    """How the decoder layers of a model run."""

    recompute: bool = False
    """Recompute activations in the backward pass."""
    keep_bytes: int | None = 0
    """Activations that are kept nevertheless, summed over the layers; None: as many as fit, once that is known."""
    compiled: bool = False

    @staticmethod
    def of(
        settings: LearnerConfig, device: torch.device, *, frozen: bool = False, is_worth_compiling: bool = True
    ) -> LayerOptions:
        """Options of a model that trains, or of a frozen one."""
        return LayerOptions(
            recompute=not frozen and checkpoints_activations(settings.gradient_checkpointing, device),
            keep_bytes=_keep_bytes(settings, device),
            compiled=compiles_layers(settings.compile, device, is_worth_it=is_worth_compiling),
        )


def checkpoints_activations(setting: bool | Literal["auto"], device: torch.device) -> bool:
    """Resolve learner.gradient_checkpointing; auto: only on CUDA."""
    return device.type == "cuda" if setting == "auto" else setting


def _keep_bytes(settings: LearnerConfig, device: torch.device) -> int | None:
    if settings.activation_gib != "auto":
        return int(settings.activation_gib * GIB)
    return None if device.type == "cuda" and settings.num_ranks == 1 else 0


def compiles_layers(setting: bool | Literal["auto"], device: torch.device, *, is_worth_it: bool) -> bool:
    """Resolve learner.compile; auto: on CUDA, where it is worth it and a compiler is installed."""
    if setting != "auto":
        return setting
    if device.type != "cuda" or not is_worth_it:
        return False
    if not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        log.warning("decoder layers are not compiled: no C++ compiler is installed (apt-get install g++)")
        return False
    return True


def prepare_layers(module: nn.Module, options: LayerOptions, *, backend: str = "inductor") -> None:
    """Apply the options in place, before sharding, to the layers of `module.model`.

    Layers of a vision tower are never compiled, because their shapes are data, and always recompute.

    Args:
        backend: of torch.compile.
    """
    if options.compiled:
        for layer in _text_layers(module):
            # One graph for every layer and length; it breaks at the attention alone (`packed_attention`).
            layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)
    if not options.recompute:
        return
    budget = ActivationBudget(options.keep_bytes)
    module.register_forward_pre_hook(lambda *_: budget.begin_pass())
    module.activation_budget = budget  # type: ignore[assignment]  # no module: for `budget_of`
    text = set(_text_layers(module)) if options.keep_bytes != 0 else set()
    for layer in decoder_layers(module):
        run = partial(budget.run, layer) if layer in text else _recomputed
        layer.forward = partial(run, layer.forward)


def _text_layers(module: nn.Module) -> list[nn.Module]:
    vision = {part for name, part in module.named_modules() if "visual" in name.split(".")}
    return [layer for layer in decoder_layers(module) if layer not in vision]


def _recomputed(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def budget_of(module: nn.Module) -> ActivationBudget | None:
    """The budget of a module whose layers recompute their activations."""
    return getattr(module, "activation_budget", None)


class ActivationBudget:
    """Lets layers keep their activations until those of a pass have used up `limit` bytes."""

    def __init__(self, limit: int | None) -> None:
        """`limit`: None: nothing, until `measure` has seen two steps."""
        self._limit = limit or 0
        self._steps_to_measure = STEPS_TO_MEASURE if limit is None else 0
        self._left = 0.0
        self._bytes_per_token = 0.0
        self._measured_tokens = 0

    def measure(self, device: torch.device) -> None:
        """After a step: once the peak is known, with the optimizer's moments in it, keep what is free then."""
        if not self._steps_to_measure:
            return
        self._steps_to_measure -= 1
        if not self._steps_to_measure:
            free, total = torch.cuda.mem_get_info(device)
            at_peak = free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
            self._limit = max(0, int(at_peak - RESERVE_SHARE * total))
            log.info("layers keep up to %.1f GiB of activations: what is free at the peak", self._limit / GIB)

    def give_up(self) -> bool:
        """After an out-of-memory error: keep nothing any more. Returns: whether anything was kept before."""
        kept, self._limit = self._limit > 0, 0
        return kept

    def begin_pass(self) -> None:
        """At the start of a forward pass. The backward pass of the previous one is over."""
        self._left = self._limit

    def run(self, layer: nn.Module, forward: Forward, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """A layer's output; `hidden`: [1, N, D]. The largest pass so far is measured, others are estimated from it."""
        tokens = hidden.shape[-2]
        if not torch.is_grad_enabled():
            return forward(hidden, *args, **kwargs)
        if not self._limit:
            return _recomputed(forward, hidden, *args, **kwargs)
        if tokens > self._measured_tokens:
            kept = _Kept(layer)
            with saved_tensors_hooks(kept.add, lambda tensor: tensor):
                output = forward(hidden, *args, **kwargs)
            self._measured_tokens, self._bytes_per_token = tokens, kept.bytes / tokens
            self._left -= kept.bytes
            return output
        needed = tokens * self._bytes_per_token
        if needed > self._left:
            return _recomputed(forward, hidden, *args, **kwargs)
        self._left -= needed
        return forward(hidden, *args, **kwargs)


class _Kept:
    """Bytes that a layer's graph keeps, without its parameters."""

    def __init__(self, layer: nn.Module) -> None:
        self._seen = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
        self.bytes = 0

    def add(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor.detach()  # a tensor that its own graph keeps would never be freed
