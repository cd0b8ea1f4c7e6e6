"""Small models of four architectures, and policies with an adapter that is not zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from bapo.config.tree import Config
from learner.model.lora import adapted_layers
from learner.model.policy import Policy
from tests.support.learner import learner_config, tiny_policy
from tests.support.tiny_model import VOCAB_SIZE, write_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "initializer_range": 0.2,
    "head_dim": 32,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS: dict[str, tuple[PreTrainedConfig, str]] = {
    "Llama": (LlamaConfig(**SIZES, tie_word_embeddings=False), "all"),
    "Qwen2, biases, tied": (Qwen2Config(**SIZES, tie_word_embeddings=True), "all"),
    "Qwen3, q and k norms, tied": (Qwen3Config(**SIZES, tie_word_embeddings=True), "all"),
    "Qwen3-MoE": (Qwen3MoeConfig(**SIZES, **EXPERTS), "attention"),
}
TOKENS = [2, 10, 57, 23, 108, 9, 31, 77, 4, 201, 15]


def write_model(folder: Path, settings: PreTrainedConfig) -> Path:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def lora_config(path: Path, dtype: str = "float32", **lora: Any) -> Config:
    settings = {"rank": 4, "alpha": 8.0, **lora}
    return learner_config(path, model={"path": str(path), "dtype": dtype, "lora": settings})


def a_trained_policy(config: Config) -> Policy:
    """A policy whose B is not zero."""
    policy = tiny_policy(config)
    step(policy, 0.1, seed=5)
    return policy


def step(policy: Policy, size: float, *, seed: int) -> None:
    """Move every element of every B by about this much."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapted_layers(policy.model).values():
            mine = layer.lora_B.to_local() if isinstance(layer.lora_B, DTensor) else layer.lora_B
            mine += size * torch.randn(mine.shape, generator=generator)
