"""adapter_config.json of an adapter in PEFT's format: whether it is the function that `[model.lora]` describes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bapo.config.tree import LoraConfig
from bapo.core.errors import ConfigError
from bapo.runtime.model_files import safetensors_header

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SETTINGS: Mapping[str, str] = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora"}
"""Our settings -> PEFT's."""
NEUTRAL = {
    *SETTINGS.values(), "target_modules", "exclude_modules", "lora_dropout", "layers_pattern", "megatron_core",
    "qalora_group_size", "eva_config", "task_type", "inference_mode", "base_model_name_or_path", "revision",
    "auto_mapping", "peft_version",
}  # fmt: skip
"""Keys that do not change what the tensors mean. Any other key must say nothing (`SILENT`): PEFT's next variant is
refused, not read as plain LoRA."""
SILENT: tuple[object, ...] = (None, False, "none", {}, [], "LORA")
KEEPS_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base model as it is; the others subtract from it."""


def check_peft_config(folder: Path, lora: LoraConfig) -> dict[str, Any]:
    """Its content. Raises: ConfigError for an adapter of another kind, rank or scale."""
    try:
        settings: dict[str, Any] = dict(json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"model.adapter: {folder} is not an adapter in PEFT's format: {error}") from error
    if (start := settings.get("init_lora_weights")) not in KEEPS_BASE:
        raise ConfigError(
            f"model.adapter: {folder} has init_lora_weights = {start!r}, which changes the base model, too; save it as "
            "plain LoRA (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    for key in sorted(settings.keys() - NEUTRAL - {"init_lora_weights"}):
        if settings[key] not in SILENT:
            raise ConfigError(f"model.adapter: {folder} has {key} = {settings[key]!r}, which is not supported")
    theirs = {name: settings.get(key, False) for name, key in SETTINGS.items()}
    if theirs != (ours := {"rank": lora.rank, "alpha": lora.alpha, "rslora": lora.rslora}):
        raise ConfigError(
            f"model.adapter: {folder} has {_said(theirs)}, but [model.lora] has {_said(ours)}; write the adapter's"
        )
    return settings


def check_peft_layers(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the adapter's layers with those of `[model.lora]`, by the last parts of their names: how the first parts
    are called differs between PEFT and the files of some models.

    Args:
        shapes: `adapter_shapes`.
    Raises: ConfigError if one is missing, unknown or of another shape.
    """
    path = folder / ADAPTER_WEIGHTS
    try:
        header = safetensors_header(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.adapter: {path} cannot be read: {error}") from error
    header.pop("__metadata__", None)
    if not all(isinstance(each, dict) and "shape" in each for each in header.values()):
        raise ConfigError(f"model.adapter: {path} is damaged: its header has tensors without a shape")
    ours = {name.split(".")[-2] for name in shapes}
    theirs = {name.split(".lora_")[0].split(".")[-1] for name in header}
    if others := [name for name in ("lm_head", "embed_tokens") if name in theirs]:
        raise ConfigError(f"model.adapter: {folder} adapts {', '.join(others)}, which is not supported")
    if theirs != ours:
        raise ConfigError(
            f"model.adapter: {folder} adapts {', '.join(sorted(theirs))}, but model.lora.targets means "
            f"{', '.join(sorted(ours))}; set model.lora.targets = {json.dumps(sorted(theirs))}"
        )
    if (found := Counter(tuple(each["shape"]) for each in header.values())) != Counter(shapes.values()):
        raise ConfigError(
            f"model.adapter: {folder} belongs to another model: its matrices have the shapes {_shapes(found)}, those "
            f"of model.path {_shapes(Counter(shapes.values()))}"
        )


def _shapes(found: Counter[tuple[int, ...]]) -> str:
    return ", ".join(f"{number} of {list(shape)}" for shape, number in sorted(found.items()))


def _said(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())
