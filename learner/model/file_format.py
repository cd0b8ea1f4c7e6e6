"""Weights in the Hugging Face file format, by transformers' own conversion: experts are one parameter, but many tensors
of a file.

    parameter   ...mlp.experts.gate_up_proj                                           [E, 2 I, D]
    file        ...mlp.experts.0.gate_proj.weight, ...mlp.experts.0.up_proj.weight    [I, D] each, for E experts

Published weights and exported models have the tensors of files, which vLLM expects; checkpoints have parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def file_tensors(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file, contiguous; some are views.

    Args:
        tensors: by parameter name, not sharded. All of them, unless `converts_singly`.
    """
    converted: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return {name: tensor.contiguous() for name, tensor in converted.items()}


def file_shapes(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file without their values, parameter by parameter in this order. `tensors` may be sharded."""
    shapes: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        shapes |= file_tensors(model, {name: _without_values(tensor)})
    return shapes


def converts_singly(model: PreTrainedModel) -> bool:
    """Whether no tensor of a file has parts of several parameters."""
    parameters = dict(model.named_parameters())
    whole = file_tensors(model, {name: _without_values(tensor) for name, tensor in parameters.items()})
    singly = file_shapes(model, parameters)
    return {name: each.shape for name, each in whole.items()} == {name: each.shape for name, each in singly.items()}


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
