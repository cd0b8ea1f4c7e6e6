"""1,000 workers with responses of 32,768 tokens, simulated: how many of them the staleness bound leaves without work.

    python -m benchmarks.autoscaling.large_run

A response decodes at 40 tokens/s (819 s); a worker of 1,500 tokens/s therefore has room for 5 groups of 8. A step
is 20 s of training, a weight update 11.2 s (140 GB at 12.5 GB/s). All three are assumptions; the rules of the run are
ours.
"""

from __future__ import annotations

from benchmarks.autoscaling.simulation import Costs, Setting, Simulation, shares

COSTS = Costs(learner_step_s=20.0, group_s=32_768 / 40, start_s=60.0, sync_s=11.2)
SECONDS = 9000.0


def main() -> None:
    """Print one line per setting."""
    print(
        "| workers | max_steps_ahead | groups/s | step, s | learner waits | workers idle |\n|---|---|---|---|---|---|"
    )
    for max_steps_ahead in (1, 5, 15):
        for workers in (300, 1000):
            setting = Setting(
                costs=COSTS, batch_size=256, v=5, max_steps_ahead=max_steps_ahead, room=5,
                num_workers=workers, most_workers=workers,
                seconds=SECONDS,
            )  # fmt: skip
            points = Simulation(setting=setting).run()
            late = points[len(points) // 2 :]
            steps_per_s = (late[-1].steps - late[0].steps) / (late[-1].time_s - late[0].time_s)
            waits, idle, _ = shares(points, SECONDS / 2, SECONDS)
            rate, step = 256 * steps_per_s, 1 / steps_per_s if steps_per_s else float("inf")
            print(
                f"| {workers:,} | {max_steps_ahead} | {rate:.2f} | {step:.0f} | {waits:.0%} | {idle:.0%} |", flush=True
            )


if __name__ == "__main__":
    main()
