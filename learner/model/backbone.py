"""How the learner runs a transformers model, with or without images: packed text, each image once per group.

    vision tower   each image separately, with torch's attention
    text           packed (`learner.batch.packed_attention`)

Suffixes: N packed tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from bapo.config.tree import Config, ModelConfig
from bapo.core.errors import ConfigError
from learner.batch.microbatch import MicroBatch
from learner.batch.packed_attention import NAME as PACKED
from learner.batch.packing import PassCost
from learner.model.lora import adapted_layers

PLAIN = "sdpa"
"""Name of torch's attention in transformers."""


def reads_images(settings: PreTrainedConfig) -> bool:
    """Whether it is the configuration of a vision-language model."""
    return getattr(settings, "vision_config", None) is not None


def attention(settings: PreTrainedConfig, text: str = PACKED) -> str | dict[str, str]:
    """The argument `attn_implementation` of transformers."""
    return {"text_config": text, "vision_config": PLAIN} if reads_images(settings) else text


def refuse_changing_rope(settings: PreTrainedConfig, config: Config) -> None:
    """Refuse rotary frequencies that would differ between passes, or between the learner and the engines.

    transformers chooses those of rope types longrope and dynamic by the largest position in a pass, so by what else is
    packed, and vLLM those of longrope by max_model_len. Up to the original context they never change.

    Raises: ConfigError if a sequence of the run, or an engine, exceeds it.
    """
    for kind, context in _original_contexts(settings.get_text_config()):
        asked, keys = config.rollout.longest_sequence, "rollout.max_prompt_tokens + rollout.max_response_tokens"
        if config.sft is not None:
            asked, keys = config.learner.microbatch_tokens, "learner.microbatch_tokens"
        engine = config.rollout.engine_options.get("max_model_len", asked)
        if asked <= context and isinstance(engine, int) and 0 < engine <= context:
            continue
        if asked <= context:
            asked, keys = engine, "rollout.engine_options.max_model_len"
        raise ConfigError(
            f"{keys} = {asked} is more than the {context} tokens up to which the rotary frequencies of "
            f"{config.model.path} (rope type {kind}) are fixed; beyond, log-probs would depend on what else is in a "
            f"pass: use at most {context}, or another model.path"
        )


def _original_contexts(text: PreTrainedConfig) -> Iterator[tuple[str, int]]:
    """Each rope type whose frequencies change with the length, and the tokens up to which they do not."""
    found = getattr(text, "rope_parameters", None) or {}
    for rope in (found, *(own for own in found.values() if isinstance(own, Mapping))):  # by layer type in some models
        kind = str(rope.get("rope_type"))
        if kind == "longrope":
            yield kind, rope["original_max_position_embeddings"]
        elif "dynamic" in kind:
            yield kind, text.max_position_embeddings


def hidden_states(base: nn.Module, micro: MicroBatch) -> Tensor:
    """[N, D] last hidden states of a model without its output head."""
    images, pictures, nothing = micro.images, {}, None
    if images is not None:
        pictures = {"pixel_values": images.pixels, "image_grid_thw": images.grid}
    elif (tower := getattr(base, "visual", None)) is not None:
        nothing = 0.0 * _idle(tower, micro.token_ids_N.device)
    output = base(
        input_ids=micro.token_ids_N.unsqueeze(0),
        position_ids=micro.positions_N.unsqueeze(-2),
        use_cache=False,
        packing=micro.packing,
        **pictures,
    )
    hidden_ND: Tensor = output.last_hidden_state[0]
    return hidden_ND if nothing is None else hidden_ND + nothing


def _idle(tower: Any, device: torch.device) -> Tensor:
    """A scalar computed by the vision tower without an image. FSDP gathers its layers, so all ranks must run the tower
    equally often and before the text; and every parameter gets a gradient."""
    settings = tower.config
    side = settings.spatial_merge_size
    size = settings.in_channels * settings.temporal_patch_size * settings.patch_size**2
    pixels = torch.zeros(side * side, size, device=device, dtype=tower.dtype)
    grid = torch.tensor([[1, side, side]], device=device)
    found: Tensor = tower(pixels, grid_thw=grid).pooler_output.sum()
    return found


def freeze_vision(model: nn.Module, settings: ModelConfig) -> None:
    """Freeze the vision tower if `model.freeze_vision`. Raises: ConfigError for a model without one."""
    if not settings.freeze_vision:
        return
    towers = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "visual"]
    if not towers:
        raise ConfigError(f"model.freeze_vision: {settings.path} has no vision tower; remove this setting")
    towers[0].requires_grad_(False)


def pass_cost(model: PreTrainedModel) -> PassCost:
    """Cost of a pass of a causal LM.

    The layers have 2 FLOPs per token and parameter. Their attention has 2 products of 2 H D FLOPs for each pair of
    tokens, of which causality keeps half: 2 H D per layer and squared length.

    With LoRA the layers and the head have no gradient of their weights: two products per weight instead of three, so
    that attention counts 3/2 times as much.

    The vision tower is not counted; of experts, all are, so for them attention counts too little.
    """
    settings = model.config.get_text_config()
    layers: int = settings.num_hidden_layers
    heads: int = settings.num_attention_heads
    hidden: int = settings.hidden_size
    head_size: int = getattr(settings, "head_dim", None) or hidden // heads
    embeddings = sum(parameter.numel() for parameter in model.get_input_embeddings().parameters())
    linear = sum(parameter.numel() for parameter in model.get_decoder().parameters()) - embeddings
    attention = layers * heads * head_size / linear
    return PassCost(
        head=settings.vocab_size * hidden / linear, attention=attention * (1.5 if adapted_layers(model) else 1.0)
    )
