"""What a run with `model.lora` trains, sends and keeps, compared with full training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.runtime.lora import adapter_shapes
from bapo.runtime.machine import learner_bytes, trained_bytes, update_bytes
from bapo.runtime.model_files import folder_of
from bapo.runtime.peft_config import check_peft_config, check_peft_layers
from services.launcher.doctor.checks import Check, parameters_of

LOW_LR = 1e-5
"""Adapters need about ten times the rate of full training, which is 1e-6 in most configurations (docs/lora.md)."""
MIB = 1 << 20


def lora(config: Config) -> Iterator[Check]:
    """Layers, parameters, bytes of an update and of a checkpoint, memory, and the learning rate."""
    settings = config.model.lora
    if settings is None or folder_of(config.model.path) is None:
        return
    try:
        shapes = adapter_shapes(config.model.path, settings)
        if config.model.adapter is not None:
            check_peft_config(Path(config.model.adapter), settings)
            check_peft_layers(Path(config.model.adapter), shapes)
    except (ConfigError, OSError, ValueError) as error:
        yield Check(name="LoRA", status="fail", detail=str(error))
        return
    if (parameters := parameters_of(config)) is None:
        return
    layers = {name.rpartition(".")[0] for name in shapes}
    trained = sum(math.prod(shape) for shape in shapes.values())
    yield Check(
        name="LoRA",
        status="ok",
        detail=(
            f"rank {settings.rank}, scale {settings.scale:g}: trains {trained / 1e6:,.2f} M parameters "
            f"({trained / parameters:.1%}) in {len(layers)} linear layers; {_beside_full(config, parameters)}"
        ),
    )
    if trained > parameters:
        yield Check(
            name="LoRA",
            status="warn",
            detail=f"model.lora.rank = {settings.rank} trains more parameters than the model has; use a smaller rank",
        )
    if config.learner.lr < LOW_LR:
        yield Check(
            name="LoRA",
            status="warn",
            detail=(
                f"learner.lr = {config.learner.lr:g} is a rate of full training; adapters need about ten times as much "
                f"(--learner.lr {LOW_LR:g} or more)"
            ),
        )


def _beside_full(config: Config, parameters: int) -> str:
    full = config.model_copy(update={"model": config.model.model_copy(update={"lora": None})})
    sums = {"an update": update_bytes, "a checkpoint": trained_bytes, "the learner": learner_bytes}
    said = [f"{name} {of(config, parameters) / MIB:,.1f}" for name, of in sums.items()]
    instead = [f"{of(full, parameters) / MIB:,.1f}" for of in sums.values()]
    return f"{', '.join(said)} MiB, where full training has {', '.join(instead)}"
