"""Images for a worker: files of the run directory if this host can read them, otherwise copies, fetched once.

    RUN/images/<digest>  ->  copy of this host  ->  GET /images/<digest> of the rollout server

A digest identifies the content, so copies never expire, and each file is checked when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bapo.config.tree import Config
from bapo.runtime.run_directory.images import FOLDER, ImageFiles
from bapo.transport.service_client import ServiceClient
from rollout_server.weights.host_cache import copies_folder, make_copies_folder
from rollout_server.weights.receive import can_be_read

TIMEOUT_S = 10.0
RETRY_S = 30.0


class ImageSource:
    """Thread-safe: threads that fetch the same image write identical files."""

    def __init__(self, config: Config, run_path: Path | None, url: str = "", token: str | None = None) -> None:
        """
        Args:
            run_path: run directory, which this host may be unable to read; None: no run directory.
            url: URL of the rollout server; empty: images are not fetched.
            token: API token for the rollout server; None: the process's own.
        """
        self._of_run = None if run_path is None else ImageFiles(run_path / FOLDER)
        self._config = config
        self._copies = ImageFiles(copies_folder(config) / FOLDER)
        self._url, self._token = url, token

    def read(self, digest: str) -> bytes:
        """One image. Raises: ContractError if the file was changed; StorageError; what the server raises."""
        for files in (self._of_run, self._copies):
            if files is not None and can_be_read(files.path(digest)):
                return files.read(digest)
        if not self._url:
            return (self._of_run or self._copies).read(digest)  # raises
        server = ServiceClient("the rollout server", self._url, timeout_s=TIMEOUT_S, retry_s=RETRY_S, token=self._token)
        data = server.call("GET", f"/images/{digest}").body
        make_copies_folder(self._config)
        self._copies.write(digest, data)
        return data

    def fetch(self, digests: Sequence[str]) -> None:
        """Copy images to this host, so that the engine's thread reads them from disk. Raises: BapoError."""
        for digest in digests:
            self.read(digest)
