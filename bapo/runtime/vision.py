"""Image preprocessing of a vision-language model: patches of pixels, and the number of their tokens.

    PNG or JPEG -> upright, RGB -> resized to multiples of a token's pixels -> normalized -> patches [n, D], their grid
    <image> in a prompt -> <|vision_start|> <|image_pad|> x n / merge^2 <|vision_end|>

Engine and learner share it, so that they compute on the same values; a test compares it with transformers' image
processor. All settings are read from the model's files. Supported: Qwen2.5-VL. Not supported: video.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapo.core.errors import ConfigError, ContractError
from bapo.core.types import IMAGE, Prompt
from bapo.runtime.model_files import CONFIG, folder_of

FAMILIES = ("qwen2_5_vl",)
"""Supported values of `model_type`."""
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
"""Replaces `<image>` for their tokenizers."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Values of CLIP, if the files have none."""
LONGEST_ASPECT = 200
"""Larger aspect ratios are rejected, like in transformers."""
CACHE_BYTES = 256 << 20
"""Size of a process's cache of patches: 100 images of 512 x 512 pixels."""

ReadImage = Callable[[str], bytes]
"""Digest -> file."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Patches:
    """One image as input of the vision tower."""

    pixels: NDArray[np.float32]
    """[height x width, D] patches, in the order in which the tower merges them."""
    height: int
    width: int
    """In patches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionModel:
    """Image settings from the files of a vision-language model."""

    image_token: int
    """Occurs in a prompt once per merge x merge patches."""
    excluded: tuple[int, ...]
    """Tokens that are never sampled and have no probability: those of images and video, which have no meaning without
    an image, and ids that the tokenizer does not know."""
    patch: int
    """Pixels."""
    frames: int
    """Number of repetitions of an image, as frames of a video."""
    merge: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Height and width in patches of an image of this size in pixels. Raises: ContractError for LONGEST_ASPECT."""
        if max(width, height) > LONGEST_ASPECT * min(width, height):
            raise ContractError(
                f"an image of {width} x {height} pixels exceeds the model's maximum aspect ratio of {LONGEST_ASPECT}"
            )
        token = self.patch * self.merge
        rows, columns = round(height / token), round(width / token)
        if rows * columns * token**2 > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / token))
            columns = max(1, math.floor(width / shrink / token))
        elif rows * columns * token**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / token), math.ceil(width * grow / token)
        return rows * self.merge, columns * self.merge

    def num_tokens(self, height: int, width: int) -> int:
        """Number of prompt tokens of an image with this grid."""
        return height * width // self.merge**2

    def patches(self, data: bytes) -> Patches:
        """Patches of a file that was checked when its task was read. Raises: ContractError if it is too elongated."""
        image = decoded(data)
        rows, columns = self.grid(*image.size)
        size = (columns * self.patch, rows * self.patch)
        if image.size != size:
            image = image.resize(size, resample=_pillow().Resampling.BICUBIC)
        mean: NDArray[np.float32] = np.array(self.mean, np.float32)
        std: NDArray[np.float32] = np.array(self.std, np.float32)
        colors_HWC: NDArray[np.float32] = (np.asarray(image, np.float32) * np.float32(1 / 255) - mean) / std
        merge, patch = self.merge, self.patch
        cut = colors_HWC.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        cut = cut.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
        repeated = np.broadcast_to(cut, (*cut.shape[:5], self.frames, *cut.shape[6:]))
        return Patches(pixels=repeated.reshape(rows * columns, -1), height=rows, width=columns)

    def expanded(self, token_ids: Sequence[int], images: Sequence[Patches]) -> list[int]:
        """A prompt's tokens with each image's token repeated.

        Raises: ContractError if image tokens and images differ in number, also if the text itself contains the token.
        """
        found = token_ids.count(self.image_token)
        if found != len(images):
            raise ContractError(f"the prompt has {found} image tokens for {len(images)} images")
        counts = iter(self.num_tokens(image.height, image.width) for image in images)
        return [token for token in token_ids for _ in range(next(counts) if token == self.image_token else 1)]

    def places(self, token_ids: NDArray[np.integer], images: Sequence[Patches]) -> list[slice]:
        """Positions of each image's tokens in an expanded prompt. Raises: ContractError if their number is wrong."""
        counts = [self.num_tokens(image.height, image.width) for image in images]
        found = np.flatnonzero(token_ids == self.image_token)
        if len(found) != sum(counts):
            raise ContractError(f"the prompt has {len(found)} image tokens, its images need {sum(counts)}")
        starts = found[np.cumsum([0, *counts])[:-1]] if counts else []
        return [slice(int(start), int(start) + count) for start, count in zip(starts, counts, strict=True)]

    def positions(self, token_ids: NDArray[np.integer], images: Sequence[Patches]) -> NDArray[np.int64]:
        """[3, P] time, row and column of each token of an expanded prompt. The text after an image of h x w tokens
        starts max(h, w) later. Raises: ContractError like `places`."""
        steps = np.ones(len(token_ids), np.int64)
        places = self.places(token_ids, images)
        sizes = [(image.height // self.merge, image.width // self.merge) for image in images]
        for place, (rows, columns) in zip(places, sizes, strict=True):
            steps[place] = 0
            steps[place.stop - 1] = max(rows, columns)
        positions_3P = np.tile(np.cumsum(steps) - steps, (3, 1))
        for place, (rows, columns) in zip(places, sizes, strict=True):
            start = positions_3P[0, place.start]
            positions_3P[0, place] = start
            positions_3P[1, place] = start + np.repeat(np.arange(rows), columns)
            positions_3P[2, place] = start + np.tile(np.arange(columns), rows)
        return positions_3P


class ImageReader:
    """Patches by digest; the most recently used are cached. Not thread-safe."""

    def __init__(self, model: VisionModel, read: ReadImage, *, cache_bytes: int = CACHE_BYTES) -> None:
        self.model = model
        self._read = read
        self._room = cache_bytes
        self._kept: OrderedDict[str, Patches] = OrderedDict()

    def patches(self, digest: str) -> Patches:
        """Patches of one image. Raises: what `read` raises; ContractError."""
        found = self._kept.pop(digest, None)
        if found is None:
            found = self.model.patches(self._read(digest))
            self._room -= found.pixels.nbytes
            while self._room < 0 and self._kept:
                self._room += self._kept.popitem(last=False)[1].pixels.nbytes
        self._kept[digest] = found
        return found

    def of_prompt(self, prompt: Prompt) -> list[Patches]:
        """Patches of all images of a prompt, in order."""
        return [self.patches(digest) for digest in prompt.images]


def vision_model(path: str, max_pixels: int | None = None) -> VisionModel | None:
    """Image settings of the model in a folder, or of a Hub id in the cache; None: it reads text only.

    Args:
        max_pixels: downscale larger images; the model's own limit applies if it is lower.
    Raises: ConfigError for a vision-language model that is not supported.
    """
    folder = folder_of(path)
    config = {} if folder is None else _json(folder / CONFIG)
    vision = config.get("vision_config")
    if folder is None or not vision:
        return None
    if config.get("model_type") not in FAMILIES:
        raise ConfigError(
            f"model.path={path}: it is a vision-language model of type {config.get('model_type')}; supported: "
            f"{', '.join(FAMILIES)}"
        )
    processor = next(filter(None, (_json(folder / name) for name in PROCESSOR_FILES)), {})
    processor = processor.get("image_processor", processor)
    size = processor.get("size") or {}
    own_limit = processor.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    return VisionModel(
        image_token=config["image_token_id"],
        excluded=_excluded(folder, config),
        patch=processor.get("patch_size", 14),
        frames=processor.get("temporal_patch_size", 2),
        merge=processor.get("merge_size", 2),
        min_pixels=processor.get("min_pixels") or size.get("shortest_edge") or 56 * 56,
        max_pixels=min(own_limit, max_pixels or own_limit),
        mean=tuple(processor.get("image_mean", MEAN)),
        std=tuple(processor.get("image_std", STD)),
    )


def written(prompt: Prompt) -> str:
    """The text as encoded by the tokenizer of a vision-language model."""
    return prompt.text.replace(IMAGE, PLACEHOLDER) if prompt.images else prompt.text


def missing_package() -> str:
    """A package that vLLM needs to read images and that is not installed, and how to install it; empty: none."""
    for package, module, how in (
        ("pillow", "PIL", "pip install pillow"),
        ("torchvision", "torchvision", "pip install --no-deps -r requirements/vision.txt"),
    ):
        if importlib.util.find_spec(module) is None:
            return f"vLLM needs the package {package} for it: {how}"
    return ""


def decoded(data: bytes) -> Any:
    """A file as a PIL image in RGB, upright; transparent pixels become white."""
    pillow = _pillow()
    image = pillow.open(io.BytesIO(data), formats=("PNG", "JPEG"))
    set_upright(image)
    if image.mode.startswith("I"):  # 16 bits of gray, of which convert("RGB") would make white from 255 on
        return image.convert("I").point(lambda value: value / 257).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return pillow.alpha_composite(pillow.new("RGBA", image.size, "white"), image).convert("RGB")


def set_upright(image: Any) -> None:
    """Turn a PIL image as its EXIF orientation says, like viewers and transformers' `load_image`."""
    image.load()  # what is broken in the pixels is raised here
    # Any error of the EXIF data is no error of the image: unreadable, they say nothing; and Pillow writes them back
    # after it has turned the pixels, where nobody reads them.
    with suppress(Exception):
        importlib.import_module("PIL.ImageOps").exif_transpose(image, in_place=True)


def _excluded(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id")
    of_vision = {config[name] for name in names if config.get(name) is not None}
    text = config.get("text_config") or config
    num_ids = text.get("vocab_size") or config.get("vocab_size") or 0
    tokenizer = _json(folder / "tokenizer.json")
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    known = set(vocabulary.values()) if isinstance(vocabulary, dict) else set(range(len(vocabulary)))
    known |= {token["id"] for token in tokenizer.get("added_tokens", ())}
    return tuple(sorted(of_vision | (set(range(num_ids)) - known if known else set())))


def _json(path: Path) -> dict[str, Any]:
    """Empty if there is no such file."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def _pillow() -> Any:
    # Imported by name: runs without images need no Pillow.
    return importlib.import_module("PIL.Image")
