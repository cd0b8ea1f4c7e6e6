"""What fits on one GPU, learner and worker together: the table of docs/gpus.md.

    python -m benchmarks.one_card [--write]

The learner's peak is that of `benchmarks.learner_peak`: its own code on fake tensors, with recomputed activations. The
worker's weights and KV cache are sums, and `CONTEXTS_GB` stands for what CUDA and vLLM need besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from bapo.config.tree import LoraConfig
from benchmarks.gpu.models import SHAPES as SIZES
from benchmarks.gpu.models import Shape as Size
from benchmarks.learner_peak import Shape, peak_bytes
from benchmarks.page_tables import print_or_write

PAGE = Path(__file__).parent.parent / "docs" / "gpus.md"
BEGIN = "<!-- python -m benchmarks.one_card --write -->"
LORA = LoraConfig(rank=32, alpha=64.0)
CARDS_GB = (24, 48, 80, 141)
MICROBATCH_TOKENS = 8192
CACHED_TOKENS = 65_536
"""In the KV cache: 16 responses of 4,096 tokens, as few as keep a GPU busy."""
CONTEXTS_GB = 4.0
FILLED = 0.95
"""Of a card, at most: the allocator leaves holes."""
MODELS: Mapping[str, Size] = {
    **{name: SIZES[name] for name in ("0.6B", "1.7B", "4B", "8B")},
    "14B": Size(layers=40, width=5120, mlp=17_408, heads=40, tied=False),
    "32B": Size(layers=64, width=5120, mlp=25_600, heads=64, tied=False),
}


def shape_of(name: str) -> Shape:
    """Qwen3 of this size."""
    size = MODELS[name]
    settings = {
        "num_hidden_layers": size.layers, "hidden_size": size.width, "intermediate_size": size.mlp,
        "num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads, "head_dim": size.head_size,
        "vocab_size": size.vocab, "tie_word_embeddings": size.tied, "max_position_embeddings": 32_768,
    }  # fmt: skip
    return Shape(f"Qwen3-{name}", Qwen3Config, settings)


def worker_gb(name: str) -> float:
    """Weights in bfloat16, and keys and values of `CACHED_TOKENS`."""
    size, shape = MODELS[name], shape_of(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config(size.layers))
    cache = 2 * size.layers * size.kv_heads * size.head_size * CACHED_TOKENS
    return 2 * (sum(parameter.numel() for parameter in model.parameters()) + cache) / 1e9


def learner_gb(name: str, lora: LoraConfig | None) -> float:
    """Peak of one rank."""
    return peak_bytes(shape_of(name), 1, tokens=MICROBATCH_TOKENS, lora=lora) / 1e9


def table() -> str:
    """In Markdown, GB."""
    lines = [
        "| GB | learner, all weights | learner, adapter r = 32 | worker | together, all weights | together, adapter |",
        "|---|---|---|---|---|---|",
    ]
    for name in MODELS:
        worker, learners = worker_gb(name), [learner_gb(name, lora) for lora in (None, LORA)]
        together = [_with_card(learner + worker + CONTEXTS_GB) for learner in learners]
        numbers = " | ".join(f"{number:.1f}" for number in (*learners, worker))
        lines.append(f"| Qwen3-{name} | {numbers} | {' | '.join(together)} |")
    return "\n".join(lines)


def _with_card(gb: float) -> str:
    card = next((card for card in CARDS_GB if gb <= FILLED * card), None)
    return f"{gb:.0f}: {'more than one GPU' if card is None else f'a card of {card}'}"


if __name__ == "__main__":
    print_or_write(table, PAGE, BEGIN, __doc__)
