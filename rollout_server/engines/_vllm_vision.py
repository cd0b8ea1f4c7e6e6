"""Prompts with images for vLLM, and models next to a torchvision of another build.

vLLM gets tokens and preprocessed patches, so its own image processor never runs: engine and learner see the same
pixels, an image is processed once per group, and the prompt length of a resumed response does not change.

vLLM 0.32 caches outputs of the vision tower by a name of the image, even after the tower's weights change: the name
has the version of the weights, and an update that recomputes responses clears that cache too, or log-probs for images
seen before are wrong by several nats.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bapo.core.types import MAX_IMAGES
from bapo.runtime.torchvision_build import complete_torchvision
from bapo.runtime.vision import Patches, VisionModel

if TYPE_CHECKING:
    from vllm.inputs import MultiModalInput

ARGUMENTS: Mapping[str, Any] = {
    "limit_mm_per_prompt": {"image": MAX_IMAGES, "video": 0},
    "mm_processor_cache_gb": 0,  # cache of vLLM's own processor
    "mm_device_do_normalize": False,  # patches are already normalized
}


def register(path: str) -> None:
    """Register the architecture of a model in this process: vLLM inspects models in a separate process, where a
    torchvision without its operators cannot be imported, and with it no model of transformers."""
    if complete_torchvision() is None:
        return
    from transformers import AutoConfig
    from vllm import ModelRegistry

    for name in AutoConfig.from_pretrained(path).architectures or []:
        if known := ModelRegistry.models.get(name):  # an unknown one: vLLM says so
            ModelRegistry.register_model(name, known.load_model_cls())


def prompt_with_images(
    token_ids: list[int], images: Sequence[tuple[str, Patches]], model: VisionModel, salt: str
) -> MultiModalInput:
    """The input of a request.

    Args:
        token_ids: an expanded prompt, plus the tokens sampled so far if a response is resumed.
        images: digest and patches of each image, in order.
        salt: of the caches, which differ for another salt.
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
        mm_hashes={"image": [f"{salt}/{digest}" for digest, _ in images]},
        mm_placeholders={
            "image": [PlaceholderRange(offset=place.start, length=place.stop - place.start) for place in places]
        },
        cache_salt=salt,
    )


def _batch(**tensors: Any) -> Any:
    return importlib.import_module("transformers").BatchFeature(tensors)


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Resetting the encoder cache when requests are in progress")


# vLLM warns about caches in its other processes; there are none here.
logging.getLogger("vllm.v1.engine.core").addFilter(_is_news)
