"""A random Qwen2.5-VL of some hundred thousand parameters: 8-pixel patches, 2 x 2 of them are a token of 16 pixels."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from bapo.tasks.images import digest_of
from tests.support.tiny_model import EOS, SPECIAL, VOCAB_SIZE, write_tokenizer

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
START, END, IMAGE, VIDEO = range(VOCAB_SIZE, VOCAB_SIZE + 4)
PADDED_VOCAB = 256
"""Ids from VOCAB_SIZE + 4 on are in the model and not in the tokenizer."""
TOKEN_PIXELS = 16


def write_tiny_vision(path: Path, *, seed: int = 0, tie: bool = True) -> Qwen2_5_VLForConditionalGeneration:
    """Make and save a model with all files that vLLM wants; returns it for reference forwards."""
    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": PADDED_VOCAB,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            "tie_word_embeddings": tie,
            "pad_token_id": 0,
            "bos_token_id": 2,
            "eos_token_id": EOS,
            "initializer_range": 0.2,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 8,
            "window_size": 32,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.2,
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=tie,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
    )
    model = Qwen2_5_VLForConditionalGeneration(config).to(torch.float32).eval()
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    write_tokenizer(path, (*SPECIAL, *VISION_TOKENS))
    processor: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": 8,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 16 * 16,
        "max_pixels": 64 * 64,
        # As the files of real models have them: by these, vLLM normalizes again what it gets.
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    video = processor | {"video_processor_type": "Qwen2VLVideoProcessor"}
    (path / "video_preprocessor_config.json").write_text(json.dumps(video))
    return model


def picture(seed: int, width: int = 48, height: int = 32) -> bytes:
    """A PNG of colored noise in blocks of 8 pixels."""
    colors = np.random.default_rng(seed).integers(0, 256, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
    pixels = colors.repeat(8, 0).repeat(8, 1)[:height, :width]
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


class Pictures:
    """Files by digest, as a run directory has them."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def add(self, data: bytes) -> str:
        digest = digest_of(data)
        self.files[digest] = data
        return digest

    def read(self, digest: str) -> bytes:
        return self.files[digest]


def reference_logprobs(
    model: Qwen2_5_VLForConditionalGeneration, token_ids: list[int], patches: list[Any], *, temperature: float = 1.0
) -> torch.Tensor:
    """[len - 1] log-probs of all tokens but the first by transformers' own forward pass, without the tokens that stand
    for images and those that the tokenizer does not know."""
    ids = torch.tensor([token_ids])
    pictures: dict[str, Any] = {}
    if patches:
        pictures = {
            "pixel_values": torch.from_numpy(np.concatenate([found.pixels for found in patches])),
            "image_grid_thw": torch.tensor([[1, found.height, found.width] for found in patches]),
            "mm_token_type_ids": (ids == IMAGE).int(),
        }
    logits = model(input_ids=ids, use_cache=False, **pictures).logits[0, :-1].float() / temperature
    logits = logits.index_fill(-1, torch.tensor([START, END, *range(IMAGE, PADDED_VOCAB)]), -torch.inf)
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
