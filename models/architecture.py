"""The network of the base model: a very small Llama whose number tokens start as points on circles."""

from __future__ import annotations

import math

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bapo.tasks.countdown import MAX_VALUE

NUM_CIRCLES = 32
PERIODS = (2.0, 2.0 * (MAX_VALUE + 1))
"""Shortest and longest period of the circles: even against odd, and half a turn over the whole range."""
NUMBER_SCALE = 0.1
"""Standard deviation of the number features; the other weights start at 0.02."""


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """0.65 M parameters. The Llama type, because it is one of those whose AutoTokenizer keeps our tokenizer as it is.

    The output head is not tied to the embedding: it costs 28 k parameters and spares engines a special case, since an
    in-place update of a tied head on CPU leaves its packed copy stale.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
    )
    _place_numbers_on_circles(model, tokenizer)
    return model


@torch.no_grad()
def _place_numbers_on_circles(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Let number n start as (cos, sin)(2 pi n / period) for 32 periods, in embedding and head alike.

    A sum is then a rotation, which the layers find quickly: after 1,600 iterations 93 % of the steps with three numbers
    were computed right, against 33 % from random embeddings (same recipe, one run each).
    """
    low, high = (math.log10(period) for period in PERIODS)
    numbers = torch.arange(MAX_VALUE + 1.0)
    angles = 2 * math.pi * numbers.unsqueeze(1) / torch.logspace(low, high, NUM_CIRCLES)
    # cos and sin have a standard deviation of sqrt(1/2).
    features = torch.cat([angles.cos(), angles.sin()], dim=1) * NUMBER_SCALE * math.sqrt(2)
    first = tokenizer.convert_tokens_to_ids("0")
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    embedding[first : first + MAX_VALUE + 1, : 2 * NUM_CIRCLES] = features
    head.copy_(embedding)
