"""The buffer's image has a pyarrow without its largest parts: the rest reads and writes parquet files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow

REPOSITORY = Path(__file__).parents[2]
TRIM = REPOSITORY / "deploy" / "docker" / "trim_pyarrow.sh"
PARQUET = ("test_group_files.py", "test_records.py", "test_token_records.py", "test_dataset_task.py")
CODE = """
import sys, pytest, pyarrow
assert pyarrow.__file__.startswith(sys.argv[1]), pyarrow.__file__
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def size(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_tests_of_parquet_files_pass_with_what_the_image_has_of_pyarrow(tmp_path: Path) -> None:
    folder = tmp_path / "pyarrow"
    shutil.copytree(Path(pyarrow.__file__).parent, folder)
    before = size(folder)
    subprocess.run([str(TRIM), str(folder)], check=True)
    assert size(folder) < 0.7 * before, "it was trimmed for its size"
    files = [str(REPOSITORY / "tests" / "unit" / name) for name in PARQUET]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path), *files],
        cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_the_image_trims_the_pyarrow_that_it_installs() -> None:
    dockerfile = (REPOSITORY / "deploy" / "docker" / "buffer.Dockerfile").read_text()
    assert "./trim_pyarrow.sh" in dockerfile
    assert "COPY deploy/docker/trim_pyarrow.sh" in dockerfile
