"""What vLLM needs for prompts with images.

vLLM gets tokens and patches that are ready, so its own processor of images never runs: engine and learner see the same
pixels, a picture is processed once per group, and a response that is resumed keeps the length of its prompt.

vLLM 0.32 keeps what the vision tower made of an image, by its digest, also when the tower has new weights: an update
must empty that cache too, or log-probs of pictures that were seen before are wrong by several nats.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bapo.core.types import MOST_IMAGES
from bapo.runtime.torchvision_build import complete_torchvision
from bapo.runtime.vision import Patches, VisionModel

if TYPE_CHECKING:
    from vllm.inputs import MultiModalInput

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"
MODULE = "vllm.model_executor.models.qwen2_5_vl"
ARGUMENTS: Mapping[str, Any] = {
    "limit_mm_per_prompt": {"image": MOST_IMAGES, "video": 0},
    "mm_processor_cache_gb": 0,  # of what vLLM's own processor makes
    "mm_device_do_normalize": False,  # patches come normalized; vLLM would do it again by the preprocessor's numbers
}


def register() -> None:
    """Let vLLM load the architecture here: it looks at models in a process of its own, where a torchvision without
    its operators cannot be imported."""
    if complete_torchvision() is None:
        return
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, getattr(importlib.import_module(MODULE), ARCHITECTURE))


def prompt_with_images(
    token_ids: list[int], images: Sequence[tuple[str, Patches]], model: VisionModel
) -> MultiModalInput:
    """A request's input.

    Args:
        token_ids: of an expanded prompt, and the sampled tokens of a response that is resumed.
        images: digest and patches of each image, in order.
    """
    import torch
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    patches = [found for _, found in images]
    pixels = torch.from_numpy(np.concatenate([found.pixels for found in patches]))
    grid = torch.tensor([[1, found.height, found.width] for found in patches])
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grid.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    places = model.places(np.array(token_ids), patches)
    return mm_input(
        token_ids,
        mm_kwargs=MultiModalKwargsItems.from_hf_inputs(_batch(pixel_values=pixels, image_grid_thw=grid), fields),
        mm_hashes={"image": [digest for digest, _ in images]},
        mm_placeholders={
            "image": [PlaceholderRange(offset=place.start, length=place.stop - place.start) for place in places]
        },
    )


def _batch(**tensors: Any) -> Any:
    return importlib.import_module("transformers").BatchFeature(tensors)


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Resetting the encoder cache when requests are in progress")


# vLLM warns of caches between its processes; there are none here.
logging.getLogger("vllm.v1.engine.core").addFilter(_is_news)
