"""adapter_config.json of an adapter in PEFT's format: whether it is the function that `[model.lora]` describes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bapo.config.tree import LoraConfig
from bapo.core.errors import ConfigError

ADAPTER_CONFIG = "adapter_config.json"
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
        settings: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
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


def _said(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())
