"""Start reading here: the learner is Algorithm 1 (docs/paper.md) without the sampling.

    for t = 1 .. T:
        if t = 1 or v divides t:  alpha <- pi_theta_t             lines 3-5    publish_weights.py
        report progress: step t                                                (the scheduler re-evaluates B_bad)
        D_t = X1 + X2 + X3        from the buffer service         lines 6-17   distributed/shared_buffer.py
        theta_t -> theta_{t+1}    advantages, loss, AdamW         line 18      update/update.py
        checkpoint, if due or if the buffer is filling up                      checkpoint.py, in the background
        commit t: the buffer may delete batches up to the latest checkpoint    line 19
        end here, if held-out measurements have stopped improving                 held_out.py
    alpha <- pi_theta_{T+1}, so that the evaluator can measure the result

The loop is independent of the algorithm: the buffer service decides which groups are in D_t.
Waits for: the acknowledgement of new weights by the workers (the last ones, if workers sample ahead), and the batch.
Unblocked by: the rollout server, and the groups that workers push.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from bapo.config.tree import Config
from bapo.core.codec import unpack_batch
from bapo.core.types import Batch, Progress
from bapo.runtime.metrics.server import Telemetry
from bapo.runtime.run_directory.layout import RunDirectory
from learner.checkpoint import CheckpointWriter
from learner.diagnostics.episode_report import EpisodeReport
from learner.diagnostics.gauges import PromptsSeen, show
from learner.diagnostics.off_policy_alarm import AlarmLog, alarm_of
from learner.diagnostics.response_recorder import ResponseRecorder
from learner.diagnostics.step_report import (
    Float32s,
    Stopwatch,
    TokenValues,
    UpdateReport,
    log_sft_step,
    log_step,
    metrics_row,
    spread,
)
from learner.distributed.shared_buffer import SharedBuffer
from learner.distributed.stopping import StopFlag
from learner.distributed.world import World
from learner.held_out import HeldOut
from learner.model.policy import Policy
from learner.publish_weights import WeightPublisher
from learner.stale_tokens import became_context, masked_fields, with_stale_as_context
from learner.update.update import Updater

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Learner:
    """The components of one run, created in `startup.py`; every rank has one."""

    config: Config
    world: World
    policy: Policy
    updater: Updater
    publisher: WeightPublisher
    checkpoints: CheckpointWriter
    buffer: SharedBuffer
    records: RunDirectory
    telemetry: Telemetry
    stop: StopFlag
    alarms: AlarmLog
    prompts: PromptsSeen
    episodes: EpisodeReport
    held_out: HeldOut
    ended: str = ""
    """Why the run ends before step T, on rank 0; empty: it does not."""
    token_records: ResponseRecorder | None = None
    """Only on rank 0."""
    between_steps: dict[str, float] = field(default_factory=dict)
    """Seconds blocked by checkpoints since the last record; reported in the row of the next step."""

    def run(self, first_step: int) -> None:
        """Train steps first_step .. T, or fewer with `evaluation.patience`, then publish the final weights.

        Raises: Stopped if asked to stop; any BapoError, after which the latest checkpoint is valid.
        """
        step = first_step - 1
        while not self.is_last(step):
            step += 1
            self.run_step(step)
        self.publisher.publish(step + 1)
        with self.stop.waiting():
            self.publisher.wait()
        # Step T + 1 is the end for scheduler and evaluator; the version says which weights are the last.
        self.buffer.report_progress(Progress(step=self.config.run.num_steps + 1, policy_version=step + 1))

    def is_last(self, step: int) -> bool:
        """Whether the run ends after this step. Collective."""
        if self.config.evaluation.patience is not None and self.world.any(bool(self.ended)):
            return True
        return step >= self.config.run.num_steps

    def run_step(self, step: int) -> None:
        """One iteration of the loop."""
        self.buffer.stop_together()
        self.publisher.check()
        watch = Stopwatch()
        with watch.phase("step"):
            if self.config.cadence.is_sync_step(step):
                with watch.phase("sync"), self.stop.waiting():
                    self.publisher.publish(step)
            self.buffer.report_progress(Progress(step=step, policy_version=self.publisher.version))
            with watch.phase("wait_batch"):
                frame = self.next_frame(step)
                sampled = unpack_batch(frame)
                batch = with_stale_as_context(sampled, self.config)
            if self.token_records is not None:
                self.token_records.expect(step)
            self.write_batch(step, frame)
            report = self.updater.run(batch)
        if self.world.leads:
            self.ended = self.held_out.reason_to_end(step)
        is_last = self.is_last(step)
        # Before the checkpoint: a run that resumes after this step must find the step's records.
        self.record(batch, report, watch, sampled)
        if is_last or self.checkpoints.is_due(step):
            self.save_checkpoint(step)
        self.finish_checkpoint(wait=is_last)
        if self.buffer.commit(step, checkpointed=self.checkpoints.newest):
            log.info("step %d early checkpoint: the batches since the last checkpoint are filling the buffer", step)
            if not self.checkpoints.is_pending:
                self.save_checkpoint(step)
            self.finish_checkpoint(wait=True)
            self.buffer.commit(step, checkpointed=self.checkpoints.newest)

    def next_frame(self, step: int) -> bytes | memoryview:
        """D_t as bytes, once it can be assembled. Raises: DeadlineError with the wait reason; Stopped."""

        def on_wait(reason: str) -> None:
            log.info("step %d waiting for its batch: %s", step, reason)
            self.publisher.check()
            # Report again: a Redis that restarted without its last second of writes may not know the step, and the
            # scheduler would request nothing.
            self.buffer.report_progress(Progress(step=step, policy_version=self.publisher.version))

        return self.buffer.batch_frame(step, timeout_s=self.config.learner.batch_timeout_s, on_wait=on_wait)

    def write_batch(self, step: int, frame: bytes | memoryview) -> None:
        """Write the batch before the update, so that a batch that crashes the run can be replayed."""
        if self.world.leads and self.config.checkpoint.keep_batches:
            self.records.write_batch(step, frame)

    def save_checkpoint(self, step: int) -> None:
        """Start to save everything that step + 1 needs."""
        self.finish_checkpoint(wait=True)
        watch = Stopwatch()
        with watch.phase("checkpoint"):
            with self.stop.waiting():
                self.publisher.wait()  # the checkpoint links the file of the workers' weights
            if self.world.leads:
                self.records.make_durable(range(self.checkpoints.newest + 1, step + 1))
            snapshot = self.buffer.snapshot()
            self.world.meet()  # the collectives below have a shorter deadline than the snapshot
            self.checkpoints.save(
                step,
                updater=self.updater,
                publisher=self.publisher,
                buffer_snapshot=snapshot,
            )
        self._blocked_by_checkpoint(watch)

    def finish_checkpoint(self, *, wait: bool) -> None:
        """Complete the checkpoint that is being written, if it is on the disk; with `wait`, once it is."""
        watch = Stopwatch()
        with watch.phase("checkpoint"):
            is_new = self.checkpoints.finish(wait=wait)
        if not is_new:
            return
        self._blocked_by_checkpoint(watch)
        if self.world.leads:
            self.records.forget_batches(self.checkpoints.oldest_kept)
        self.telemetry.gauge("bapo_checkpoint_last_success_timestamp_seconds").set(time.time())
        self.telemetry.gauge("bapo_checkpoint_last_step").set(self.checkpoints.newest)

    def _blocked_by_checkpoint(self, watch: Stopwatch) -> None:
        self.between_steps["checkpoint"] = self.between_steps.get("checkpoint", 0.0) + watch.seconds["checkpoint"]

    def record(self, batch: Batch, report: UpdateReport, watch: Stopwatch, sampled: Batch) -> None:
        """Write the records, metrics and log line of one step; only on rank 0.

        Args:
            sampled: the batch before stale tokens became context: what its episodes did.
        """
        if not self.world.leads:
            return
        alarm = alarm_of(batch.step, report.diagnosis.cells, self.config)
        row = metrics_row(
            batch,
            report,
            policy_version=self.publisher.version,
            config=self.config,
            seconds={**self.between_steps, **watch.seconds},
            alarm=alarm,
            episodes=self.episodes.fields(sampled) | masked_fields(sampled, self.config),
        )
        if self.ended:
            row["ended"] = self.ended
            log.info("the run ends after step %d: %s", batch.step, self.ended)
        self.between_steps = {}
        self.records.write_groups(batch.step, batch.results)
        self.records.append_metrics(row)
        if self.token_records is not None:
            self.token_records.put(sampled, *self._values_among(sampled, batch, report))
        show(self.telemetry, batch, row, report.diagnosis, self.publisher.take_seconds(), self.config)
        self.prompts.count(batch.results)
        (log_step if self.config.sft is None else log_sft_step)(row, self.config.run.num_steps)
        if alarm:
            self.alarms.warn(alarm)

    def _values_among(
        self, sampled: Batch, batch: Batch, report: UpdateReport
    ) -> tuple[TokenValues | None, Float32s | None]:
        """Values and advantages of the trained tokens among those that were sampled."""
        values, advantage_M = report.tokens, report.advantage_M
        if batch is sampled:
            return values, advantage_M
        known_M = ~became_context(sampled, self.config)
        return (
            None if values is None else values.spread(known_M),
            None if advantage_M is None else spread(advantage_M, known_M),
        )
