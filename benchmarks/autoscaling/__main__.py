"""The autoscaling rule on a step change of the load, with and without its band: figures and a picture.

    python -m benchmarks.autoscaling --out docs/images/autoscaling.png

At 400 s responses become twice as long; at 900 s the learner becomes twice as fast; at 1,400 s both are as at first.
Lengths wander by 10 % all the time.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

from bapo.config.autoscaling import AutoscalingConfig
from benchmarks.autoscaling.simulation import Point, Setting, Simulation, changes_of, shares
from rollout_server.autoscaling import rule
from studies import drawing

CHANGES = ((400.0, 2.0, 1.0), (900.0, 2.0, 0.5), (1400.0, 1.0, 1.0))
SPANS = ((100, 400), (550, 900), (1050, 1400), (1650, 2000))
NAMES = ("as measured", "responses twice as long", "and the learner twice as fast", "as measured again")
SECONDS = 2000.0
DRIFT = 0.1
PERMISSIONS = {
    "fixed": None,
    "rule": AutoscalingConfig(actuator="fleet"),
    "no band": AutoscalingConfig(actuator="fleet", up_cooldown_s=0, down_cooldown_s=0),
}
NO_BAND = {"HYSTERESIS": 0.0, "SMOOTHING_WINDOWS": 1, "MAX_DOWN": 4}
LABELS = {"fixed": "2 workers, fixed", "rule": "the rule", "no band": "no band, average or cooldown"}


def simulate(seed: int) -> dict[str, list[Point]]:
    """One run under each rule."""
    base = {"seconds": SECONDS, "changes": CHANGES, "num_workers": 2, "drift": DRIFT, "seed": seed}
    runs = {}
    for name, permitted in PERMISSIONS.items():
        with patch.multiple(rule, **NO_BAND) if name == "no band" else nullcontext():
            runs[name] = Simulation(setting=Setting(autoscaling=permitted, **base)).run()  # type: ignore[arg-type]
    return runs


def table(runs: dict[str, list[Point]]) -> str:
    """Learner waits / workers idle / ready workers, by span."""
    lines = ["| rule | " + " | ".join(NAMES) + " | changes | steps |", "|---" * (len(SPANS) + 3) + "|"]
    for name, points in runs.items():
        cells = []
        for since, until in SPANS:
            waits, idle, ready = shares(points, since, until)
            cells.append(f"{waits:.0%} / {abs(idle):.0%} / {ready:.1f}")
        lines.append(f"| {LABELS[name]} | {' | '.join(cells)} | {changes_of(points)} | {points[-1].steps:,} |")
    return "\n".join(lines)


def picture(runs: dict[str, list[Point]], path: Path) -> None:
    """Idle shares above, numbers of workers below, for the rule and without its band."""
    with drawing.settings():
        figure, rows = drawing.grid(2, 2, size=(10.0, 5.2))
        for column, name in enumerate(("rule", "no band")):
            points = runs[name]
            seconds = [point.time_s for point in points]
            top, bottom = rows[0][column], rows[1][column]
            top.plot(seconds, _smooth([p.learner_waits for p in points]), color="#3b82f6", label="learner waits")
            top.plot(seconds, _smooth([p.workers_idle for p in points]), color="#f59e0b", label="workers idle")
            top.set_ylim(0, 1)
            bottom.step(seconds, [p.desired for p in points], where="post", color="#ef4444", label="desired")
            bottom.step(seconds, [p.ready for p in points], where="post", color="#22a06b", label="ready")
            bottom.set_ylim(0, 8.5)
            drawing.label(top, "", "share of time (20 s)", LABELS[name])
            drawing.label(bottom, "seconds", "workers")
            for axes in (top, bottom):
                for since, _, _ in CHANGES:
                    axes.axvline(since, color="#7c8694", linestyle=":", linewidth=0.8)
                axes.legend(loc="upper right", fontsize=8)
        figure.savefig(path, dpi=drawing.PNG_DPI, facecolor="white", metadata={"Software": None})


def _smooth(values: list[float], width: int = 20) -> list[float]:
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(width, i + 1) for i in range(len(values))]


def main() -> None:
    """Simulate, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="draw the picture there")
    flags = parser.parse_args()
    runs = simulate(flags.seed)
    print(table(runs))
    if flags.out:
        picture(runs, flags.out)


if __name__ == "__main__":
    main()
