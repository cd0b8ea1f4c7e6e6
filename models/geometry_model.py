"""The network and the tokenizer of the geometry model: a very small Qwen2.5-VL whose pictures have 64 x 64 pixels.

Suffixes: R rows, P patches of a picture, D their values, T tokens, H width. Does not cover: pictures of other sizes,
several in a prompt (transformers' own classes load the model and do both).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from bapo.tasks.base import IMAGE
from bapo.tasks.countdown import ANSWER_END, ANSWER_START
from contrib.geometry.task import MAX_VALUE, SIZE

PATCH, MERGE, TEMPORAL, CHANNELS = 8, 2, 2, 3
GRID = SIZE // PATCH
NUM_PATCHES = GRID * GRID
NUM_IMAGE_TOKENS = NUM_PATCHES // MERGE**2
PATCH_VALUES = CHANNELS * TEMPORAL * PATCH * PATCH
WHITE, SPREAD = 1.0, 0.5
"""Mean and deviation of the preprocessor: paper is 0, ink is -2."""

PAD, EOS, BOS, UNKNOWN = "<pad>", "<eos>", "<bos>", "<unk>"
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
SPECIAL = (PAD, EOS, BOS, UNKNOWN, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)
WORDS = ("What", " is", " the", " angle", " x", " diameter", " perimeter", " area")
SYMBOLS = ("?", "+", "-", "*", "=", ",", ";", "x", ANSWER_START, ANSWER_END)
VOCABULARY = (*SPECIAL, *map(str, range(MAX_VALUE + 1)), *SYMBOLS, *WORDS)
"""The index is the id."""
WORD_PATTERN = r"</?answer>|[0-9]+| ?[A-Za-z]+|[^0-9]"
"""One match is one token."""
ROUND_TRIPS = {
    "What is the angle x?": ["What", " is", " the", " angle", " x", "?"],
    "24*7=140+28=168;<answer>168</answer>": [
        *("24", "*", "7", "=", "140", "+", "28", "=", "168", ";", ANSWER_START, "168", ANSWER_END)
    ],
}

PERIODS = (2.0, 2.5, 10 / 3, 5.0, 10.0, 20.0, 25.0, 100 / 3, 50.0, 100.0, 133.0, 200.0, 400.0, 800.0)
"""Circles on which the numbers start: the first five tell the last digit, all of them the size; a sum is a rotation."""
NUMBER_SCALE = 0.1
"""Standard deviation of the number features; the other weights start at 0.02."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Every integer 0..399 and every word of the questions is one token."""
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = Split(Regex(WORD_PATTERN), behavior="isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token=UNKNOWN,
        additional_special_tokens=[VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD],
    )


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a prompt, with one image token for each place of the picture."""
    expanded = text.replace(IMAGE, VISION_START + IMAGE_PAD * NUM_IMAGE_TOKENS + VISION_END)
    ids: list[int] = tokenizer(expanded)["input_ids"]
    return ids


def build_model(tokenizer: PreTrainedTokenizerFast, *, seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    """About a million parameters. The head is not tied, as in the Countdown model, and for the same reason."""
    ids = {token: i for i, token in enumerate(VOCABULARY)}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "tie_word_embeddings": False,
        "pad_token_id": ids[PAD],
        "bos_token_id": ids[BOS],
        "eos_token_id": ids[EOS],
    }
    vision = {
        "depth": 3,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_heads": 4,
        "in_channels": CHANNELS,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": TEMPORAL,
        "window_size": SIZE,
        "fullatt_block_indexes": [0, 1, 2],
        "out_hidden_size": 128,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids[IMAGE_PAD],
        video_token_id=ids[VIDEO_PAD],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        tie_word_embeddings=False,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        pad_token_id=ids[PAD],
        bos_token_id=ids[BOS],
        eos_token_id=ids[EOS],
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
    )
    _place_numbers_on_circles(model, ids["0"])
    return model


def save(model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the folder and check the saved tokenizer. Raises: ValueError if it differs."""
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # readable for other users, such as a container's
    tokenizer.save_pretrained(out)
    (out / "preprocessor_config.json").write_text(f"{json.dumps(PREPROCESSOR, indent=2)}\n", encoding="utf-8")
    check_round_trips(out)


def check_round_trips(folder: Path) -> None:
    """Load the saved tokenizer with AutoTokenizer and compare. Raises: ValueError naming the first difference."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if len(tokenizer) != len(VOCABULARY):
        raise ValueError(f"{folder}: AutoTokenizer has {len(tokenizer)} tokens instead of {len(VOCABULARY)}")
    for text, tokens in ROUND_TRIPS.items():
        ids = tokenizer(text)["input_ids"]
        if tokenizer.convert_ids_to_tokens(ids) != tokens or tokenizer.decode(ids) != text:
            read = f"{tokenizer.convert_ids_to_tokens(ids)} and writes {tokenizer.decode(ids)!r}"
            raise ValueError(f"{folder}: AutoTokenizer ({type(tokenizer).__name__}) reads {text!r} as {read}")


PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
    "resample": 3,
    "image_mean": [WHITE] * CHANNELS,
    "image_std": [SPREAD] * CHANNELS,
    "patch_size": PATCH,
    "temporal_patch_size": TEMPORAL,
    "merge_size": MERGE,
    "size": {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": 256 * 256},
}


def patches_of(ink_RYX: Tensor) -> Tensor:
    """[R, P, D] of black and white pictures, true is black: what the preprocessor makes of their files."""
    values = torch.where(ink_RYX, -WHITE / SPREAD, (1 - WHITE) / SPREAD)
    side = GRID // MERGE
    blocks = values.view(-1, side, MERGE, PATCH, side, MERGE, PATCH).permute(0, 1, 4, 2, 5, 3, 6)
    flat = blocks.reshape(-1, NUM_PATCHES, 1, PATCH * PATCH)
    return flat.expand(-1, -1, CHANNELS * TEMPORAL, -1).reshape(-1, NUM_PATCHES, PATCH_VALUES)


def patch_centers() -> list[tuple[int, int]]:
    """Column and row of each patch, in the order of `patches_of`."""
    side = GRID // MERGE
    return [
        (left * MERGE + x, top * MERGE + y)
        for top in range(side)
        for left in range(side)
        for y in range(MERGE)
        for x in range(MERGE)
    ]


def see(model: Qwen2_5_VLForConditionalGeneration, patches_RPD: Tensor) -> Tensor:
    """[R, P, H] of the vision tower before its merger: what transformers computes picture by picture, in one batch."""
    visual = model.model.visual
    num_rows = len(patches_RPD)
    hidden: Tensor = visual.patch_embed(patches_RPD.reshape(-1, PATCH_VALUES)).view(num_rows, NUM_PATCHES, -1)
    positions = torch.tensor([(y, x) for x, y in patch_centers()])
    cos, sin = (part[:, None] for part in visual.rotary_pos_emb(hidden, positions))
    for block in visual.blocks:
        attention = block.attn
        query, key, value = (
            attention.qkv(block.norm1(hidden)).view(num_rows, NUM_PATCHES, 3, attention.num_heads, -1).unbind(2)
        )
        query, key = (part * cos + _rotated(part) * sin for part in (query, key))
        seen = scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        hidden = hidden + attention.proj(seen.transpose(1, 2).reshape(num_rows, NUM_PATCHES, -1))
        hidden = hidden + block.mlp(block.norm2(hidden))
    return hidden


def embed(model: Qwen2_5_VLForConditionalGeneration, ids_RT: Tensor, patches_RPD: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings [R, T, H] of prompts and their pictures, and positions [3, R, T]; the picture comes first in each."""
    embeddings = model.model.language_model.embed_tokens(ids_RT)
    picture = model.model.visual.merger(see(model, patches_RPD)).view(len(ids_RT), NUM_IMAGE_TOKENS, -1)
    behind = 1 + NUM_IMAGE_TOKENS
    embeddings = torch.cat([embeddings[:, :1], picture, embeddings[:, behind:]], dim=1)
    return embeddings, positions_of(ids_RT.shape[1])[:, None].expand(3, len(ids_RT), -1)


def positions_of(num_tokens: int) -> Tensor:
    """[3, T]: the text goes on after the longest side of the picture, not after its last token."""
    side = GRID // MERGE
    place = torch.arange(NUM_IMAGE_TOKENS)
    picture = 1 + torch.stack([torch.zeros_like(place), place // side, place % side])
    text = torch.arange(num_tokens - 1 - NUM_IMAGE_TOKENS) + 1 + side
    return torch.cat([torch.zeros(3, 1, dtype=torch.long), picture, text.expand(3, -1)], dim=1)


def _rotated(values: Tensor) -> Tensor:
    first, second = values.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


@torch.no_grad()
def _place_numbers_on_circles(model: Qwen2_5_VLForConditionalGeneration, first: int) -> None:
    """Let number n start as (cos, sin)(2 pi n / period), in embedding and head alike."""
    angles = 2 * math.pi * torch.arange(MAX_VALUE + 1.0).unsqueeze(1) / torch.tensor(PERIODS)
    features = torch.cat([angles.cos(), angles.sin()], dim=1) * NUMBER_SCALE * math.sqrt(2)
    embedding, head = model.model.language_model.embed_tokens.weight, model.lm_head.weight
    embedding[first : first + MAX_VALUE + 1, : 2 * len(PERIODS)] = features
    head.copy_(embedding)
