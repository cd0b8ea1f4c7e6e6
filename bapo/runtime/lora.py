"""Which layers LoRA adapts, and the shapes of their adapters, from the headers of the base model's files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from bapo.config.tree import LoraConfig
from bapo.core.errors import ConfigError
from bapo.runtime.model_files import INDEX, folder_of, missing_parts, safetensors_header

LORA_A, LORA_B = "lora_A", "lora_B"
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
GROUPS: Mapping[str, tuple[str, ...]] = {"all": (*ATTENTION, *MLP), "attention": ATTENTION, "mlp": MLP}
NOT_ADAPTED = ("visual", "vision_tower", "vision_model", "experts", "shared_expert", "embed_tokens", "lm_head")
"""Parts of a layer's path: a vision tower; experts, which are one tensor in the learner; embeddings; the head, whose
log-probs are computed in chunks."""


def target_names(settings: LoraConfig) -> tuple[str, ...]:
    """Last parts of the names of adapted layers."""
    return GROUPS[settings.targets] if isinstance(settings.targets, str) else tuple(settings.targets)


def is_adapted(layer: str, settings: LoraConfig) -> bool:
    """Whether the linear layer of this name gets an adapter."""
    path = layer.split(".")
    return path[-1] in target_names(settings) and not any(part in NOT_ADAPTED for part in path)


def base_files(path: str) -> list[Path]:
    """The weights of `model.path`, sorted. Raises: ConfigError if they are incomplete or not in safetensors files."""
    folder = folder_of(path)
    if folder is None or missing_parts(folder) or not (found := sorted(folder.glob("*.safetensors"))):
        raise ConfigError(f"model.lora: {path} has no complete weights in safetensors files, which adapters need")
    if not (folder / INDEX).is_file():
        return found
    listed = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    return [file for file in found if file.name in listed]  # a folder may have the weights in another format, too


def adapter_shapes(path: str, settings: LoraConfig) -> dict[str, tuple[int, ...]]:
    """NAME.lora_A -> (r, I) and NAME.lora_B -> (O, r) of every adapted layer of `model.path`, by its name there.

    Raises: ConfigError, OSError, ValueError for files that cannot be read.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in base_files(path):
        for name, tensor in safetensors_header(file).items():
            layer, _, leaf = name.rpartition(".")
            if leaf == "weight" and is_adapted(layer, settings):
                outputs, inputs = tensor["shape"]
                shapes[f"{layer}.{LORA_A}"] = (settings.rank, inputs)
                shapes[f"{layer}.{LORA_B}"] = (outputs, settings.rank)
    return shapes


def num_adapter_parameters(path: str, settings: LoraConfig) -> int:
    """Elements of all A and B; 0 if the model is not on this machine, or cannot be read."""
    try:
        return sum(math.prod(shape) for shape in adapter_shapes(path, settings).values())
    except (ConfigError, OSError, ValueError):
        return 0
