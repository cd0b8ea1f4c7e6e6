"""Every key of TRL's GRPOConfig and of verl's PPO trainer with its default, as released (see `version` in the files).

    python -m tests.support.peers            write the files anew from the releases named in VERSIONS

`released` reads them from the packages, without installing what those need; `stored` is what unit tests compare with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
VERSIONS = {"trl": "1.16.0", "verl": "0.9.1"}
"""TRL: as in benchmarks/peer_trl/requirements.txt."""
_TRL_FIELDS = """
import dataclasses, json
from trl import GRPOConfig
def default(field):
    return None if field.default is dataclasses.MISSING else field.default
print(json.dumps({field.name: default(field) for field in dataclasses.fields(GRPOConfig)}, default=str))
"""


def stored(peer: str) -> dict[str, Any]:
    """Key -> default of `trl` or `verl`."""
    found: dict[str, Any] = json.loads((HERE / f"{peer}.json").read_text())["defaults"]
    return found


def released(peer: str) -> dict[str, Any]:
    """The same from the released package.

    Raises: OSError when the package cannot be downloaded.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with zipfile.ZipFile(_wheel(peer, folder)) as wheel:
            wheel.extractall(folder)
        if peer == "verl":
            text = (folder / "verl/trainer/config/_generated_ppo_trainer.yaml").read_text()
            return dict(_leaves(yaml.safe_load(text)))
        found = subprocess.run(
            [sys.executable, "-c", _TRL_FIELDS], env=os.environ | {"PYTHONPATH": name}, check=True, capture_output=True
        )
        fields: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
        return fields


def _wheel(peer: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    done = subprocess.run([*command, f"{peer}=={VERSIONS[peer]}"], check=False, capture_output=True, text=True)
    found = next(folder.glob("*.whl"), None)
    if done.returncode or found is None:
        raise OSError(f"pip cannot download {peer}: {done.stderr.strip().splitlines()[-1:]}")
    return found


def _leaves(values: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{at}{name}.")
        elif name != "_target_":  # the class that reads the table, not a key
            yield f"{at}{name}", value


def main() -> None:
    for peer, version in VERSIONS.items():
        content = {"version": version, "defaults": released(peer)}
        (HERE / f"{peer}.json").write_text(json.dumps(content, indent=1) + "\n")
