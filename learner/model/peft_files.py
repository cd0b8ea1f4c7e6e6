"""An adapter as files of others: PEFT's folder, and the base model with the adapter merged into it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from bapo.config.tree import LoraConfig, ModelConfig
from bapo.runtime.adapter_file import merged
from bapo.runtime.lora import LORA_A, LORA_B, NOT_ADAPTED, base_files, is_adapted, target_names
from bapo.runtime.model_files import safetensors_header
from learner.distributed.shard_files import FILE_MODE, StoredShards
from learner.model.file_format import file_tensors
from learner.model.policy import empty_model

PREFIX = "base_model.model."
"""Before PEFT's names."""


def write_peft(weights: StoredShards, model: ModelConfig, folder: Path) -> None:
    """adapter_config.json and adapter_model.safetensors, float32. Raises: OSError."""
    assert model.lora is not None
    (folder / "adapter_config.json").write_text(json.dumps(peft_config(model.path, model.lora), indent=2) + "\n")
    found = {f"{PREFIX}{name}.weight": tensor for piece in weights.whole() for name, tensor in piece.items()}
    path = folder / "adapter_model.safetensors"
    save_file(found, path, metadata={"format": "pt"})
    path.chmod(FILE_MODE)


def peft_config(base: str, lora: LoraConfig) -> dict[str, Any]:
    """The settings of PEFT's LoraConfig that say the same."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": list(target_names(lora)),
        **({"exclude_modules": rf"(.*\.)?({'|'.join(NOT_ADAPTED)})(\..*)?"} if _has_others(base, lora) else {}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def _has_others(base: str, lora: LoraConfig) -> bool:
    """Whether the base model has layers of the same names that are not adapted."""
    names = {name.removesuffix(".weight") for path in base_files(base) for name in safetensors_header(path)}
    return any(name.rpartition(".")[2] in target_names(lora) and not is_adapted(name, lora) for name in names)


def merged_pieces(weights: StoredShards, model: ModelConfig) -> Iterator[dict[str, Tensor]]:
    """The base model's tensors in `model.dtype`, file by file, with the adapter in them."""
    assert model.lora is not None
    dtype: torch.dtype = getattr(torch, model.dtype)
    stored = {name: tensor for piece in weights.whole() for name, tensor in piece.items()}
    adapter = file_tensors(empty_model(model.path), stored)
    for path in base_files(model.path):
        piece = {}
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                tensor, layer = file.get_tensor(name), name.removesuffix(".weight")
                tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
                if f"{layer}.{LORA_A}" in adapter and name != layer:
                    a_RI, b_OR = (adapter[f"{layer}.{part}"] for part in (LORA_A, LORA_B))
                    tensor = merged(tensor, a_RI, b_OR, model.lora.scale)
                piece[name] = tensor
        yield piece
