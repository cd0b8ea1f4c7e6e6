"""A random Qwen3-MoE with the tokenizer of `tiny_model`: two layers of four experts, of which a token uses two."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.support.tiny_model import EOS, VOCAB_SIZE, write_tokenizer

NUM_LAYERS, NUM_EXPERTS, NUM_USED = 2, 4, 2


def write_tiny_experts(path: Path, *, seed: int = 0) -> Qwen3MoeForCausalLM:
    """Make and save a model; returns it for reference forwards."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=NUM_LAYERS,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=NUM_USED,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=EOS,
        bos_token_id=2,
        initializer_range=0.2,
    )
    model = Qwen3MoeForCausalLM(config).to(torch.float32).eval()
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    write_tokenizer(path)
    return model
