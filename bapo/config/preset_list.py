"""The groups of presets in `bapo config presets` and docs/configuration.md, and their descriptions."""

from __future__ import annotations

from itertools import takewhile

from bapo.config.layers import PRESETS

PRESET_GROUPS = {
    "Start here": ("grpo", "bapo-reuse", "dapo", "bapo-v1", "bapo"),
    "What another framework does by default (docs/migrate.md)": ("trl-grpo", "verl-grpo"),
    "BAPO: the paper's variants, ablations and released code": (
        "bapo-mini", "bapo-without-x2", "bapo-without-x3", "bapo-fixed-low", "bapo-fixed-high", "bapo-gaussian",
        "bapo-gaussian-quota", "bapo-uniform", "bapo-inverted", "bapo-official", "bapo-official-thresholds", "ba-ppo",
    ),
    "BAPO: additional variants": (
        "bapo-current-baseline", "pilot-commit", "bapo-balanced-clip",
    ),
    "On-policy losses": (
        "grpo-v5", "dr-grpo", "gspo", "cispo", "dppo", "balanced-clip", "kimi", "ppo", "tempo", "pass-k",
    ),
    "Importance sampling against the inference engine": ("tis", "tis-mask", "tis-sequence", "tis-geometric-mask"),
    "Replay and off-policy": ("areal", "arpo", "popo", "remix", "repo"),
    "Choice of prompts": ("learnability", "mopps", "dots-online"),
    "Expert solutions": ("luffy", "relift"),
}  # fmt: skip
"""Heading -> presets, in display order."""


def about_preset(name: str) -> str:
    """The leading comment of a preset's file: description and sources."""
    lines = (PRESETS / f"{name}.toml").read_text(encoding="utf-8").splitlines()
    return " ".join(" ".join(line[1:] for line in takewhile(lambda line: line.startswith("#"), lines)).split())
