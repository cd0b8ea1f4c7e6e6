"""A checkpoint's model in Hugging Face format, float32, with its tokenizer: after the last step, and by `bapo export`.

    config.json, tokenizer and image files      of the base model
    model.safetensors                           or model-00001-of-00003.safetensors .. with an index

Written piece by piece, so a model of any size needs a few GB of memory, and under another name until it is complete.

    python -m learner.export --config RUN/config.toml --run-dir RUN --step N [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel

from bapo.runtime.model_files import INDEX, folder_of
from bapo.runtime.process import Flags, run_process
from bapo.runtime.run_directory.files import storing
from bapo.runtime.vision import PROCESSOR_FILES
from learner.checkpoint import Checkpoint, open_checkpoint
from learner.distributed.shard_files import FILE_MODE, StoredShards
from learner.model.file_format import converts_singly, file_tensors
from learner.model.policy import empty_model

log = logging.getLogger(__name__)

FILE_BYTES = 4 << 30
"""Largest size of a file of weights."""
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "*.model",
    "chat_template*",
)
IMAGE_FILES = (*PROCESSOR_FILES, "video_preprocessor_config.json")
"""Image preprocessing settings of a vision-language model."""


def main(flags: Flags) -> None:
    """Export one checkpoint."""
    checkpoint = open_checkpoint(flags.run.path / "checkpoints", flags.extra.step)
    export_model(checkpoint, flags.config.model.path, flags.extra.out)


def export_model(checkpoint: Checkpoint, base: str, out: Path | None = None) -> None:
    """Write a folder in Hugging Face format, unless it exists.

    Args:
        base: model.path of the run.
        out: default: the folder `hf` of the checkpoint.
    Raises: StorageError.
    """
    target = out or checkpoint.model_path
    if target.exists():
        return
    with storing(target, SafetensorError):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=target.parent, prefix=f".{target.name}-", ignore_cleanup_errors=True
        ) as name:
            partial = Path(name) / target.name
            partial.mkdir()
            _write_model_files(base, partial)
            _write_weights(checkpoint.weights, empty_model(base), partial)
            try:
                partial.rename(target)
            except OSError:
                if not target.exists():  # else another process has exported it meanwhile
                    raise
    log.info("exported %s", target)


def _write_weights(weights: StoredShards, model: PreTrainedModel, folder: Path) -> None:
    files: list[Path] = []
    weight_map: dict[str, int] = {}
    total = 0
    for number, parameters in enumerate(weights.whole(FILE_BYTES if converts_singly(model) else sys.maxsize)):
        piece = file_tensors(model, parameters)
        files.append(folder / f"piece-{number}")
        save_file(piece, files[-1], metadata={"format": "pt"})
        files[-1].chmod(FILE_MODE)
        weight_map |= dict.fromkeys(piece, number)
        total += sum(tensor.nbytes for tensor in piece.values())
    if len(files) == 1:
        files[0].rename(folder / "model.safetensors")
        return
    names = [f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))]
    for file, name in zip(files, names, strict=True):
        file.rename(folder / name)
    index = {"metadata": {"total_size": total}, "weight_map": {key: names[at] for key, at in weight_map.items()}}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def _write_model_files(base: str, folder: Path) -> None:
    """All files of the Hugging Face format except the weights."""
    config = AutoConfig.from_pretrained(base)
    config.dtype = torch.float32
    config.save_pretrained(folder)
    with suppress(OSError):  # it has none
        GenerationConfig.from_pretrained(base).save_pretrained(folder)
    found = folder_of(base)
    for name in IMAGE_FILES:
        if found is not None and (found / name).is_file():
            shutil.copyfile(found / name, folder / name)
    if not Path(base).is_dir():
        AutoTokenizer.from_pretrained(base).save_pretrained(folder)
        return
    # Copied, not loaded and saved: a wrongly inferred tokenizer class would change the files.
    for pattern in TOKENIZER_FILES:
        for file in Path(base).glob(pattern):
            shutil.copyfile(file, folder / file.name)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=int, required=True, help="checkpoint to export")
    parser.add_argument("--out", type=Path, help="folder to create; default: hf in the checkpoint")


if __name__ == "__main__":
    run_process("learner.export", main, add_flags=_add_flags)
