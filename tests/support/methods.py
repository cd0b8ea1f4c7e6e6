"""Parts of methods for tests."""

from __future__ import annotations

from typing import Any

from bapo.core.plugins import Kind


def options_for(kind: Kind, name: str, **values: Any) -> dict[str, Any]:
    """Those of these values that the part has settings for."""
    return {key: value for key, value in values.items() if key in kind.find(name).Settings.model_fields}
