"""A LoRA adapter on its way from the learner to the engines: one safetensors file, and what both make of it.

    NAME.lora_A [r, I]    NAME.lora_B [O, r]    of every adapted layer, by the layer's name in the base model's files
    metadata              "lora": scale of B A and the digest of the base model that W comes from, as JSON; one entry,
                          because safetensors writes several in any order, and an update that is made again has the
                          same digest

    W' = round(W + scale B A)        in the dtype of W; sums in float32

Learner and engines multiply by the same W', made by `merged`: in bfloat16, LoRA computed apart
(x W^T + scale x A^T B^T) differs from it by as much as one training step changes the log-probs.

Suffixes: I inputs and O outputs of a layer, R the rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from bapo.config.tree import LoraConfig
from bapo.core.errors import WeightMismatchError
from bapo.runtime.file_digest import digest_of
from bapo.runtime.lora import LORA_A, LORA_B, adapter_shapes, base_files

if TYPE_CHECKING:
    from torch import Tensor, device, dtype  # the shared package is light

METADATA = "lora"


def merged(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    """W' in the dtype of W, a new tensor. A and B are rounded to that dtype first."""
    dtype = weight_OI.dtype
    change_OI = b_OR.to(dtype).float() @ a_RI.to(dtype).float()
    return change_OI.mul_(scale).add_(weight_OI.float()).to(dtype)


def merged_base(
    file: Path,
    adapter: Mapping[str, Tensor],
    scale: float,
    dtype: dtype,
    *,
    only: Collection[str] | None = None,
    device: device | str = "cpu",
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one of the base model's files, with the adapter in them.

    Args:
        adapter: A and B by name, on `device`.
        dtype: of floating-point results. W has it before it is merged, as in the learner, whatever the file has.
        only: layers whose tensors are wanted; None: all.
        device: where it is merged: on a CPU, that of 8 B takes half a minute.
    """
    with safe_open(file, framework="pt") as base:
        for name in base.keys():  # noqa: SIM118 - not a dict
            layer, _, leaf = name.rpartition(".")
            if only is not None and layer not in only:
                continue
            tensor = base.get_tensor(name).to(device)
            tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
            if leaf == "weight" and f"{layer}.{LORA_A}" in adapter:
                tensor = merged(tensor, adapter[f"{layer}.{LORA_A}"], adapter[f"{layer}.{LORA_B}"], scale)
            yield name, tensor


def metadata_of(settings: LoraConfig, base: str) -> dict[str, str]:
    """Of the file. `base`: `base_digest` of the model that the learner has loaded."""
    return {METADATA: json.dumps({"scale": settings.scale, "base": base})}


def base_digest(path: str) -> str:
    """Digest of the weights of `model.path`, hex; files are read again when they have changed.

    Raises: ConfigError, OSError.
    """
    digest = hashlib.sha256()
    for file in base_files(path):
        status = file.stat()
        digest.update(f"{file.name} {_digest_of(file, status.st_size, status.st_mtime_ns)}\n".encode())
    return digest.hexdigest()


@lru_cache
def _digest_of(file: Path, size: int, time_ns: int) -> str:
    """`size` and `time_ns` are of the file: another one is read again."""
    del size, time_ns
    return digest_of(file)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that has arrived, with the base model of this host."""

    path: str
    base: str
    """model.path."""
    scale: float
    layers: frozenset[str]

    @classmethod
    def open(cls, path: str, base: str, settings: LoraConfig) -> Adapter:
        """Check all that can be said without the engine.

        Raises: WeightMismatchError if the file is not an adapter, of another base model or scale, or if one layer is
            missing, unknown, or of another rank or shape. The engine still has its old weights.
        """
        try:
            with safe_open(path, framework="pt") as file:
                found = json.loads((file.metadata() or {}).get(METADATA, "null"))
                names = set(file.keys())
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
        except (OSError, SafetensorError, ValueError) as error:
            raise WeightMismatchError(f"the adapter {path} cannot be read: {error}") from error
        if found is None:
            raise WeightMismatchError(f"{path} has whole weights, not an adapter, and model.lora is set")
        if found["scale"] != settings.scale:
            raise WeightMismatchError(
                f"{path} has the scale {found['scale']!r}, but model.lora here gives {settings.scale!r} "
                f"(rank {settings.rank}, alpha {settings.alpha:g}{', rslora' if settings.rslora else ''})"
            )
        if found["base"] != base_digest(base):
            raise WeightMismatchError(
                f"{path} belongs to a base model of digest {found['base'][:16]}..., but {base} here has "
                f"{base_digest(base)[:16]}..."
            )
        wanted = adapter_shapes(base, settings)
        for name in sorted(wanted.keys() | shapes.keys()):
            if wanted.get(name) != shapes.get(name):
                raise WeightMismatchError(
                    f"{path}: {name} is {_said(shapes.get(name))}, but model.lora here needs {_said(wanted.get(name))}"
                )
        layers = frozenset(name.removesuffix(f".{LORA_A}") for name in wanted if name.endswith(LORA_A))
        return cls(path, base, settings.scale, layers)

    def tensors(self, complete: Iterable[str] = (), device: device | str = "cpu") -> Iterator[tuple[str, Tensor]]:
        """W' of every adapted layer, by its name in the base model's files, with its bias.

        Args:
            complete: further layers whose unchanged tensors are needed: joined layers are loaded together.
            device: where they are made.
        """
        with safe_open(self.path, framework="pt") as file:
            adapter = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118 - not a dict
        dtype = next(iter(adapter.values())).dtype  # `model.dtype`, in which the learner writes it
        for base in base_files(self.base):
            only = self.layers | set(complete)
            yield from merged_base(base, adapter, self.scale, dtype, only=only, device=device)


def _said(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else json.dumps(list(shape))
