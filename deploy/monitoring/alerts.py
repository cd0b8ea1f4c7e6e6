"""All alerts, most severe first. Each has a case that fires it and a near miss that does not."""

from __future__ import annotations

from deploy.monitoring.alert import Alert, Case, Clock

MINUTE, HOUR = 60.0, 3600.0
R = '{run="r"}'
STEPS_S = 'bapo_learner_phase_seconds_%s{run="%s",phase="step"}'


def newest(name: str) -> str:
    return f"max by (run) ({name})"


def finished(t: Clock, span_s: float) -> str:
    """Runs whose last step was trained, according to one instance of the buffer service: the learner exits too soon
    after that step to be scraped. One that was replaced before does not know that a run ended early."""
    return (
        f"max by (run) (max_over_time(bapo_run_committed_steps[{t.span(span_s)}]) "
        f">= last_over_time(bapo_run_target_steps[{t.span(span_s)}]))"
    )


def steps_of_a_second(minutes: int) -> dict[str, str]:
    """Six hundred steps of one second each, all before the series stalls."""
    return {STEPS_S % (what, "r"): f"0+60x10 600x{minutes}" for what in ("sum", "count")}


ALERTS = (
    Alert(
        name="ProcessDown", severity="critical", for_s=MINUTE,
        summary="Prometheus cannot scrape a process of the run.",
        runbook="Read RUN/logs/PROCESS.log and `bapo status RUN`; the launcher restarts a crashed process; kill "
        "a process that hangs.",
        expr=lambda t: 'up{process=~"buffer_service|rollout_server|learner|scheduler|evaluator"} == 0',
        fires=Case({'up{run="r",process="learner"}': "1 1 0x5"}, 5, {"run": "r", "process": "learner"}),
        quiet=Case({'up{run="r",process="learner"}': "1 1 0 1x5"}, 5),
    ),
    Alert(
        name="ProcessGone", severity="critical", for_s=2 * MINUTE,
        summary="A process that ran within the last hour is missing while others run, and the run is not finished.",
        runbook="It exited, or its container, pod or host did: `docker compose ps -a` or `kubectl get pods` shows its "
        "exit code, RUN/logs or the container's log its last lines; see docs/reliability.md for how each one resumes.",
        # With DNS or process-based service discovery, a process that has exited is no longer a target.
        # A run without any process left was stopped.
        expr=lambda t: f"max by (run, process) (last_over_time(bapo_build_info[{t.span(HOUR)}])) "
        "unless on (run, process) bapo_build_info "
        f"and on (run) max by (run) (last_over_time(bapo_build_info[{t.span(MINUTE)}])) "
        f"unless on (run) {finished(t, HOUR)}",
        fires=Case({
            'bapo_build_info{run="r",process="learner"}': "1x5 _x20",
            'bapo_build_info{run="r",process="evaluator"}': "1x25",
            f"bapo_run_committed_steps{R}": "99x25", f"bapo_run_target_steps{R}": "100x25",
        }, 15, {"run": "r", "process": "learner"}),
        quiet=Case({
            'bapo_build_info{run="r",process="learner"}': "1x5 _x20",
            'bapo_build_info{run="r",process="evaluator"}': "1x25", f"bapo_learner_step{R}": "99x5 _x20",
            f"bapo_run_committed_steps{R}": "100x25", f"bapo_run_target_steps{R}": "100x25",
            'bapo_build_info{run="stopped",process="learner"}': "1x5 _x20",
            'bapo_run_committed_steps{run="stopped"}': "7x5 _x20",
            'bapo_run_target_steps{run="stopped"}': "100x5 _x20",
            # Ended by evaluation.patience, after its buffer service was replaced.
            'bapo_build_info{run="early",process="learner"}': "1x5 _x20",
            'bapo_build_info{run="early",process="evaluator"}': "1x25",
            'bapo_run_committed_steps{run="early",instance="1"}': "20x3 _x22",
            'bapo_run_target_steps{run="early",instance="1"}': "100x3 _x22",
            'bapo_run_committed_steps{run="early",instance="2"}': "_x4 40x21",
            'bapo_run_target_steps{run="early",instance="2"}': "_x4 40x21",
        }, 15),
    ),
    Alert(
        name="RedisDown", severity="critical", for_s=30.0,
        summary="The buffer service cannot reach Redis: every request fails.",
        runbook="Read RUN/logs/redis.log, or check the Redis of buffer.redis_url. Once it is back, everything "
        "acknowledged is restored and the run continues.",
        expr=lambda t: "min by (run) (bapo_buffer_redis_up) == 0",
        fires=Case({f"bapo_buffer_redis_up{R}": "1 0x4"}, 3),
        quiet=Case({f"bapo_buffer_redis_up{R}": "1x4"}, 3),
    ),
    Alert(
        name="RedisNotPersistent", severity="critical", for_s=MINUTE,
        summary="Redis has no append-only file, or cannot write to it: acknowledged data would not survive a crash.",
        runbook="Run `CONFIG SET appendonly yes` on that Redis, or free space on its disk; until then a crash of Redis "
        "loses everything since the last checkpoint (`bapo train --resume RUN`).",
        expr=lambda t: "min by (run) (bapo_buffer_redis_persistent) == 0",
        fires=Case({f"bapo_buffer_redis_persistent{R}": "1 0x4"}, 3),
        quiet=Case({f"bapo_buffer_redis_persistent{R}": "1x4"}, 3),
    ),
    Alert(
        name="LearnerStuck", severity="critical", for_s=30.0,
        summary="The last step ended more than five mean step times ago, and more than a minute ago.",
        runbook="The learner's log says what it is waiting for (if its batch: see the worker rows of BAPO / System); "
        "kill a hung learner: it resumes from its checkpoint.",
        # last_over_time: also fires when a stopped process no longer responds to scrapes. The mean is over all steps of
        # the process, because a learner that hangs adds none to a window.
        expr=lambda t: (
            f"(time() - max by (run) (last_over_time(bapo_learner_last_step_timestamp_seconds[{t.span(5 * MINUTE)}])) "
            "> on (run) clamp_min(5 * max by (run) "
            f'(last_over_time(bapo_learner_phase_seconds_sum{{phase="step"}}[{t.span(5 * MINUTE)}]) '
            f'/ last_over_time(bapo_learner_phase_seconds_count{{phase="step"}}[{t.span(5 * MINUTE)}])), '
            f"{t.seconds(MINUTE)})) unless on (run) {finished(t, 5 * MINUTE)}"
        ),
        fires=Case({
            f"bapo_learner_last_step_timestamp_seconds{R}": "0+60x10 600x99",
            f"bapo_run_committed_steps{R}": "0+1x10 10x99", f"bapo_run_target_steps{R}": "100x109",
            **steps_of_a_second(99),
        }, 100),
        quiet=Case({
            f"bapo_learner_last_step_timestamp_seconds{R}": "0+60x10 600x99", f"bapo_learner_step{R}": "89+1x10 99x99",
            f"bapo_run_committed_steps{R}": "90+1x10 100x99", f"bapo_run_target_steps{R}": "100x109",
            **steps_of_a_second(99),
            # 55 minutes after the end of a step of 20.
            'bapo_learner_last_step_timestamp_seconds{run="slow"}': "_x19 1200x89",
            'bapo_run_committed_steps{run="slow"}': "0x19 1x89", 'bapo_run_target_steps{run="slow"}': "100x109",
            STEPS_S % ("sum", "slow"): "0x19 1200x89", STEPS_S % ("count", "slow"): "0x19 1x89",
        }, 75),
    ),
    Alert(
        name="RunStalled", severity="critical",
        summary="The run has made no progress for five minutes: no request, no group, no batch, no step.",
        runbook="The scheduler's log says what each process is waiting for; docs/architecture.md lists what unblocks "
        "it.",
        expr=lambda t: f"max by (run) (bapo_stalled_seconds) > {t.seconds(5 * MINUTE)}",
        fires=Case({f"bapo_stalled_seconds{R}": "0+60x10"}, 7),
        quiet=Case({f"bapo_stalled_seconds{R}": "0+60x4 0x6"}, 7),
    ),
    Alert(
        name="NoWorkerReady", severity="critical", for_s=5 * MINUTE,
        summary="No rollout worker is sampling.",
        runbook="RUN/logs/worker-N.log and rollout_server.log show why workers do not start; `bapo doctor` checks the "
        "machine.",
        expr=lambda t: 'sum by (run) (bapo_rollout_workers{state="ready"}) == 0',
        fires=Case({'bapo_rollout_workers{run="r",state="ready"}': "1 0x10"}, 8),
        quiet=Case({'bapo_rollout_workers{run="r",state="ready"}': "1 0x3 1x10"}, 8),
    ),
    Alert(
        name="StalenessAboveBound", severity="critical",
        summary="A fresh group older than v - 1 + max_steps_ahead steps was trained: the step contract is violated.",
        runbook="Keep the run directory, stop the run and report it with RUN/groups of that step; the buffer service "
        "checks this at assembly, so two versions of the code may be running.",
        expr=lambda t: 'max by (run) (bapo_learner_staleness_max_steps{origin="x1"}) '
        '> on (run) max by (run) (bapo_cadence_steps{name="max_staleness"})',
        fires=Case({
            'bapo_learner_staleness_max_steps{run="r",origin="x1"}': "6x5",
            'bapo_cadence_steps{run="r",name="max_staleness"}': "5x5",
        }, 3),
        quiet=Case({
            'bapo_learner_staleness_max_steps{run="r",origin="x3"}': "6x5",
            'bapo_learner_staleness_max_steps{run="r",origin="x1"}': "5x5",
            'bapo_cadence_steps{run="r",name="max_staleness"}': "5x5",
        }, 3),
    ),
    Alert(
        name="WorkerVersionLag", severity="warning", for_s=2 * MINUTE,
        summary="A sampling worker is more than v + 2 versions behind the learner.",
        runbook="Its groups will be dropped as stale: look for its failed update in rollout_server.log; a "
        "killed worker is replaced by one with the latest weights.",
        expr=lambda t: "max by (run) (bapo_learner_policy_version) - on (run) group_right () max by (run, worker) "
        "(bapo_rollout_policy_version and on (run, worker) bapo_rollout_worker_up == 1) "
        '> on (run) group_left () (max by (run) (bapo_cadence_steps{name="v"}) + 2)',
        fires=Case({
            f"bapo_learner_policy_version{R}": "20x9", 'bapo_rollout_policy_version{run="r",worker="worker-1"}': "12x9",
            'bapo_rollout_worker_up{run="r",worker="worker-1"}': "1x9", 'bapo_cadence_steps{run="r",name="v"}': "5x9",
        }, 5, {"run": "r", "worker": "worker-1"}),
        quiet=Case({
            f"bapo_learner_policy_version{R}": "20x9", 'bapo_rollout_policy_version{run="r",worker="worker-1"}': "13x9",
            'bapo_rollout_policy_version{run="r",worker="worker-2"}': "0x9",
            'bapo_rollout_worker_up{run="r",worker="worker-1"}': "1x9",
            'bapo_rollout_worker_up{run="r",worker="worker-2"}': "0x9", 'bapo_cadence_steps{run="r",name="v"}': "5x9",
        }, 5),
    ),
    Alert(
        name="VerifierErrors", severity="warning",
        summary="More than 1 % of the responses of the last ten minutes were not graded: the reward function raised, "
        "timed out or was killed.",
        runbook="RUN/logs/worker-N.log has each failure with its prompt; a failed group is resampled, "
        "never counted as incorrect (task.grading_timeout_s, your reward function).",
        expr=lambda t: "sum by (run, task) (increase(bapo_verifier_results_total"
        f'{{outcome=~"error|timeout|killed"}}[{t.span(10 * MINUTE)}])) '
        f"/ sum by (run, task) (increase(bapo_verifier_results_total[{t.span(10 * MINUTE)}])) > 0.01",
        fires=Case({
            'bapo_verifier_results_total{run="r",task="t",outcome="wrong"}': "0+98x15",
            'bapo_verifier_results_total{run="r",task="t",outcome="timeout"}': "0+2x15",
        }, 12, {"run": "r", "task": "t"}),
        quiet=Case({
            'bapo_verifier_results_total{run="r",task="t",outcome="wrong"}': "0+998x15",
            'bapo_verifier_results_total{run="r",task="t",outcome="timeout"}': "0+2x15",
        }, 12),
    ),
    Alert(
        name="SyncFailures", severity="warning",
        summary="A worker failed to load a weight update in the last 15 minutes.",
        runbook="It was replaced; several failures in a row mean that the file, its digest or the canary is wrong: "
        "rollout_server.log says which.",
        expr=lambda t: f"sum by (run) (increase(bapo_sync_failures_total[{t.span(15 * MINUTE)}])) > 0",
        fires=Case({f"bapo_sync_failures_total{R}": "0x5 1x10"}, 8),
        quiet=Case({f"bapo_sync_failures_total{R}": "1x20"}, 18),
    ),
    Alert(
        name="RedisMemory", severity="warning", for_s=5 * MINUTE,
        summary="Redis uses more than 80 % of its maxmemory; at 95 % fresh groups are rejected.",
        runbook="Write checkpoints more often (checkpoint.every), limit the fresh groups (buffer.max_fresh_groups), "
        "or raise buffer.max_memory_mb.",
        expr=lambda t: f"{newest('bapo_buffer_redis_memory_bytes')} / on (run) "
        f"{newest('bapo_buffer_redis_memory_limit_bytes')} > 0.8",
        fires=Case({
            f"bapo_buffer_redis_memory_bytes{R}": "81x9", f"bapo_buffer_redis_memory_limit_bytes{R}": "100x9",
        }, 8),
        quiet=Case({
            f"bapo_buffer_redis_memory_bytes{R}": "81x9", f"bapo_buffer_redis_memory_limit_bytes{R}": "_x9",
        }, 8),
    ),
    Alert(
        name="CheckpointOld", severity="warning", for_s=MINUTE,
        summary="The newest checkpoint is more than two intervals old, in steps.",
        runbook="learner.log says why it was not written (a full disk, for example); a crash now loses these steps.",
        expr=lambda t: f"{newest('bapo_learner_step')} - on (run) {newest('bapo_checkpoint_last_step')} "
        f"> on (run) 2 * {newest('bapo_checkpoint_interval_steps')}",
        fires=Case({
            f"bapo_learner_step{R}": "45x5", f"bapo_checkpoint_last_step{R}": "20x5",
            f"bapo_checkpoint_interval_steps{R}": "10x5",
        }, 3),
        quiet=Case({
            f"bapo_learner_step{R}": "40x5", f"bapo_checkpoint_last_step{R}": "20x5",
            f"bapo_checkpoint_interval_steps{R}": "10x5",
        }, 3),
    ),
    Alert(
        name="DiskLow", severity="warning", for_s=MINUTE,
        summary="Less than 5 % of the run directory's disk is free.",
        runbook="Remove old runs, or checkpoints (checkpoint.keep_last); a full disk stops the run; resume it with "
        "`bapo train --resume RUN` once there is space.",
        expr=lambda t: f"{newest('bapo_run_disk_free_bytes')} / on (run) {newest('bapo_run_disk_size_bytes')} < 0.05",
        fires=Case({f"bapo_run_disk_free_bytes{R}": "4x5", f"bapo_run_disk_size_bytes{R}": "100x5"}, 3),
        quiet=Case({f"bapo_run_disk_free_bytes{R}": "6x5", f"bapo_run_disk_size_bytes{R}": "100x5"}, 3),
    ),
    Alert(
        name="AllRewardsZero", severity="warning", for_s=20 * MINUTE,
        summary="No fresh response has been correct for twenty minutes: there is no learning signal.",
        runbook="Read responses (`bapo view RUN`) and test the reward function: wrong answer format, a length limit "
        "that truncates everything, prompts that are too hard, or a collapsed policy.",
        expr=lambda t: f"{newest('bapo_reward_global_mean_ratio')} <= 0",
        fires=Case({f"bapo_reward_global_mean_ratio{R}": "0x30"}, 25),
        quiet=Case({f"bapo_reward_global_mean_ratio{R}": "0x15 0.01 0x15"}, 25),
    ),
    Alert(
        name="AllRewardsOne", severity="warning", for_s=20 * MINUTE,
        summary="Every fresh response has been correct for twenty minutes.",
        runbook="The task is solved, or the reward function accepts anything: read responses, then use harder data.",
        expr=lambda t: f"{newest('bapo_reward_global_mean_ratio')} >= 1",
        fires=Case({f"bapo_reward_global_mean_ratio{R}": "1x30"}, 25),
        quiet=Case({f"bapo_reward_global_mean_ratio{R}": "0.99x30"}, 25),
    ),
    Alert(
        name="ZeroVarianceShare", severity="warning", for_s=5 * MINUTE,
        summary="More than 90 % of the fresh groups have zero variance: all their rewards are equal.",
        runbook="Choose prompts of medium difficulty (selector in docs/methods.md), or a larger group_size.",
        expr=lambda t: "sum by (run) (increase(bapo_batch_fresh_groups_total"
        f'{{rewards="equal"}}[{t.span(15 * MINUTE)}])) / on (run) '
        f"sum by (run) (increase(bapo_batch_fresh_groups_total[{t.span(15 * MINUTE)}])) > 0.9",
        fires=Case({
            'bapo_batch_fresh_groups_total{run="r",rewards="equal"}': "0+91x30",
            'bapo_batch_fresh_groups_total{run="r",rewards="differ"}': "0+9x30",
        }, 25),
        quiet=Case({
            'bapo_batch_fresh_groups_total{run="r",rewards="equal"}': "0+89x30",
            'bapo_batch_fresh_groups_total{run="r",rewards="differ"}': "0+11x30",
        }, 25),
    ),
    Alert(
        name="BatchUnderfilled", severity="warning",
        summary="No batch of the last 30 minutes (at least ten steps) was more than 30 % full.",
        runbook="See Difficulty in BAPO / Run: too few prompts are informative; change the data or the selector, "
        "widen c2_range and c3_range where a window decides (the page's thresholds), or use a smaller batch_size.",
        expr=lambda t: f"max by (run) (max_over_time(bapo_batch_fill_ratio[{t.span(30 * MINUTE)}])) < 0.3 "
        f"and on (run) sum by (run) (increase(bapo_learner_steps_total[{t.span(30 * MINUTE)}])) >= 10",
        fires=Case({f"bapo_batch_fill_ratio{R}": "0.2x40", f"bapo_learner_steps_total{R}": "0+1x40"}, 35),
        quiet=Case({f"bapo_batch_fill_ratio{R}": "0.2x20 0.4 0.2x20", f"bapo_learner_steps_total{R}": "0+1x40"}, 35),
    ),
    Alert(
        name="BadBufferNeverPromotes", severity="warning",
        summary="Five rounds of re-evaluation in an hour, and no hard prompt improved.",
        runbook="B_bad contains prompts that the model cannot solve: the page lists them; a smaller max_reevaluated "
        "reduces their cost, and `bapo buffer` can drop them.",
        expr=lambda t: "sum by (run) (increase(bapo_reevaluation_prompts_total"
        f'{{outcome=~"improved|no_room|solved"}}[{t.span(HOUR)}])) == 0 '
        f'and on (run) sum by (run) (increase(bapo_reevaluation_rounds_total{{outcome="asked"}}[{t.span(HOUR)}])) >= 5',
        fires=Case({
            'bapo_reevaluation_prompts_total{run="r",outcome="improved"}': "3x70",
            'bapo_reevaluation_prompts_total{run="r",outcome="still_hard"}': "0+5x70",
            'bapo_reevaluation_rounds_total{run="r",outcome="asked"}': "0+1x70",
        }, 65),
        quiet=Case({
            'bapo_reevaluation_prompts_total{run="r",outcome="improved"}': "3x40 4x30",
            'bapo_reevaluation_rounds_total{run="r",outcome="asked"}': "0+1x70",
            'bapo_reevaluation_prompts_total{run="full",outcome="improved"}': "3x70",
            'bapo_reevaluation_prompts_total{run="full",outcome="no_room"}': "3x40 4x30",
            'bapo_reevaluation_rounds_total{run="full",outcome="asked"}': "0+1x70",
            'bapo_reevaluation_prompts_total{run="solved",outcome="improved"}': "3x70",
            'bapo_reevaluation_prompts_total{run="solved",outcome="solved"}': "3x40 4x30",
            'bapo_reevaluation_rounds_total{run="solved",outcome="asked"}': "0+1x70",
        }, 65),
    ),
    Alert(
        name="BinStarved", severity="warning", for_s=20 * MINUTE,
        summary="The bins that X3 reuses have been empty for twenty minutes: X3 no longer contributes groups.",
        runbook="With a window (c2, c3 in Thresholds and r_tot of BAPO / Run) no fresh group falls into it: compare it "
        "with the bins next to it, and widen c2_range and c3_range. Without one, no fresh group has differing rewards.",
        expr=lambda t: 'max by (run) (bapo_buffer_groups{table="high"}) == 0 '
        'and on (run) sum by (run) (bapo_batch_trained_groups_total{origin="x3"}) > 0',
        fires=Case({
            'bapo_buffer_groups{run="r",table="high"}': "5x3 0x30",
            'bapo_batch_trained_groups_total{run="r",origin="x3"}': "7x40",
        }, 28),
        quiet=Case({
            'bapo_buffer_groups{run="r",table="high"}': "0x40",
            'bapo_batch_trained_groups_total{run="r",origin="x3"}': "0x40",
        }, 28),
    ),
    Alert(
        name="GradNormSpike", severity="warning",
        summary="The gradient norm is ten times its median of the last hour.",
        runbook="learner.grad_clip bounds the step; if it repeats, inspect the batch (`bapo replay RUN --step N`) "
        "and lower learner.lr.",
        expr=lambda t: "max by (run) (bapo_learner_grad_norm) > on (run) "
        f"10 * max by (run) (quantile_over_time(0.5, bapo_learner_grad_norm[{t.span(HOUR)}]))",
        fires=Case({f"bapo_learner_grad_norm{R}": "1x30 11x3"}, 31),
        quiet=Case({f"bapo_learner_grad_norm{R}": "1x30 9x3"}, 31),
    ),
    Alert(
        name="EntropyCollapse", severity="warning", for_s=5 * MINUTE,
        summary="The entropy has fallen below a tenth of its highest value of the last six hours.",
        runbook="Responses are losing diversity: try a lower learner.lr, loss.entropy_coef or loss.kl_coef > 0, or an "
        "earlier checkpoint.",
        expr=lambda t: "max by (run) (bapo_learner_entropy_nats) < on (run) "
        f"0.1 * max by (run) (max_over_time(bapo_learner_entropy_nats[{t.span(6 * HOUR)}]))",
        fires=Case({f"bapo_learner_entropy_nats{R}": "1x30 0.09x20"}, 40),
        quiet=Case({f"bapo_learner_entropy_nats{R}": "1x30 0.11x20"}, 40),
    ),
    Alert(
        name="BoundNegative", severity="info", for_s=10 * MINUTE,
        summary="The bound of theorem 3.2 is vacuous for this subset (at most 0).",
        runbook="Common, and not a problem by itself; docs/monitoring.md says which values to read and what makes "
        "them smaller (v, max_steps_ahead, S, lr).",
        expr=lambda t: 'max by (run, origin) (bapo_learner_improvement_bound{form="paper"}) <= 0',
        fires=Case({'bapo_learner_improvement_bound{run="r",origin="x3",form="paper"}': "-1x20"}, 15,
                   {"run": "r", "origin": "x3"}),
        quiet=Case({'bapo_learner_improvement_bound{run="r",origin="x3",form="paper"}': "0.1x20"}, 15),
    ),
)  # fmt: skip
