"""`python -m benchmarks.gpu run [STAGE ...]`: measure everything that needs a GPU; the last lines are the table.

    python -m benchmarks.gpu run                                      all stages, on the GPU if there is one
    python -m benchmarks.gpu run learner weights --budget-s 540       for a machine that ends commands after ten minutes
    python -m benchmarks.gpu run --device cpu --size tiny             the same code with tiny models, in a minute
    python -m benchmarks.gpu pack --have have.txt --out pack          what a machine without network needs (pack.py)
    python -m benchmarks.gpu unpack pack/part-1 pack/part-2 --into .gpu/site

Stages: ceilings, learner, weights, engine, demo, peer. Exit code 1 if an item failed or timed out.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.gpu import pack
from benchmarks.gpu.runner import child, items, line, run_all

STAGES = ("ceilings", "learner", "weights", "engine", "demo", "peer")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, dest="command")
    run = commands.add_parser("run", help="measure")
    run.add_argument("stages", nargs="*", metavar="STAGE", help=f"default: all of {', '.join(STAGES)}")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    run.add_argument("--size", choices=("tiny", "full"), default="full")
    run.add_argument("--only", nargs="+", metavar="ITEM", help="such as update-1.7B")
    run.add_argument("--budget-s", type=float, default=3600.0, help="after this, items are not started")
    run.add_argument("--out", type=Path, default=Path("outputs/gpu-check"))
    item = commands.add_parser("item")
    item.add_argument("name")
    item.add_argument("--device", required=True)
    item.add_argument("--out", type=Path, required=True)
    item.add_argument("--work", type=Path, required=True)
    item.add_argument("--options", type=json.loads, required=True)
    pack.add_commands(commands)
    args = parser.parse_args()
    if args.command == "item":
        return child(args.device, args.name, args.out.resolve(), args.work, **args.options)
    if args.command != "run":
        return pack.main(args)
    unknown = set(args.stages) - set(STAGES)
    if unknown:
        parser.error(f"unknown stage {', '.join(sorted(unknown))}")
    names = [item.name for item in items(args.size)]
    if absent := set(args.only or ()) - set(names):
        parser.error(f"unknown item {', '.join(sorted(absent))} with --size {args.size}; known: {', '.join(names)}")
    chosen = [
        item
        for item in items(args.size)
        if (not args.stages or item.stage in args.stages) and (not args.only or item.name in args.only)
    ]
    if not chosen:
        parser.error(f"none of these items is in {', '.join(args.stages)}")
    records = run_all(chosen, args.device, args.out.resolve(), args.budget_s)
    print(f"\n{args.out / 'result.json'}", *map(line, records), sep="\n")
    return 1 if any(record["status"] in ("failed", "timed out") for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
