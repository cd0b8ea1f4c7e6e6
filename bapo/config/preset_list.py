"""The groups of presets in `bapo config presets`, and their descriptions."""

from __future__ import annotations

from itertools import takewhile

from bapo.config.layers import PRESETS, preset_paths

PRESET_GROUPS = {
    "Start here": ("grpo", "bapo-reuse", "dapo", "bapo-v1", "bapo"),
    "What another framework does by default (docs/migrate.md)": ("trl-grpo", "verl-grpo"),
    "Other losses and advantages": ("dr-grpo", "gspo", "cispo", "dppo", "pass-k"),
    "contrib: variants, baselines and other papers": tuple(
        name for name, path in sorted(preset_paths().items(), key=lambda item: item[1]) if path.parent != PRESETS
    ),
}
"""Heading -> presets, in display order."""


def about_preset(name: str) -> str:
    """The leading comment of a preset's file: description and sources."""
    lines = preset_paths()[name].read_text(encoding="utf-8").splitlines()
    return " ".join(" ".join(line[1:] for line in takewhile(lambda line: line.startswith("#"), lines)).split())
