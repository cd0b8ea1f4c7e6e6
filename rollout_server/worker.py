"""One worker: claims requests, samples G responses to each, grades them, pushes the groups.

    buffer --claim--> Leases --submit--> RolloutRunner --> Delivery (grade, pack) --push--> buffer
                                         |  ^              next: delivery.py
                              Completion v  | Completed    next: rollouts/base.py
                                   Sampler (owns the engine)

    LOADING --load--> LOADED --begin(newest weights)--> SAMPLING --drain--> DRAINING --> STOPPED
       any state --engine, grader or buffer failed--> FAILED: the fleet replaces the worker

Fresh, re-evaluation and evaluation requests take the same path. The fleet runs a worker in a Ray actor or in threads.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil

from bapo.config.tree import Config
from bapo.core.errors import BapoError, GradingError, UnavailableError, WeightsAbsentError
from bapo.core.types import Canary, Prompt, RolloutRequest, WeightTransfer, WeightUpdate
from bapo.runtime.vision import ReadImage
from bapo.tasks.base import splits_of
from bapo.tasks.grading.pool import GraderPool
from bapo.tasks.registry import task_of
from bapo.transport.buffer_client import BufferClient
from bapo.transport.teacher_client import TeacherClient
from rollout_server.calls import Calls
from rollout_server.claims import Claims
from rollout_server.delivery import NUM_GRADERS, Delivery
from rollout_server.engines.base import INITIAL_VERSION, Completed, Completion, Engine
from rollout_server.images import ImageSource
from rollout_server.leases import Leases
from rollout_server.rollouts.base import Rollout, RolloutProgram
from rollout_server.rollouts.expert import WithExpert
from rollout_server.rollouts.runner import RolloutRunner
from rollout_server.rollouts.segment_files import SegmentFiles
from rollout_server.rollouts.segmented import Segmented
from rollout_server.rollouts.single import Single
from rollout_server.rollouts.taught import WithTeacher
from rollout_server.sampler import Sampler
from rollout_server.tokenization import Tokenization
from rollout_server.weights.canary import Agreement
from rollout_server.weights.host_cache import WeightCache
from rollout_server.weights.receive import load_verified
from rollout_server.worker_report import Rate, WorkerCounts, WorkerReport

log = logging.getLogger(__name__)

NUM_CHECKED_PROMPTS = 256


class Worker:
    """Thread-safe; the methods are called in the order of the states above."""

    def __init__(
        self,
        *,
        worker_id: str,
        config: Config,
        buffer: BufferClient,
        make_engine: Callable[[Config], Engine],
        make_tokenization: Callable[[Config], Tokenization],
        make_grader: Callable[[Config], GraderPool],
        token: str | None = None,
        segments: Path | None = None,
        images: ImageSource | None = None,
    ) -> None:
        """
        Args:
            token: API token for the rollout server; None: the process's own.
            segments: directory of the partial rollouts (`rollout.generation_budget`); None: kept in memory only.
            images: copies the images of a prompt to this host, where the prompt is encoded.
        """
        self.worker_id = worker_id
        self._config = config
        self._buffer = buffer
        self._make_tokenization = make_tokenization
        self._make_grader = make_grader
        self._weights = WeightCache(config, token)
        self._leases = Leases()
        self._counts = WorkerCounts()
        self._rate = Rate()
        self._images = images
        self._segments = SegmentFiles(segments)
        self._sampler = Sampler(lambda: make_engine(config))
        self._sampler.ended.add_done_callback(self._engine_ended)
        self.calls = Calls(self._sampler, self._called)
        """Of agents, whose requests others claim."""
        self._grader: GraderPool | None = None
        self._delivery: Delivery | None = None
        self._rollouts: RolloutRunner | None = None
        self._taught: WithTeacher | None = None
        self._stopping = threading.Event()
        self._claims = Claims(
            worker_id,
            buffer,
            self._leases,
            limit=lambda: config.rollout.max_groups_in_flight,
            lease_s=config.buffer.lease_s,
            on_request=self._submit,
            on_lost=self._lose,
            on_death=self.died,
        )
        self._state = "loading"
        self._error: BaseException | None = None
        self._update_digest = ""
        self._agreement = Agreement()
        self._transferred: Canary | None = None
        """Of the weights that the learner has sent; their file, with the same canary, is not loaded."""

    def load(self) -> None:
        """Create the engine and the graders, and check prompts against the tokenizer. Takes up to a minute.

        Raises: ConfigError for an invalid setting; any error of the engine.
        """
        try:
            self._grader = self._make_grader(self._config)
            self._sampler.start()
            tokenization = self._make_tokenization(self._config)
            tokenization.check_prompts(*_prompts_to_check(self._config))
        except BaseException as error:  # re-raised; the report must include any error
            self.died(error)
            raise
        self._delivery = Delivery(
            worker_id=self.worker_id,
            buffer=self._buffer,
            grader=self._grader,
            leases=self._leases,
            counts=self._counts,
            num_graders=NUM_GRADERS,
            on_death=self.died,
            on_end=self._segments.remove,
        )
        self._rollouts = RolloutRunner(
            self._program(tokenization, self._grader),
            tokenization,
            on_rollout=self._sampled,
            on_failure=self._refuse,
        )
        self._state = "loaded"

    def begin(self, update: WeightUpdate | None) -> None:
        """Load the newest weights, if any were published, then start claiming. Raises: as `update_weights`."""
        if update is not None:
            self.update_weights(update)
        if self._delivery is None or self._rollouts is None or self._state != "loaded":
            raise UnavailableError(f"{self.worker_id} is {self._state}, must be loaded to begin")
        self._state = "sampling"
        self._delivery.start()
        self._rollouts.start()
        if self._config.agents is not None:  # what is asked for comes by `calls`
            return
        # With `model.adapter`, the weights of `model.path` are not theta_1.
        self._claims.start(INITIAL_VERSION if self._config.model.adapter is None else None)

    def update_weights(self, update: WeightUpdate) -> float:
        """Replace the weights between two engine steps. Returns: seconds until the engine has verified them.

        Raises: WeightsAbsentError if the file is no longer there; WeightMismatchError, or any other error of the
            update, after which the worker has failed.
        """
        is_loaded = update.digest == self._update_digest or update.canary == self._transferred
        if is_loaded and update.version == self._sampler.policy_version:
            self._update_digest = update.digest
            return 0.0
        began = time.monotonic()
        try:
            local = self._weights.fetch(update)
            wait_s = _update_wait_s(self._config)
            loading = self._sampler.call(lambda engine: load_verified(engine, local, self._agreement), wait_s=wait_s)
            self._claims.claim_for(update.version)
            self._count_undecided(loading.result())
        except WeightsAbsentError:  # the engine is as it was; a joining worker takes newer weights
            raise
        except BaseException as error:  # re-raised; after half an update it must not sample
            self.died(error)
            raise
        self._update_digest, self._transferred = update.digest, None
        return time.monotonic() - began

    def transfer_weights(self, transfer: WeightTransfer) -> float | None:
        """Receive weights from the learner's GPU between two engine steps.

        Returns: seconds until the engine has verified them; None if it declined, and samples with its old weights.
        Raises: as `update_weights`.
        """
        began = time.monotonic()
        init_info = {**transfer.init_info, "rank_offset": transfer.workers[self.worker_id]}
        if not self._sampler.call(lambda engine: _has_joined(engine, transfer.backend, init_info)).result():
            return None
        try:
            loading = self._sampler.call(lambda engine: load_verified(engine, transfer, self._agreement))
            self._claims.claim_for(transfer.version)
            self._count_undecided(loading.result())
        except BaseException as error:  # re-raised; after half an update it must not sample
            self.died(error)
            raise
        self._update_digest, self._transferred = "", transfer.canary
        return time.monotonic() - began

    def _count_undecided(self, checks: Sequence[str]) -> None:
        for check in checks:
            self._counts.add(f"undecided/{check}")

    def report(self) -> WorkerReport:
        """The worker's state and counts."""
        error, occupancy = self._error, self._sampler.occupancy
        return WorkerReport(
            state=self._state,
            policy_version=self._sampler.policy_version if self._state != "loading" else 0,
            inflight=len(self._leases),
            tokens_per_s=self._rate.per_s(),
            pid=os.getpid(),
            rss_bytes=psutil.Process().memory_info().rss,
            stuck_s=self._sampler.stuck_s,
            running=occupancy.running,
            waiting=occupancy.waiting,
            kv_cache_usage=occupancy.kv_cache_usage,
            counts=self._counts.snapshot(),
            waiting_for="" if self._taught is None else self._taught.waiting_for,
            error="" if error is None else type(error).__name__,
            message="" if error is None else str(error),
        )

    def drain(self, timeout_s: float) -> None:
        """Stop claiming, finish the groups in flight, then stop; unfinished leases are released."""
        if self._state == "sampling":
            self._state = "draining"
        self._claims.end()
        self._leases.wait_empty(timeout_s)
        self.stop()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Stop immediately: release the leases, kill the graders."""
        self._stopping.set()
        deadline = time.monotonic() + timeout_s
        self._claims.stop(timeout_s)
        if self._rollouts is not None:
            self._rollouts.stop(max(0.0, deadline - time.monotonic()))
        self._sampler.stop(max(0.0, deadline - time.monotonic()))
        if self._delivery is not None:
            self._delivery.stop(max(0.0, deadline - time.monotonic()))
        if self._grader is not None:
            self._grader.close()
        self._claims.release()
        if self._state != "failed":
            self._state = "stopped"

    @property
    def is_over(self) -> bool:
        """Whether it has failed or was stopped."""
        return self._state in ("failed", "stopped")

    def _program(self, tokenization: Tokenization, grader: GraderPool) -> RolloutProgram:
        config, sampler = self._config, self._sampler
        program: RolloutProgram = Single(config, tokenization, sampler)
        if config.rollout.generation_budget is not None:
            program = Segmented(config, tokenization, sampler, files=self._segments, on_pause=self._leases.pause)
        if config.algorithm.num_experts > 0:
            program = WithExpert(program, tokenization, grader.expert)
        if (settings := config.distillation) is not None:
            client, concurrency = TeacherClient(settings), settings.concurrency
            program = self._taught = WithTeacher(program, client, concurrency=concurrency, on_pause=self._leases.pause)
        return program

    def _sampled(self, rollout: Rollout) -> None:
        lease = self._leases.sampled(rollout.request.request_id)
        if lease is None or self._delivery is None:
            return
        num_tokens = sum(len(sequence.token_ids) for sequence in rollout.sequences if not sequence.is_expert)
        self._rate.add(num_tokens)
        self._counts.add(f"tokens/{lease.request.purpose.value}", num_tokens)
        self._delivery.add(rollout, lease)

    def _called(self, completion: Completion, completed: Completed) -> None:
        num_tokens = sum(len(sequence.token_ids) for sequence in completed.sequences)
        self._rate.add(num_tokens)
        if isinstance(completion.context, RolloutRequest):
            self._counts.add(f"tokens/{completion.context.purpose.value}", num_tokens)

    def _refuse(self, request: RolloutRequest, error: Exception) -> None:
        assert self._delivery is not None  # created before the first claim
        if isinstance(error, GradingError):  # of the expert's solution, or of the teacher
            self._delivery.ungraded_async(request, error)
        else:
            detail = str(error) if isinstance(error, BapoError) else f"{type(error).__name__}: {error}"
            self._delivery.refuse_async(request.request_id, "refused_by_engine", detail)

    def _engine_ended(self, ended: Future[None]) -> None:
        if error := ended.exception():
            self.died(error)

    def died(self, error: BaseException) -> None:
        """Record a fatal error and stop claiming; the fleet reads it in the next report."""
        if self._error is None and not self._stopping.is_set():
            self._error = error
            self._state = "failed"
            log.error("%s failed: %s: %s", self.worker_id, type(error).__name__, error)
        else:
            log.warning("%s is already stopping: %s: %s", self.worker_id, type(error).__name__, error)
        self._claims.abandon()
        self._stopping.set()

    def _submit(self, request: RolloutRequest) -> None:
        try:
            if self._images is not None:
                self._images.fetch(request.prompt.images)
        except BapoError as error:
            assert self._delivery is not None  # created before the first claim
            self._delivery.refuse_async(request.request_id, "no_image", str(error))
        else:
            assert self._rollouts is not None
            self._rollouts.submit(request)

    def _lose(self, request_id: str) -> None:
        assert self._rollouts is not None
        self._rollouts.cancel(request_id)
        self._counts.add("failed/lease_lost")


def _update_wait_s(config: Config) -> float:
    """Longest wait of new weights for the calls in the engine; 0 where a step, or a paused response, waits for them."""
    rollout, cadence = config.rollout, config.cadence
    if cadence.max_steps_ahead == 0 or cadence.wait_for_reevaluation or rollout.generation_budget is not None:
        return 0.0
    return min(rollout.update_wait_s, rollout.sync_timeout_s / 2)


def _has_joined(engine: Engine, backend: str, init_info: Mapping[str, Any]) -> bool:
    try:
        engine.join_transfer(backend, init_info)
    except Exception as error:  # noqa: BLE001 - engines raise anything; the weights are as they were
        log.warning("the engine declines weights by %s: %s", backend, error)
        return False
    return True


def _prompts_to_check(config: Config) -> tuple[list[Prompt], ReadImage]:
    """Prompts, evenly spaced over every split of the task, and a function that returns the files of their images."""
    task = task_of(config)
    chosen: list[Prompt] = []
    for split in splits_of(task):
        prompts = task.prompts(split)
        stride = max(1, len(prompts) // NUM_CHECKED_PROMPTS)
        chosen.extend(prompts[::stride])
    return chosen, task.image
