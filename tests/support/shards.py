"""What a checkpoint holds, whatever number of ranks wrote it."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from learner.checkpoint import SHARDS
from learner.distributed.shard_files import StoredShards


def stored_tensors(checkpoint: Path, part: str | None = None) -> dict[str, Tensor]:
    """Whole tensors by name; `part`: of one part, without its name."""
    stored = StoredShards.open(checkpoint / SHARDS)
    pieces = (stored.part(part) if part else stored).whole()
    return {name: tensor for piece in pieces for name, tensor in piece.items()}
