"""Images of prompts, as the page shows them: an `<img>` cannot send a token, so they are answers like all others."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

from bapo.core.errors import ContractError
from bapo.runtime.run_directory.images import media_type
from services.dashboard.group import exported_group, group
from services.dashboard.run_view import RunView

EXPORTED_BYTES = 8 << 20
"""Of all images in an exported file."""


def image(view: RunView, *, id: str) -> dict[str, Any]:
    """One image by its digest.

    Raises: ContractError for one that the run does not have, or that was changed.
    """
    files = view.run.images
    if not files.path(id).is_file():
        raise ContractError(f"run {view.config.run.name} has no image {id[:80]!r}")
    data = files.read(id)
    return {"id": id, "url": f"data:{media_type(data)};base64,{base64.b64encode(data).decode()}"}


def exported_image(view: RunView) -> Iterable[dict[str, Any]]:
    """Those of the exported groups, as many as fit."""
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
