"""`bapo plan-capacity`: what so many workers, parameters and tokens ask of buffer, Redis, network and weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from bapo.capacity import Capacity, Plan, capacity
from bapo.errors import ConfigError


def plan_capacity(
    workers: Annotated[int, typer.Option("--workers", help="Rollout workers.")] = 1000,
    tokens_per_s: Annotated[float, typer.Option("--tokens-per-s", help="Response tokens/s of one worker.")] = 1500.0,
    decode_tokens_per_s: Annotated[float, typer.Option("--decode-tokens-per-s", help="Of one response.")] = 40.0,
    parameters: Annotated[float, typer.Option("--parameters", help="Of the model: 70e9.")] = 70e9,
    response_tokens: Annotated[int, typer.Option("--response-tokens", help="Mean length of a response.")] = 32_768,
    group_size: Annotated[int, typer.Option("--group-size", help="G.")] = 8,
    batch_size: Annotated[int, typer.Option("--batch-size", help="B, in groups.")] = 256,
    v: Annotated[int, typer.Option("--v", help="Steps per weight update.")] = 5,
    slack: Annotated[int, typer.Option("--slack", help="Further steps that workers run ahead.")] = 1,
    workers_per_host: Annotated[int, typer.Option("--workers-per-host", help="They share a copy of weights.")] = 1,
    gbit: Annotated[float, typer.Option("--gbit", help="Network of a host in Gbit/s.")] = 100.0,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """What a large run needs, from unit costs measured on two CPU cores (docs/scale.md has the sums).

    Example:  bapo plan-capacity --workers 1000 --parameters 70e9 --response-tokens 32768
              bapo plan-capacity --workers 64 --parameters 7e9 --response-tokens 4096 --workers-per-host 8
    """
    try:
        plan = Plan(
            workers=workers,
            tokens_per_s=tokens_per_s,
            decode_tokens_per_s=decode_tokens_per_s,
            parameters=parameters,
            response_tokens=response_tokens,
            group_size=group_size,
            batch_size=batch_size,
            v=v,
            slack=slack,
            workers_per_host=workers_per_host,
            host_bytes_per_s=gbit * 1e9 / 8,
        )
    except ValueError as error:
        raise ConfigError(f"bapo plan-capacity: {error}") from error
    found = capacity(plan)
    typer.echo(json.dumps(asdict(found), indent=2) if as_json else table(found))


def table(found: Capacity) -> str:
    """For people."""
    rows = [
        ("workers make", f"{found.groups_per_s:,.2f} groups/s of {found.group_bytes / 1e6:,.2f} MB"),
        ("a step takes", f"{found.step_s:,.1f} s; new weights every {found.sync_period_s:,.0f} s"),
        ("groups in flight", f"{found.in_flight_needed:,.0f}, each for {found.group_s:,.0f} s"),
        ("groups, in and out", f"{found.in_bytes_per_s / 1e6:,.1f} MB/s each way"),
        ("Redis memory", f"{found.redis_bytes / 1e9:,.1f} GB for {found.resident_groups:,} groups; plan twice that"),
        ("buffer services", f"{found.replicas} (one would be loaded to {found.service_load:.0%})"),
        ("Redis, CPU", f"{found.redis_load:.0%} of one core"),
        ("weights", f"{found.weight_file_bytes / 1e9:,.0f} GB to {found.hosts:,} hosts"),
    ]
    lines = [f"{name:<20} {text}" for name, text in rows]
    lines += ["", f"{'demand on one of it':<52} {'load':>9}"]
    for line in sorted(found.lines, key=lambda line: -line.load):
        lines.append(f"{line.name:<52} {line.load:>8,.2f}x  {line.demand}; {line.remedy}")
    lines += ["", f"first bottleneck: {found.bottleneck.name}"]
    return "\n".join(lines)
