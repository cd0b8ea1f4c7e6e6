"""Pack the records of a study into a small file that `bapo compare` reads.

    python -m benchmarks.archive outputs/study-controls docs/studies/controls.tar.xz
    python -m benchmarks.archive outputs/study-chain docs/studies/chain.tar.xz --groups

Per run: its configuration, run.json without what belongs to the machine, evaluations.jsonl, what `bapo compare` reads
of metrics.jsonl (reward, entropy, gradient norm, composition, updates, times) and ledger.json, the responses of each
step. With --groups, instead of the ledger, the records of every group without their times, which the tables of
composition, first visits and unlocked prompts need, and all metrics without off-policy diagnostics.

Runs that did not finish are left out, and named. Two runs of this program write the same bytes.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bapo.runtime.run_directory.files import replace_file
from bapo.runtime.run_directory.layout import RunDirectory
from studies.compare.gather import Measured, read_run
from studies.ledger import LEDGER_FILE, write_ledger

DIGITS = 4
TIMES = ("time", "started_at", "ended_at", "wall_s")
"""Rounded to a tenth of a second."""
GROUP_TIMES = ("sample_s", "grade_s", "claimed_at")
OF_THE_MACHINE = ("pid", "host", "command", "addresses", "processes", "gpus")
DIAGNOSTICS = ("divergences", "bounds")
COMPARED = (
    "step", "policy_version", "reward_mean", "x1", "x2", "x3", "batch_size", "num_updates", "num_bad", "num_high",
    "entropy", "grad_norm", "loss", "num_responses", "step_s", "update_s", "prox_s", "time",
)  # fmt: skip
"""Kept of metrics.jsonl without --groups."""
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 28}]


def rounded(value: Any, key: str = "") -> Any:
    """The same with `DIGITS` significant digits in every float, without `DIAGNOSTICS`."""
    if isinstance(value, Mapping):
        return {name: rounded(part, name) for name, part in value.items() if name not in DIAGNOSTICS}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    if isinstance(value, float):
        return round(value, 1) if key in TIMES else float(f"{value:.{DIGITS}g}")
    return value


def write_records(run: Measured, into: Path, groups: bool) -> None:
    """What is kept of one run."""
    into.mkdir(parents=True)
    shutil.copy(run.directory.config_path, into)
    fields = {key: value for key, value in run.directory.read_run().items() if key not in OF_THE_MACHINE}
    (into / "run.json").write_text(json.dumps(rounded(fields), indent=1))
    rows = run.metrics if groups else [{key: row[key] for key in COMPARED if key in row} for row in run.metrics]
    write_lines(into / "metrics.jsonl", map(rounded, rows))
    write_lines(into / "evaluations.jsonl", run.evaluations)
    if groups:
        write_groups(run.directory.path / "groups", into / "groups")
    else:
        write_ledger(into / LEDGER_FILE, run.ledger)


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))


def write_groups(source: Path, into: Path) -> None:
    """The same tables without times and without compression, which the archive has."""
    into.mkdir()
    for path in source.glob("step-*.parquet"):
        table = pq.read_table(path)
        for name in GROUP_TIMES:
            zeros = pa.array([0.0] * table.num_rows, table.schema.field(name).type)
            table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), zeros)
        pq.write_table(table, into / path.name, compression="none")


def finished_runs(study: Path) -> Iterator[RunDirectory]:
    for path in sorted((study / "runs").glob("*/config.toml")):
        run = RunDirectory.open(path.parent)
        if run.read_run().get("status") == "finished":
            yield run
        else:
            print(f"left out, not finished: {run.name}", file=sys.stderr)


def pack(folder: Path, archive: Path) -> None:
    """Everything below `folder`, in the order of its names, without owners and times."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.USTAR_FORMAT) as entries:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(str(path.relative_to(folder)))
            entry.size = path.stat().st_size
            entries.addfile(entry, io.BytesIO(path.read_bytes()))
    replace_file(archive, lzma.compress(tar.getvalue(), filters=FILTERS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="directory of the study")
    parser.add_argument("archive", type=Path)
    parser.add_argument("--groups", action="store_true", help="keep the records of every group, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("study.toml", "results.jsonl"):
            if (args.study / file).is_file():
                shutil.copy(args.study / file, folder)
        runs = list(finished_runs(args.study))
        for number, run in enumerate(runs, start=1):
            print(f"{number} of {len(runs)}: {run.name}", file=sys.stderr)
            write_records(read_run(run.path), folder / "runs" / run.name, args.groups)
        pack(folder, args.archive)
    print(f"{args.archive}: {len(runs)} runs, {args.archive.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
