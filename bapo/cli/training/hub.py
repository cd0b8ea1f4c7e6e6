"""Upload a folder to a model repository of the Hugging Face Hub, with the token that its own tools use.

The token is that of HF_TOKEN or of `hf auth login`; BAPO has no setting for it and stores none.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bapo.core.errors import AccessError, BapoError, ConfigError, UnavailableError

REPO = re.compile(r"[\w.-]+/[\w.-]+")
WEIGHTS = (
    "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors",
    "adapter_config.json",
)  # fmt: skip
"""What an export of either kind writes. Of an earlier upload they must leave: an adapter_config.json that stays lets
transformers apply its adapter to the new weights, and a model.safetensors is loaded instead of new shards."""
LOG_IN = "log in with hf auth login, or set HF_TOKEN, to a token with write access"


def check_target(repo: str) -> None:
    """Check before an export what can be: the name, and that there is a token.

    Raises: ConfigError, AccessError.
    """
    if not REPO.fullmatch(repo):
        raise ConfigError(f"--push-to-hub {repo}: name a repository as ORG/NAME; hf auth whoami shows your own names")
    if _hub().get_token() is None:
        raise AccessError(f"no token for the Hugging Face Hub: {LOG_IN}")


def push_folder(folder: Path, repo: str, *, private: bool, message: str) -> str:
    """Create the repository if there is none, and commit the files of the folder to it; its URL.

    Weights of an earlier upload that the folder does not have are deleted; other files of the repository stay.

    Raises: AccessError if the Hub refuses; UnavailableError if it cannot be reached; ConfigError for `private` with a
    repository that is public.
    """
    hub = _hub()
    api = hub.HfApi()
    with _translated(hub, repo, folder):
        url = str(api.create_repo(repo, private=private or None, exist_ok=True))
        if private and not api.repo_info(repo).private:
            raise ConfigError(f"{url} exists already and is public: leave out --private, or use another name")
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message, delete_patterns=[*WEIGHTS])
    return url


def _hub() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ConfigError("--push-to-hub needs a package: pip install huggingface_hub") from error


@contextmanager
def _translated(hub: Any, repo: str, folder: Path) -> Iterator[None]:
    again = f"the model is in {folder}; repeat the command, or use hf upload {repo} {folder}"
    # httpx's base class, or that of requests before version 1; hf_xet raises RuntimeError.
    failures = (getattr(hub.errors, "HTTPError", OSError), OSError, RuntimeError, ValueError)
    try:
        yield
    except BapoError:
        raise
    except failures as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = " ".join(str(error).split()) or type(error).__name__
        if status == 401:
            raise AccessError(f"the Hub does not accept the token: {LOG_IN} ({reason}); {again}") from error
        if status in (403, 404, 409):
            owner = repo.partition("/")[0]
            raise AccessError(
                f"the Hub refuses to write {repo}: the token needs write access to repositories of {owner}, or {repo} "
                f"belongs to others ({reason}); {again}"
            ) from error
        if status is not None:
            raise UnavailableError(f"the Hub answered {status} ({reason}); {again}") from error
        raise UnavailableError(f"cannot upload to {hub.constants.ENDPOINT}: {reason}; {again}") from error
