"""The folder of a Ray node: no killed rollout server leaves one behind for good."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_server.fleet.ray_node import RayFolder

MAKER = """
import sys
from pathlib import Path
from rollout_server.fleet.ray_node import RayFolder
folder = RayFolder(Path(sys.argv[1]))
(folder.path / "session").mkdir()
print(folder.path, flush=True)
sys.stdin.read()
"""


def age(folder: Path) -> None:
    os.utime(folder, (1_000_000_000, 1_000_000_000))


@pytest.mark.parametrize("is_killed", [True, False])
def test_the_folder_of_a_killed_process_goes_with_the_next_one_and_that_of_a_living_one_stays(
    tmp_path: Path, is_killed: bool
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MAKER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        made = Path(maker.stdout.readline().strip())
        age(made)
        if is_killed:
            maker.kill()
            maker.wait()
        RayFolder(tmp_path).remove()
        assert (made / "session").exists() is not is_killed
        maker.kill()
    assert list(tmp_path.iterdir()) == ([] if is_killed else [made])


def test_what_is_young_or_has_no_lock_or_lies_elsewhere_is_left_alone(tmp_path: Path) -> None:
    """Young: its maker may be about to lock it. A link: whoever made it would choose what is removed."""
    parent, elsewhere = tmp_path / "tmp", tmp_path / "elsewhere"
    for folder in (parent / "bapo-ray-young", parent / "bapo-ray-earlier", elsewhere):
        folder.mkdir(parents=True)
    (parent / "bapo-ray-young" / "bapo.lock").touch()
    (elsewhere / "bapo.lock").touch()
    age(parent / "bapo-ray-earlier")
    age(elsewhere)
    link = parent / "bapo-ray-link"
    link.symlink_to(elsewhere)
    os.utime(link, (1_000_000_000, 1_000_000_000), follow_symlinks=False)
    RayFolder(parent).remove()
    assert {path.name for path in parent.iterdir()} == {"bapo-ray-young", "bapo-ray-earlier", "bapo-ray-link"}
    assert (elsewhere / "bapo.lock").exists()
