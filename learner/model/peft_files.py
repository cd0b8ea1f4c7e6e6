"""An adapter as files of others: PEFT's folder, and the base model with the adapter merged into it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bapo.config.tree import LoraConfig, ModelConfig
from bapo.core.errors import ConfigError
from bapo.runtime.adapter_file import merged_base
from bapo.runtime.lora import NOT_ADAPTED, base_files, is_adapted, target_names
from bapo.runtime.model_files import safetensors_header
from bapo.runtime.peft_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_peft_config, check_peft_layers
from learner.distributed.shard_files import FILE_MODE, StoredShards
from learner.model.file_format import file_tensors
from learner.model.lora import is_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFIX = "base_model.model."
"""Before PEFT's names."""


def write_peft(weights: StoredShards, model: ModelConfig, folder: Path) -> None:
    """adapter_config.json and adapter_model.safetensors, float32. Raises: OSError."""
    assert model.lora is not None
    (folder / ADAPTER_CONFIG).write_text(json.dumps(peft_config(model.path, model.lora), indent=2) + "\n")
    found = {f"{PREFIX}{name}.weight": tensor for piece in weights.whole() for name, tensor in piece.items()}
    path = folder / ADAPTER_WEIGHTS
    save_file(found, path, metadata={"format": "pt"})
    path.chmod(FILE_MODE)


def peft_config(base: str, lora: LoraConfig) -> dict[str, Any]:
    """The settings of PEFT's LoraConfig that say the same."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        # PEFT reads the base model from there, wherever it is called.
        "base_model_name_or_path": str(Path(base).resolve()) if Path(base).is_dir() else base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": list(target_names(lora)),
        **({"exclude_modules": rf"(.*\.)?({'|'.join(NOT_ADAPTED)})(\..*)?"} if _has_others(base, lora) else {}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


@torch.no_grad()
def load_peft(model: nn.Module, lora: LoraConfig, folder: Path) -> None:
    """Fill the adapter of a model, in place, from PEFT's files.

    Raises: ConfigError for an adapter of another kind, rank, scale or set of layers.
    """
    check_peft_config(folder, lora)
    mine = {f"{PREFIX}{name}.weight": p for name, p in model.named_parameters() if is_adapter(name)}
    check_peft_layers(folder, {name.removesuffix(".weight"): tuple(p.shape) for name, p in mine.items()})
    try:
        stored = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.adapter: {folder} is not an adapter in PEFT's format: {error}") from error
    for name in sorted(mine.keys() ^ stored.keys()):
        where = "only in the adapter" if name in stored else "not in the adapter"
        raise ConfigError(f"model.adapter: {folder}: {name} is {where}; it belongs to another model")
    for name, parameter in mine.items():
        if stored[name].shape != parameter.shape:
            shape = list(stored[name].shape)
            raise ConfigError(f"model.adapter: {folder}: {name} has the shape {shape}, of another model")
        parameter.copy_(stored[name])


def _has_others(base: str, lora: LoraConfig) -> bool:
    """Whether the base model has layers of the same names that are not adapted."""
    names = {name.removesuffix(".weight") for path in base_files(base) for name in safetensors_header(path)}
    return any(name.rpartition(".")[2] in target_names(lora) and not is_adapted(name, lora) for name in names)


def merged_pieces(weights: StoredShards, model: ModelConfig, empty: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """The base model's tensors in `model.dtype`, file by file, with the adapter in them. `empty`: without weights."""
    assert model.lora is not None
    dtype: torch.dtype = getattr(torch, model.dtype)
    stored = {name: tensor for piece in weights.whole() for name, tensor in piece.items()}
    adapter = file_tensors(empty, stored)
    for path in base_files(model.path):
        yield dict(merged_base(path, adapter, model.lora.scale, dtype))
