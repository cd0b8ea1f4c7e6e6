"""A random Llama of a few thousand parameters with a tokenizer of 218 words: what a test needs of a real model.

Writes a folder in Hugging Face format, so that vLLM and transformers load it as they load any other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
WORDS = (*SPECIAL, *map(str, range(200)), *"+-*/()=,:;|", "->", "<answer>", "</answer>")
VOCAB_SIZE = len(WORDS)
EOS = 1


def write_tiny_model(path: Path, *, seed: int = 0, tie: bool = True) -> LlamaForCausalLM:
    """Make and save a model; returns it for reference forwards."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=tie,
        pad_token_id=0,
        eos_token_id=EOS,
        bos_token_id=2,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    write_tokenizer(path)
    return model


def write_tokenizer(path: Path, special: tuple[str, ...] = SPECIAL) -> None:
    """Integers 0..199 and symbols are one token each; no special token is added to a prompt.

    Args:
        special: SPECIAL, and what comes behind all words.
    """
    added = {word: i if i < len(SPECIAL) else VOCAB_SIZE + i - len(SPECIAL) for i, word in enumerate(special)}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": word,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for word, i in added.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"->|</?answer>|\d+|[^\d]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(WORDS)}, "unk_token": "<unk>"},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "bos_token": "<bos>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def save_weights(model: LlamaForCausalLM, path: Path) -> None:
    """Write the parameters by their Hugging Face names, a tied head once, as the learner does."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.named_parameters()}
    save_file(tensors, path)


def perturb(model: LlamaForCausalLM, *, seed: int) -> None:
    """Change every weight a little, as an optimizer step would, but by much more."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def reference_logprobs(model: LlamaForCausalLM, token_ids: list[int], *, temperature: float = 1.0) -> torch.Tensor:
    """[len - 1] log-probs of all tokens but the first, by a plain forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1].float() / temperature
    logp = torch.log_softmax(logits, -1)
    return logp.gather(-1, torch.tensor(token_ids[1:]).unsqueeze(-1)).squeeze(-1)
