"""The frozen embeddings of a run's training prompts: one .npz file with `ids` and `embeddings`, written once.

Computed by the learner with the base model, or with another model (`selector.embeddings`), and read by prompt
selectors. No pickle: both arrays are plain.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bapo.config.tree import Config
from bapo.core.errors import ConfigError
from bapo.runtime.run_directory.files import ELSEWHERE, replace_file, storing
from bapo.runtime.run_directory.layout import RunDirectory


def embeddings_path(config: Config, run: RunDirectory) -> Path:
    """The configured file, or that of the run."""
    given = config.selector.get("embeddings")
    return run.path / "prompt_embeddings.npz" if given is None else Path(given)


def write_embeddings(path: Path, prompt_ids: Sequence[str], embeddings: NDArray[np.float32]) -> None:
    """`embeddings`: [N, D]. Raises: StorageError."""
    content = io.BytesIO()
    np.savez(content, ids=np.array(prompt_ids, dtype=np.str_), embeddings=embeddings)
    with storing(path, when_full=ELSEWHERE):
        replace_file(path, content.getvalue())


def read_embeddings(path: Path, prompt_ids: Sequence[str]) -> NDArray[np.float32]:
    """[N, D] in the order of `prompt_ids`; the file may contain more prompts.

    Raises: ConfigError if the file is invalid, a prompt is missing, or a value is not finite.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            ids, embeddings = file["ids"].tolist(), file["embeddings"].astype(np.float32)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"selector.embeddings {path}: not a .npz file with the arrays `ids` and `embeddings`: {error}"
        ) from error
    place = {prompt_id: row for row, prompt_id in enumerate(ids)}
    if missing := [prompt_id for prompt_id in prompt_ids if prompt_id not in place]:
        raise ConfigError(
            f"selector.embeddings {path} is missing {len(missing)} training prompts, for example {missing[0]}"
        )
    found: NDArray[np.float32] = embeddings[[place[prompt_id] for prompt_id in prompt_ids]]
    if found.ndim != 2 or not np.all(np.isfinite(found)):
        raise ConfigError(f"selector.embeddings {path} must contain one row of finite numbers per prompt")
    return found
