"""Images of prompts: tasks provide checked files, named by their sha256.

    bytes | path | {"bytes": ..., "path": ...} | PIL image --read_image--> bytes --digest_of--> Prompt.images

A task reads each image with `read_image`, passes its digest to `make_prompt(images=...)`, and returns its bytes from
`image(digest)` (`bapo.tasks.base.Task.image`); `Images` is that mapping. Each image is decoded once here, so that a
broken image is an error of its row before training starts.

Not supported: video, animation (the first frame is used), URLs.
"""

from __future__ import annotations

import hashlib
import importlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bapo.core.errors import ConfigError
from bapo.core.types import Prompt
from bapo.runtime.run_directory.images import ImageFiles
from bapo.runtime.vision import set_upright
from bapo.tasks.base import IMAGE, Task

MAX_IMAGE_BYTES = 20 << 20
MAX_IMAGE_PIXELS = 16 << 20
"""Three bytes each when decoded. Models use far fewer: those of Qwen at most 12.8 megapixels."""
FORMATS = ("PNG", "JPEG")
NOT_IN_PNG = ("CMYK", "YCbCr", "HSV", "LAB")
WITHOUT_RANGE = ("F", "I")
"""Modes of Pillow in which no value is known to be white."""


def digest_of(data: bytes) -> str:
    """The sha256 of an image file in hex, as in `Prompt.images`."""
    return hashlib.sha256(data).hexdigest()


class Images:
    """Images of a task by digest: `Task.image` for tasks that keep them in memory."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def add(self, value: Any, where: str, folder: Path | None = None) -> str:
        """Read an image (`read_image`) and store it; returns its digest. Raises: ConfigError."""
        data = read_image(value, where, folder)
        digest = digest_of(data)
        self._files.setdefault(digest, data)
        return digest

    def image(self, digest: str) -> bytes:
        """The file. Raises: KeyError."""
        return self._files[digest]


def keep_images(task: Task, prompts: Sequence[Prompt], files: ImageFiles) -> None:
    """Write the images of these prompts to the run directory, before a group with one is requested.

    Raises: ConfigError if the task does not provide them; StorageError.
    """
    if shown := [prompt for prompt in prompts if prompt.images]:
        files.keep(shown, task.image)


def in_words(message: Any) -> Any:
    """A message whose content is a list of texts and images, as text with `<image>`; any other message unchanged."""
    parts = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        return message
    return {
        **message,
        "content": "".join(IMAGE if part.get("type") == "image" else str(part.get("text", "")) for part in parts),
    }


def read_image(value: Any, where: str, folder: Path | None = None) -> bytes:
    """The file of one image, checked to be complete and within the size limits.

    Args:
        value: bytes of a PNG or JPEG; a path; a map with `bytes` or `path`, like image columns of parquet files; or a
            PIL image, which becomes a PNG.
        where: file and row, for messages.
        folder: base of relative paths; None: the working directory.
    Raises: ConfigError.
    """
    data = _bytes_of(value, where, folder)
    check_image(data, where)
    return data


def check_image(data: bytes, where: str) -> None:
    """Require a complete PNG or JPEG. Raises: ConfigError, before decoding if it is too large."""
    if len(data) > MAX_IMAGE_BYTES:
        raise ConfigError(f"{where}: the image has {len(data)} bytes, more than the limit of {MAX_IMAGE_BYTES}")
    pillow = _pillow(where)
    try:
        image = pillow.open(io.BytesIO(data), formats=FORMATS)  # reads only the header
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise ConfigError(f"{where}: the image has more pixels than the limit of {MAX_IMAGE_PIXELS}") from error
    except (OSError, ValueError, SyntaxError) as error:
        raise ConfigError(f"{where}: the image is not a readable PNG or JPEG") from error
    width, height = image.size
    if width * height > MAX_IMAGE_PIXELS:
        raise ConfigError(
            f"{where}: the image has {width} x {height} pixels, more than the limit of {MAX_IMAGE_PIXELS}"
        )
    try:
        image.verify()  # checksums of a PNG; the image cannot be decoded afterwards, so it is reopened
        pillow.open(io.BytesIO(data), formats=FORMATS).load()
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise ConfigError(f"{where}: the image is broken or truncated: {error}") from error


def _bytes_of(value: Any, where: str, folder: Path | None) -> bytes:
    if isinstance(value, Mapping):
        found = next((value[key] for key in ("bytes", "path") if value.get(key) is not None), None)
        if found is None:
            raise ConfigError(f"{where}: an image needs `bytes` or `path`, got the keys {sorted(map(str, value))}")
        value = found
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, str | Path):
        return _file(Path(value) if folder is None else folder / value, where)
    if hasattr(value, "save") and hasattr(value, "getbands"):
        return _as_png(value, where)
    raise ConfigError(
        f"{where}: an image must be the bytes of a PNG or JPEG, a path, a map with either, or a PIL image; got "
        f"{type(value).__name__}"
    )


def _file(path: Path, where: str) -> bytes:
    try:
        if path.stat().st_size > MAX_IMAGE_BYTES:
            raise ConfigError(
                f"{where}: {path} has {path.stat().st_size} bytes, more than the limit of {MAX_IMAGE_BYTES}"
            )
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{where}: the image {path} cannot be read: {error.strerror}") from error


def _as_png(image: Any, where: str) -> bytes:
    """The original file of a PIL image is not available; equal pixels give equal bytes."""
    if image.mode in WITHOUT_RANGE:
        raise ConfigError(
            f"{where}: a PIL image of mode {image.mode} has no value that is known to be white; scale its values to "
            'the range from 0 to 255 and convert it to "L" or "RGB"'
        )
    buffer, image = io.BytesIO(), image.copy()
    set_upright(image)  # the PNG has no EXIF data
    (image.convert("RGB") if image.mode in NOT_IN_PNG else image).save(buffer, format="PNG")
    return buffer.getvalue()


def _pillow(where: str) -> Any:
    # Imported by name: prompts without images need no Pillow.
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise ConfigError(f"{where}: prompts with images need the package pillow: pip install pillow") from error
