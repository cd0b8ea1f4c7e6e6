"""Slurm on this machine without munge: slurmctld and a slurmd per node, as the user of the test, on the loopback."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import sleep
from types import TracebackType
from typing import Self

import psutil

from bapo.runtime.rank_environment import free_port
from tests.support.launch import REPOSITORY
from tests.support.wait import wait_until

PATH = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"
START_S = 60.0
CONFIG = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
# A requeued job waits until its credential has expired; Slurm takes 120 s for less than 5.
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def is_installed() -> bool:
    """Whether Slurm is on this machine; Debian's packages allow several slurmd on it."""
    return all(shutil.which(name, path=PATH) for name in ("slurmctld", "slurmd", "sbatch", "srun"))


class Slurm:
    """`with Slurm(folder, 3) as slurm`: nodes n1 to n3 with two cores each; afterwards nothing of them is left."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self._folder, self._num_nodes = folder, num_nodes
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._conf = folder / "slurm.conf"
        self._ray = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self._env = os.environ | {"SLURM_CONF": str(self._conf), "RAY_TMPDIR": str(self._ray), "ADDRESS": "127.0.0.1"}
        commands = f"{Path(sys.executable).parent}{os.pathsep}{PATH}"
        self._env |= {"PATH": commands, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}

    def __enter__(self) -> Self:
        numbers = range(1, self._num_nodes + 1)
        nodes = [
            f"NodeName=n{i} NodeHostname=localhost NodeAddr=127.0.0.1 Port={free_port()} CPUs=2 RealMemory=2000"
            for i in numbers
        ]
        config = CONFIG.format(port=free_port(), user=getpass.getuser(), folder=self._folder, nodes="\n".join(nodes))
        self._conf.write_text(config)
        for name in ("state", *(f"n{i}" for i in numbers)):
            (self._folder / name).mkdir()
        self._start("slurmctld", "-D")
        for i in numbers:
            self._start("slurmd", "-D", "-N", f"n{i}")
        try:
            wait_until(self._is_idle, timeout_s=START_S, what="idle nodes")
        except BaseException:
            self._close()
            raise
        return self

    def command(self, *words: str, **variables: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            words, cwd=self._folder, env=self._env | variables, capture_output=True, text=True, check=True
        )
        return done.stdout

    def submit(self, name: str, nodes: int, *arguments: str, **variables: str) -> str:
        """Submit deploy/slurm/bapo.sbatch. Returns: the id of the job."""
        flags = ["-J", name, "-N", str(nodes), "-c", "2", "-t", "10", "-o", str(self._folder / "%x-%j.log")]
        script = str(REPOSITORY / "deploy/slurm/bapo.sbatch")
        return self.command("sbatch", "--parsable", *flags, script, *arguments, **variables).strip()

    def facts(self, job: str) -> Mapping[str, str]:
        """JobState, Restarts, ExitCode, ... of a job; at most twice a second, as its processes need the machine."""
        sleep(0.5)
        return dict(re.findall(r"(\w+)=(\S+)", self.command("scontrol", "show", "job", job)))

    def end(self, job: str, timeout_s: float) -> str:
        """State and exit code of a job when it has ended, as `COMPLETED 0:0`."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait_until(lambda: self.facts(job)["JobState"] in ends, timeout_s=timeout_s, what=f"end of job {job}")
        facts = self.facts(job)
        return f"{facts['JobState']} {facts['ExitCode']}"

    def log(self, name: str, job: str) -> str:
        """What the script and its steps have printed."""
        path = self._folder / f"{name}-{job}.log"
        return path.read_text() if path.exists() else ""

    def processes_of(self, job: str) -> list[str]:
        """Command lines of processes that a job has started, by their environment."""
        found = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                if (environment.get("SLURM_CONF"), environment.get("SLURM_JOB_ID")) == (str(self._conf), job):
                    found.append(" ".join(process.cmdline())[:120])
            except psutil.Error:
                continue
        return found

    def _start(self, *command: str) -> None:
        with (self._folder / "daemons.log").open("ab") as file:
            program = [shutil.which(command[0], path=PATH) or command[0], *command[1:]]
            started = subprocess.Popen(program, env=self._env, stdout=file, stderr=file, start_new_session=True)
        self._daemons.append(started)

    def _is_idle(self) -> bool:
        done = subprocess.run(["sinfo", "-h", "-o", "%T %D"], env=self._env, capture_output=True, text=True)
        return done.stdout.strip() == f"idle {self._num_nodes}"

    def _close(self) -> None:
        for daemon in self._daemons:
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait()
        shutil.rmtree(self._ray, ignore_errors=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        jobs = self.command("squeue", "-h", "-o", "%A").split()
        for job in jobs:  # of a failed test
            self.command("scancel", job)
        try:
            wait_until(lambda: not self.command("squeue", "-h"), timeout_s=START_S, what="end of the jobs")
        finally:
            self._close()
