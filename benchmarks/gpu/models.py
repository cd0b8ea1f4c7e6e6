"""Random-init Qwen3 models by their published configuration, and the learner's settings for them."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from bapo.config.tree import Config
from benchmarks.gpu.runner import REPOSITORY
from learner.distributed.world import World

TOKENIZER = REPOSITORY / "models/countdown-tiny"
LOGITS_STD = 3.0
"""Standard deviation of the logits; the usual initialization has 0.6, too flat for log-probs that tell anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Fields of a config.json of Qwen3."""

    layers: int
    width: int
    mlp: int
    heads: int
    kv_heads: int = 8
    head_size: int = 128
    vocab: int = 151936
    tied: bool = True
    longest: int = 8192
    """Tokens of the longest response that is trained."""


SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(layers=2, width=64, mlp=128, heads=4, kv_heads=2, head_size=32, vocab=218, longest=96),
    "0.6B": Shape(layers=28, width=1024, mlp=3072, heads=16),
    "1.7B": Shape(layers=28, width=2048, mlp=6144, heads=16),
    "4B": Shape(layers=36, width=2560, mlp=9728, heads=32),
    "8B": Shape(layers=36, width=4096, mlp=12288, heads=32, tied=False),
}


def world_of(device: str) -> World:
    """A single rank on this device. `device`: auto, cpu or cuda."""
    is_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if not is_cuda:
        torch.set_num_threads(1)
    disable_progress_bar()
    return World(rank=0, size=1, device=torch.device("cuda", 0) if is_cuda else torch.device("cpu"))


def dtype_of(world: World) -> str:
    """Of engines: bfloat16 on GPUs. On a CPU float32, in which engine and learner agree closely."""
    return "bfloat16" if world.device.type == "cuda" else "float32"


def write_model(folder: Path, shape: Shape, world: World, *, seed: int = 0, layers: int | None = None) -> int:
    """Write random bfloat16 weights with the tokenizer of the shipped model. Returns: number of parameters."""
    torch.manual_seed(seed)
    model = build(shape, world, layers)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, max_shard_size="200GB")
    for file in TOKENIZER.glob("*token*"):
        shutil.copyfile(file, folder / file.name)
    return sum(parameter.numel() for parameter in model.parameters())


def build(shape: Shape, world: World, layers: int | None = None) -> PreTrainedModel:
    """The model on the device, where random numbers are fast."""
    settings = Qwen3Config(
        vocab_size=shape.vocab, hidden_size=shape.width, intermediate_size=shape.mlp,
        num_hidden_layers=layers or shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size, max_position_embeddings=40960, rms_norm_eps=1e-6, tie_word_embeddings=shape.tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        initializer_range=LOGITS_STD / math.sqrt(shape.width),
    )  # fmt: skip
    with torch.device(world.device):
        return Qwen3ForCausalLM._from_config(settings, dtype=torch.bfloat16)


def learner_config(
    folder: Path,
    world: World,
    shape: Shape,
    *,
    dtype: str,
    num_groups: int,
    lora: dict[str, Any] | None = None,
    **learner: Any,
) -> Config:
    """The paper's method on a batch of `num_groups` groups of 8, two mini-batches; keywords: section `learner`."""
    return Config.model_validate({
        "model": {"path": str(folder), "dtype": dtype, "lora": lora},
        "algorithm": {"batch_size": num_groups, "group_size": 8},
        "rollout": {"max_response_tokens": shape.longest, "max_prompt_tokens": 512},
        "learner": {
            "device": world.device.type, "lr": 1e-6, "minibatch_size": max(1, num_groups // 2),
            "microbatch_tokens": max(4096, 2 * shape.longest), **learner,
        },
    })  # fmt: skip
