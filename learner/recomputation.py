"""Activation checkpointing: a decoder layer keeps its input alone and computes the rest again on the way back.

Without it the activations of every layer stay until the backward pass: in bfloat16 34 D bytes a token and layer, or
some 60 D where the MLP is gated and wide (Korthikanti et al. 2022, section 4.1, without scores), with it 2 D, and those
of one layer at a time. The price is one more forward pass through the layers, a third of the arithmetic of a step.

Recomputation gives the same numbers to the last bit: a layer sees the same tensors and the same `Packing`, which
travel as its arguments, and draws nothing at random, because the model is always in eval mode. For that reason the
random state is not kept either, and transformers' own switch, which only acts in training mode, is not used.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Setting = bool | Literal["auto"]


def recomputes(setting: Setting, device: torch.device) -> bool:
    """learner.gradient_checkpointing; auto: where memory is scarce, on CUDA."""
    return device.type == "cuda" if setting == "auto" else setting


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The layers of `module.model`, a transformers model, as it names them itself."""
    classes = set(getattr(module.model, "_no_split_modules", None) or ())
    return [layer for layer in module.modules() if type(layer).__name__ in classes]


def recompute_layers(module: nn.Module) -> None:
    """Let every decoder layer of `module.model` recompute its activations, in place; before it is spread over ranks.

    The forward function is replaced, not the layer: parameters keep their names, and FSDP, whose hooks stand around
    the forward function, gathers a layer's weights before it is computed again.
    """
    for layer in decoder_layers(module):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
