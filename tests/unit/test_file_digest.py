"""The digest of a file: sha256 of the sha256 of its pieces."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from bapo.runtime import file_digest
from bapo.runtime.file_digest import digest_of


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1234])
def test_the_digest_is_that_of_the_digests_of_the_pieces(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_digest, "PIECE_BYTES", 100)
    content = bytes(range(250)) * 5
    path = tmp_path / "file"
    path.write_bytes(content[:size])
    pieces = [content[start : min(start + 100, size)] for start in range(0, size, 100)]
    want = hashlib.sha256(b"".join(hashlib.sha256(piece).digest() for piece in pieces)).hexdigest()
    assert digest_of(path) == want


def test_a_piece_that_moved_changes_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digest, "PIECE_BYTES", 4)
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"aaaabbbbcc")
    second.write_bytes(b"bbbbaaaacc")
    assert digest_of(first) != digest_of(second)
