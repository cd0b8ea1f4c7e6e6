"""What the disk refuses, and what to do about it: by why it refused."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bapo.errors import StorageError
from bapo.group_files import GroupWriter
from bapo.storage import storing


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOENT, "No such file or directory; make its folder first"),
        (errno.EACCES, "Permission denied; choose a place that this user may write to"),
        (errno.EROFS, "Read-only file system; choose a place that this user may write to"),
        (errno.ENOSPC, "No space left on device; free space or choose another run.root"),
        (errno.EIO, "Input/output error; free space or choose another run.root"),
    ],
)
def test_a_refusal_names_the_file_the_reason_and_the_way_out(number: int, advice: str) -> None:
    with (
        pytest.raises(StorageError, match=f"cannot write /data/groups.parquet: {advice}"),
        storing(Path("/data/groups.parquet")),
    ):
        raise OSError(number, os.strerror(number))


def test_a_folder_that_is_not_there_is_told_as_that(tmp_path: Path) -> None:
    path = tmp_path / "no" / "file"
    with pytest.raises(StorageError, match="make its folder first, or name a file in one"), storing(path):
        path.write_bytes(b"x")


def test_a_full_disk_under_a_file_that_is_no_runs_is_not_answered_by_resuming_one(tmp_path: Path) -> None:
    """/dev/full refuses every write as a full disk does."""
    (tmp_path / ".groups.parquet.tmp").symlink_to("/dev/full")
    words = r"groups\.parquet: .*No space left.*; free space, or name a file on another disk"
    with pytest.raises(StorageError, match=words), GroupWriter(tmp_path / "groups.parquet"):
        pass
    assert list(tmp_path.iterdir()) == []
