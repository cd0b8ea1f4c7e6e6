"""A checkpoint's model in Hugging Face format, with its tokenizer: after the last step, and by `bapo export`.

    hf/        config.json, tokenizer, generation and image settings, code      the base model's own files
               model.safetensors      or model-00001-of-00003.safetensors .. with an index; in float32
    adapter/   with LoRA: adapter_config.json and adapter_model.safetensors, for PEFT; hf/ then is the base with the
               adapter merged, in `model.dtype`, the weights that sampled

Written piece by piece, so a model of any size needs a few GB of memory, and under another name until it is complete.

    python -m learner.export --config RUN/config.toml --run-dir RUN --step N [--out DIR] [--merged]
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from bapo.config.tree import ModelConfig
from bapo.core.errors import ConfigError
from bapo.runtime.base_files import copy_base_files
from bapo.runtime.model_files import INDEX, folder_of
from bapo.runtime.process import Flags, run_process
from bapo.runtime.run_directory.files import storing
from bapo.runtime.run_directory.layout import EXPORT_FAILED
from learner.checkpoint import Checkpoint, open_checkpoint
from learner.distributed.shard_files import FILE_MODE, StoredShards
from learner.model.file_format import converts_singly, file_tensors
from learner.model.peft_files import merged_pieces, write_peft
from learner.model.policy import empty_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # its import needs what `learner.model` completes

log = logging.getLogger(__name__)

FILE_BYTES = 4 << 30
"""Largest size of a file of weights."""


def main(flags: Flags) -> None:
    """Export one checkpoint."""
    checkpoint = open_checkpoint(flags.run.path / "checkpoints", flags.extra.step)
    write = export_adapter if flags.config.model.lora is not None and not flags.extra.merged else export_model
    write(checkpoint, flags.config.model, flags.extra.out)


def export_model(checkpoint: Checkpoint, model: ModelConfig, out: Path | None = None) -> None:
    """Write a folder in Hugging Face format, unless it exists.

    Args:
        model: of the run.
        out: default: the folder `hf` of the checkpoint.
    Raises: StorageError, ConfigError.
    """

    checkpoint.require_adapter_of(model)

    def write(partial: Path) -> None:
        if model.lora is None:
            _write_model_files(model.path, partial, dtype="float32")
            _write_pieces(_file_pieces(checkpoint.weights, empty_model(model.path)), partial)
        else:
            _write_model_files(model.path, partial, dtype=model.dtype)
            _write_pieces(merged_pieces(checkpoint.weights, model, empty_model(model.path)), partial)

    _write_folder(out or checkpoint.model_path, write)


def export_adapter(checkpoint: Checkpoint, model: ModelConfig, out: Path | None = None) -> None:
    """Write a folder that PEFT loads, unless it exists.

    Args:
        out: default: the folder `adapter` of the checkpoint.
    Raises: StorageError.
    """
    checkpoint.require_adapter_of(model)
    _write_folder(out or checkpoint.adapter_path, lambda partial: write_peft(checkpoint.weights, model, partial))


def _write_folder(target: Path, write: Callable[[Path], None]) -> None:
    if target.exists():
        return
    with storing(target, SafetensorError):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=target.parent, prefix=f".{target.name}-", ignore_cleanup_errors=True
        ) as name:
            partial = Path(name) / target.name
            partial.mkdir()
            write(partial)
            try:
                partial.rename(target)
            except OSError:
                if not target.exists():  # else another process has exported it meanwhile
                    raise
    log.info("exported %s", target)


def check_export(base: str) -> None:
    """Try what an export does besides writing weights: a run should not train for hours and fail at its end.

    Raises: ConfigError.
    """
    with tempfile.TemporaryDirectory(prefix="bapo-export-") as name:
        try:
            _write_model_files(base, Path(name), dtype="float32")
            empty_model(name)
        except Exception as error:  # transformers' classes, and a model's own code, may raise anything
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ConfigError(f"model.path: the trained model of {base} could not be exported: {reason}") from error


def export_last(checkpoint: Checkpoint, model: ModelConfig, run: Path) -> None:
    """Export the model of a run's last step, with LoRA the adapter alone. A failure is reported: the run is finished,
    and its weights are saved."""
    try:
        (export_model if model.lora is None else export_adapter)(checkpoint, model)
    except Exception as error:  # noqa: BLE001 - whatever fails, the run must not be lost
        reason = f"{type(error).__name__}: {error}"
        log.error("all steps are trained and saved; the model was not exported: %s", reason)  # noqa: TRY400 - one line
        log.error("repeat the export with: bapo export %s", run)  # noqa: TRY400
        with suppress(OSError):  # the disk may be full
            (checkpoint.model_path.parent / EXPORT_FAILED).write_text(reason)


def _file_pieces(weights: StoredShards, model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    for parameters in weights.whole(FILE_BYTES if converts_singly(model) else sys.maxsize):
        yield file_tensors(model, parameters)


def _write_pieces(pieces: Iterable[dict[str, Tensor]], folder: Path) -> None:
    files: list[Path] = []
    weight_map: dict[str, int] = {}
    total = 0
    for number, piece in enumerate(pieces):
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


def _write_model_files(base: str, folder: Path, *, dtype: str) -> None:
    """All files of the Hugging Face format except the weights. Raises: ConfigError, OSError."""
    found = folder_of(base)
    if found is None:
        raise ConfigError(f"model.path: the files of {base} are no longer on this machine")
    copy_base_files(found, folder, dtype=dtype)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=int, required=True, help="checkpoint to export")
    parser.add_argument("--out", type=Path, help="folder to create; default: in the checkpoint")
    parser.add_argument("--merged", action="store_true", help="with LoRA: the whole model, not the adapter")


if __name__ == "__main__":
    run_process("learner.export", main, add_flags=_add_flags)
