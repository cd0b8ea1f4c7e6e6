"""Images of prompts for the dashboard, returned as data URLs: an `<img>` cannot send a token."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

from bapo.core.errors import ContractError
from bapo.runtime.run_directory.images import media_type
from services.dashboard.group import exported_group, group
from services.dashboard.run_view import RunView

EXPORTED_BYTES = 8 << 20
"""Total size of the images in an exported file."""


def image(view: RunView, *, id: str) -> dict[str, Any]:
    """One image by its digest.

    Raises: ContractError if the run does not have it, or it was changed.
    """
    files = view.run.images
    if not files.path(id).is_file():
        raise ContractError(f"run {view.config.run.name} has no image {id[:80]!r}")
    data = files.read(id)
    return {"id": id, "url": f"data:{media_type(data)};base64,{base64.b64encode(data).decode()}"}


def exported_image(view: RunView) -> Iterable[dict[str, Any]]:
    """The images of the exported groups, as many as fit."""
    room, seen = EXPORTED_BYTES, set[str]()
    for query in exported_group(view):
        for digest in group(view, **query).get("images") or ():
            path = view.run.images.path(digest)
            if digest in seen or not path.is_file():
                continue
            seen.add(digest)
            room -= path.stat().st_size
            if room < 0:
                return
            yield {"id": digest}
