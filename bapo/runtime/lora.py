"""Which layers LoRA adapts, and the shapes of their adapters, from the headers of the base model's files."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path

from bapo.config.tree import LoraConfig
from bapo.core.errors import ConfigError
from bapo.runtime.model_files import CONFIG, INDEX, folder_of, missing_parts, safetensors_header

LORA_A, LORA_B = "lora_A", "lora_B"
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
GROUPS: Mapping[str, tuple[str, ...]] = {"all": (*ATTENTION, *MLP), "attention": ATTENTION, "mlp": MLP}
EXPERTS = ("experts", "shared_expert", "shared_experts")
NOT_ADAPTED = ("visual", "vision_tower", "vision_model", *EXPERTS, "embed_tokens", "lm_head")
"""Parts of a layer's path: a vision tower; experts, which are one tensor in the learner; embeddings; the head, whose
log-probs are computed in chunks."""
WHOLE = "model.safetensors"


def target_names(settings: LoraConfig) -> tuple[str, ...]:
    """Last parts of the names of adapted layers."""
    return GROUPS[settings.targets] if isinstance(settings.targets, str) else tuple(settings.targets)


def is_adapted(layer: str, settings: LoraConfig) -> bool:
    """Whether the linear layer of this name gets an adapter."""
    return layer.rpartition(".")[2] in target_names(settings) and can_be_adapted(layer)


def can_be_adapted(layer: str) -> bool:
    """Whether the linear layer of this name may get one."""
    return not any(part in NOT_ADAPTED for part in layer.split("."))


def base_files(path: str) -> list[Path]:
    """The weights of `model.path`, sorted.

    Raises: ConfigError if they are incomplete, quantized or not in safetensors files.
    """
    folder = folder_of(path)
    if folder is None or missing_parts(folder) or not (found := sorted(folder.glob("*.safetensors"))):
        raise ConfigError(f"model.lora: {path} has no complete weights in safetensors files, which adapters need")
    settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if any("quantization_config" in part for part in (settings, settings.get("text_config") or {})):
        raise ConfigError(
            f"model.lora: {path} is quantized (quantization_config in its {CONFIG}); adapters are merged into plain "
            "weights, so use the model in bfloat16"
        )
    # A folder may have the weights in another format, too, or further weights.
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if not (folder / INDEX).is_file():
        return found
    listed = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    return [file for file in found if file.name in listed]


def adapter_shapes(path: str, settings: LoraConfig) -> dict[str, tuple[int, ...]]:
    """NAME.lora_A -> (r, I) and NAME.lora_B -> (O, r) of every adapted layer of `model.path`, by its name there.

    Raises: ConfigError for a target that the model does not have, or that would adapt only some of the layers of a
        model of experts; OSError, ValueError for files that cannot be read.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    available = set()
    for name, tensor in [each for file in base_files(path) for each in safetensors_header(file).items()]:
        layer, _, leaf = name.rpartition(".")
        parts = set(name.split("."))
        if parts & set(EXPERTS) and parts & set(target_names(settings)):
            raise ConfigError(f'model.lora.targets: experts of {path} cannot be adapted; use targets = "attention"')
        if leaf != "weight" or len(tensor["shape"]) != 2 or not can_be_adapted(layer):
            continue
        available.add(layer.rpartition(".")[2])
        if is_adapted(layer, settings):
            outputs, inputs = tensor["shape"]
            shapes[f"{layer}.{LORA_A}"] = (settings.rank, inputs)
            shapes[f"{layer}.{LORA_B}"] = (outputs, settings.rank)
    refuse_missing(available, settings, path)
    return shapes


def refuse_missing(found: Collection[str], settings: LoraConfig, path: str) -> None:
    """Raises: ConfigError if a target is not one of the names of linear layers found in the model."""
    if missing := [name for name in target_names(settings) if name not in found]:
        raise ConfigError(
            f"model.lora.targets: {path} has no linear layer named {', '.join(missing)} that can be adapted; "
            f"it has {', '.join(sorted(found)) or 'none'} (embeddings, the head, experts and a vision tower cannot be)"
        )


def num_adapter_parameters(path: str, settings: LoraConfig) -> int:
    """Elements of all A and B; 0 if the model is not on this machine, or cannot be read."""
    try:
        return sum(math.prod(shape) for shape in adapter_shapes(path, settings).values())
    except (ConfigError, OSError, ValueError):
        return 0
