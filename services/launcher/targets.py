"""Addresses of the processes of a run: RUN/prometheus.json, for Prometheus' file-based service discovery.

Written only by the launcher. Processes that exited are removed, so that a finished run does not count as down; crashed
or hanging ones remain.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from bapo.core.addresses import authority, reachable
from bapo.runtime.metrics.metric import Process
from bapo.runtime.run_directory.files import replace_file, storing
from bapo.runtime.run_directory.layout import RunDirectory

FILE = "prometheus.json"


class TargetFile:
    def __init__(self, run: RunDirectory, name: str, hosts: Mapping[str, str]) -> None:
        """
        Args:
            name: run label of the series.
            hosts: address of each reachable process.
        """
        self._run, self._name, self._hosts = run, name, hosts
        self._written: str | None = None

    def write(self, running: Iterable[str]) -> None:
        """`running`: names of the running children. Raises: StorageError."""
        names, targets = set(running), []
        for process in Process:
            port = self._run.read_port(process)
            if port and process in names:
                labels = {"run": self._name, "process": process.value}
                targets.append({"targets": [authority(reachable(self._hosts[process]), port)], "labels": labels})
        text = json.dumps(targets, indent=2) + "\n"
        if text == self._written:
            return
        path = self._run.path / FILE
        with storing(path):
            replace_file(path, text.encode())
        self._written = text
