"""Images of prompts, as tasks give them: checked files, named by their sha256.

    bytes | path | {"bytes": ..., "path": ...} | PIL image --read_image--> bytes --digest_of--> Prompt.images

A task reads each image with `read_image`, names it in `make_prompt(images=...)`, and gives its bytes by
`image(digest)` (`bapo.tasks.base.HasImages`); `Images` is that mapping. Everything is decoded once here, so that a
broken image is an error of its row and not of a run that trains.

Does not cover: video, animated pictures (their first frame is taken), URLs.
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
from bapo.tasks.base import IMAGE, HasImages, Task

MOST_IMAGE_BYTES = 20 << 20
MOST_IMAGE_PIXELS = 16 << 20
"""Decoded, three bytes each. Models see far fewer: those of Qwen at most 12.8 megapixels."""
FORMATS = ("PNG", "JPEG")
NOT_IN_PNG = ("CMYK", "YCbCr", "HSV", "LAB", "F")


def digest_of(data: bytes) -> str:
    """What `Prompt.images` names an image by: sha256, hex."""
    return hashlib.sha256(data).hexdigest()


class Images:
    """The images of a task by digest, each once: `HasImages` for tasks that keep them in memory."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def add(self, value: Any, where: str, folder: Path | None = None) -> str:
        """Read one (`read_image`) and keep it; returns its digest. Raises: ConfigError."""
        data = read_image(value, where, folder)
        digest = digest_of(data)
        self._files.setdefault(digest, data)
        return digest

    def image(self, digest: str) -> bytes:
        """The file. Raises: KeyError."""
        return self._files[digest]


def keep_images(task: Task, prompts: Sequence[Prompt], files: ImageFiles) -> None:
    """Write the images of these prompts into the run directory, before anybody is asked for a group that shows one.

    Raises: ConfigError for a task that does not give them; StorageError.
    """
    shown = [prompt for prompt in prompts if prompt.images]
    if not shown:
        return
    if not isinstance(task, HasImages):
        raise ConfigError(f"task {task.name!r}: its prompts have images, so it needs a method image(digest)")
    files.keep(shown, task.image)


def in_words(message: Any) -> Any:
    """A message whose content is a list of texts and images, as text with `<image>` in it; any other as it is."""
    parts = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        return message
    return {
        **message,
        "content": "".join(IMAGE if part.get("type") == "image" else str(part.get("text", "")) for part in parts),
    }


def read_image(value: Any, where: str, folder: Path | None = None) -> bytes:
    """The file of one image, complete and of a size that can be trained on.

    Args:
        value: bytes of a PNG or JPEG; a path; a map with one of them as `bytes` or `path`, as columns of images in
            parquet files have; or a PIL image, which becomes a PNG.
        where: file and row, the beginning of every message.
        folder: what relative paths are relative to; None: the working directory.
    Raises: ConfigError.
    """
    data = _bytes_of(value, where, folder)
    check_image(data, where)
    return data


def check_image(data: bytes, where: str) -> tuple[int, int]:
    """Width and height of a whole PNG or JPEG. Raises: ConfigError, for a bomb before anything of it is decoded."""
    if len(data) > MOST_IMAGE_BYTES:
        raise ConfigError(f"{where}: the image has {len(data)} bytes; at most {MOST_IMAGE_BYTES} are taken")
    pillow = _pillow(where)
    refusals = (OSError, ValueError, SyntaxError, pillow.DecompressionBombError, pillow.DecompressionBombWarning)
    try:
        image = pillow.open(io.BytesIO(data), formats=FORMATS)  # the header alone
    except refusals as error:
        raise ConfigError(f"{where}: the image is neither a PNG nor a JPEG that can be read") from error
    width, height = image.size
    if width * height > MOST_IMAGE_PIXELS:
        raise ConfigError(f"{where}: the image has {width} x {height} pixels; at most {MOST_IMAGE_PIXELS} are taken")
    try:
        image.verify()  # a PNG's checksums; it can then not be decoded, so it is opened again
        pillow.open(io.BytesIO(data), formats=FORMATS).load()
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise ConfigError(f"{where}: the image is broken or cut off: {error}") from error
    return width, height


def _bytes_of(value: Any, where: str, folder: Path | None) -> bytes:
    if isinstance(value, Mapping):
        found = next((value[key] for key in ("bytes", "path") if value.get(key) is not None), None)
        if found is None:
            raise ConfigError(f"{where}: an image has neither bytes nor path, its keys are {sorted(map(str, value))}")
        value = found
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, str | Path):
        return _file(Path(value) if folder is None else folder / value, where)
    if hasattr(value, "save") and hasattr(value, "getbands"):
        return _as_png(value)
    raise ConfigError(
        f"{where}: an image is bytes of a PNG or JPEG, a path, a map with one of them, or a PIL image; got "
        f"{type(value).__name__}"
    )


def _file(path: Path, where: str) -> bytes:
    try:
        if path.stat().st_size > MOST_IMAGE_BYTES:
            raise ConfigError(f"{where}: {path} has {path.stat().st_size} bytes; at most {MOST_IMAGE_BYTES} are taken")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{where}: the image {path} cannot be read: {error.strerror}") from error


def _as_png(image: Any) -> bytes:
    """The file that a PIL image came from is gone; the same pixels make the same bytes."""
    buffer = io.BytesIO()
    (image.convert("RGB") if image.mode in NOT_IN_PNG else image).save(buffer, format="PNG")
    return buffer.getvalue()


def _pillow(where: str) -> Any:
    # By name: prompts without images need no Pillow.
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise ConfigError(f"{where}: prompts with images need the package pillow: pip install pillow") from error
