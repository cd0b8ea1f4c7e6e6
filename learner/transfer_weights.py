"""Weights from the learner's GPU straight into the workers' engines (`rollout.weight_transfer`).

    nccl   begin ---- POST /weights/transfer ----> every worker: join the communicator, start, update, finish, canary
           add    tensor by tensor, as they are gathered: packed into buffers ---- broadcast ----> update
           end    all is sent
    ipc    add    a copy on the GPU
           end ------ POST /weights/transfer, with handles of the copies ----> every worker: start, update, finish
           finish every worker has answered

The receivers are weight transfer engines of vLLM 0.32; this side follows their protocol without importing vLLM. The
communicator is kept while the same workers are ready.

A transfer never fails an update: after any error, and at its deadline, workers get the file of the same version. A
worker that is stuck in a broadcast is restarted by its fleet, at the same deadline.
"""

from __future__ import annotations

import base64
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from bapo.config.tree import Config
from bapo.core.errors import ConfigError, UnavailableError
from bapo.core.types import Canary, WeightTransfer
from bapo.transport.ipc_handles import closed_handle
from bapo.transport.rollout_client import RolloutClient
from learner.distributed.nccl import NcclGroup, make_unique_id

log = logging.getLogger(__name__)

BUFFER_BYTES = 256 << 20
"""A broadcast has more than this, and at most one tensor more; two are in memory."""
NUM_BUFFERS = 2
MAX_FAILURES = 2
"""In a row; then the weights of the run travel as files only."""
POLL_S = 0.02
MAY_SHARE_GPUS = "gpu_memory_utilization"
"""Engine option that lets workers share GPUs with the learner."""

Result = TypeVar("Result")
Buffers = queue.Queue[Tensor | None]
"""None: there are no more."""


class Group(Protocol):
    """A communicator in which this process is rank 0."""

    def broadcast(self, packed: Tensor) -> None:
        """Returns once it is sent."""
        ...

    def abort(self) -> None:
        """Leave; calls in progress fail."""
        ...


class WeightSender:
    """One transfer at a time: begin, add..., end, then finish, which may be called in another thread."""

    backend: Literal["nccl", "ipc"]

    def __init__(self, fleet: RolloutClient, *, timeout_s: float, ranks_per_worker: int = 1) -> None:
        """`timeout_s`: longest time of a transfer."""
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._ranks_per_worker = ranks_per_worker
        self._num_failures = 0
        self._is_active = False
        self._deadline = 0.0
        self._workers: dict[str, int] = {}
        self._call: Future[dict[str, float]] | None = None
        self._version = 0
        self._canary: Canary | None = None
        self._metas: dict[str, list[Any]] = {}

    def begin(self, version: int, canary: Canary, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Start a transfer.

        Args:
            tensors: of the names and shapes that will be added, in this order (`in_order`).
            dtype: of the floating-point ones.
        """
        self._is_active = self._num_failures < MAX_FAILURES
        self._deadline = time.monotonic() + self._timeout_s
        self._version, self._canary, self._call = version, canary, None
        dtypes = [_sent_as(tensor, dtype) for tensor in tensors.values()]
        self._metas = {
            "names": list(tensors),
            "dtype_names": [str(each).removeprefix("torch.") for each in dtypes],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        self._attempt(self._begin)

    def add(self, tensor: Tensor) -> None:
        """The next full tensor, on this process's device."""
        self._attempt(partial(self._add, tensor))

    def end(self) -> None:
        """Wait until all is sent."""
        self._attempt(self._end)

    def finish(self) -> bool:
        """Wait for the workers. Returns: whether all that were ready have these weights."""
        self._attempt(self._finish)
        succeeded, self._is_active = self._is_active, False
        self._num_failures = 0 if succeeded else self._num_failures
        return succeeded

    def _attempt(self, work: Callable[[], None]) -> None:
        if not self._is_active:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001 - NCCL, CUDA and the fleet raise anything; the file follows
            self._is_active = False
            self._num_failures += 1
            self._leave()
            following = " and of all later ones" if self._num_failures == MAX_FAILURES else ""
            log.warning("weights of version %d%s travel as files: %s", self._version, following, error)

    def _begin(self) -> None:
        ready = sorted(worker.worker_id for worker in self._fleet.workers() if worker.state == "ready")
        workers = {name: 1 + i * self._ranks_per_worker for i, name in enumerate(ready)}
        if workers != self._workers:
            self._leave()
            self._workers = workers
        self._is_active = bool(workers)

    def _post(self, init_info: Mapping[str, Any], update_info: Mapping[str, Any]) -> None:
        """Have the workers receive, in a thread."""
        assert self._canary is not None
        transfer = WeightTransfer(
            version=self._version,
            canary=self._canary,
            backend=self.backend,
            workers=self._workers,
            init_info=init_info,
            update_info=update_info,
        )
        self._call = in_daemon_thread(lambda: self._fleet.transfer_weights(transfer, timeout_s=self._timeout_s))

    def _check(self) -> None:
        """Raises: the error of the call; UnavailableError if a worker has not received; TimeoutError."""
        if self._call is not None and self._call.done():
            missing = self._workers.keys() - self._call.result().keys()
            if missing:
                raise UnavailableError(f"{', '.join(sorted(missing))} did not receive them")
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"not finished after {self._timeout_s:g} s (rollout.sync_timeout_s)")

    def _add(self, tensor: Tensor) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        assert self._call is not None
        while not self._call.done():
            self._check()
            time.sleep(POLL_S)
        self._check()

    def _leave(self) -> None:
        """Forget the workers."""
        self._workers = {}


class NcclSender(WeightSender):
    """Packed broadcasts to all ranks of the engines."""

    backend = "nccl"

    def __init__(
        self,
        fleet: RolloutClient,
        *,
        timeout_s: float,
        ranks_per_worker: int = 1,
        join: Callable[[bytes, int], Group],
        make_id: Callable[[], bytes] = make_unique_id,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """
        Args:
            join: joins the communicator of this id and number of ranks.
            make_id: the id of a new communicator.
        """
        super().__init__(fleet, timeout_s=timeout_s, ranks_per_worker=ranks_per_worker)
        self._join, self._make_id, self._buffer_bytes = join, make_id, buffer_bytes
        self._unique_id = b""
        self._group: Group | None = None
        self._left = threading.Event()
        self._sent: Future[None] = Future()
        self._queue: Buffers = queue.Queue()
        self._packing: list[Tensor] = []
        self._num_bytes = 0

    def _begin(self) -> None:
        super()._begin()
        if not self._is_active:
            return
        if not self._unique_id:
            self._unique_id, self._left = self._make_id(), threading.Event()
        self._queue = queue.Queue(maxsize=NUM_BUFFERS - 1)
        self._packing, self._num_bytes = [], 0
        world_size = 1 + len(self._workers) * self._ranks_per_worker
        init_info = {
            "nccl_unique_id_b64": base64.b64encode(self._unique_id).decode(),
            "world_size": world_size,
            "packed": True,
            "packed_buffer_size_bytes": self._buffer_bytes,
            "packed_num_buffers": NUM_BUFFERS,
        }
        self._post(init_info, self._metas)
        self._sent = in_daemon_thread(partial(self._send, self._unique_id, world_size, self._queue, self._left))

    def _send(self, unique_id: bytes, world_size: int, packed: Buffers, left: threading.Event) -> None:
        """Everything that may block in NCCL."""
        group = self._group or self._join(unique_id, world_size)
        if left.is_set():
            group.abort()
            return
        self._group = group
        while not left.is_set():
            try:
                buffer = packed.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if buffer is None:
                return
            group.broadcast(buffer)

    def _add(self, tensor: Tensor) -> None:
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        self._packing.append(flat)
        self._num_bytes += flat.numel()
        # vLLM's receiver cuts its buffers by the same rule.
        if self._num_bytes > self._buffer_bytes:
            self._flush()

    def _flush(self) -> None:
        packed = torch.cat(self._packing)
        self._packing, self._num_bytes = [], 0
        if packed.is_cuda:
            torch.cuda.current_stream().synchronize()
        self._put(packed)

    def _put(self, packed: Tensor | None) -> None:
        while True:
            self._check()
            try:
                self._queue.put(packed, timeout=POLL_S)
            except queue.Full:
                continue
            return

    def _end(self) -> None:
        if self._packing:
            self._flush()
        self._put(None)
        while not self._sent.done():
            self._check()
            time.sleep(POLL_S)
        self._sent.result()

    def _check(self) -> None:
        if self._sent.done():
            self._sent.result()
        super()._check()

    def _leave(self) -> None:
        super()._leave()
        self._left.set()
        group, self._group, self._unique_id, self._packing = self._group, None, b"", []
        if group is not None:
            in_daemon_thread(group.abort)


class IpcSender(WeightSender):
    """The worker on the learner's GPU reads copies of the tensors."""

    backend = "ipc"

    def __init__(self, fleet: RolloutClient, *, timeout_s: float, device: torch.device) -> None:
        super().__init__(fleet, timeout_s=timeout_s)
        self._gpu = str(torch.cuda.get_device_properties(device).uuid)
        self._copies: list[Tensor] = []

    def _begin(self) -> None:
        super()._begin()
        self._copies = []
        if len(self._workers) > 1:
            raise UnavailableError(f"ipc needs one worker, {len(self._workers)} are ready")

    def _add(self, tensor: Tensor) -> None:
        self._copies.append(tensor.detach().clone(memory_format=torch.contiguous_format))

    def _end(self) -> None:
        torch.cuda.current_stream().synchronize()
        handles = [{self._gpu: closed_handle(reduce_tensor(copy)[1])} for copy in self._copies]
        self._post({"packed": False, "gpu": self._gpu}, {**self._metas, "ipc_handles": handles})

    def _finish(self) -> None:
        super()._finish()
        self._free()

    def _leave(self) -> None:
        super()._leave()
        self._free()

    def _free(self) -> None:
        self._copies = []
        torch.cuda.ipc_collect()


def in_order(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Wider dtypes first, so that every tensor is aligned in its buffer, as vLLM's receiver needs it."""
    return dict(sorted(tensors.items(), key=lambda item: -_sent_as(item[1], dtype).itemsize))


def _sent_as(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype


def make_sender(config: Config, fleet: RolloutClient, device: torch.device) -> WeightSender | None:
    """The sender of the configuration, on rank 0; None: files only. Raises: ConfigError."""
    backend, timeout_s = backend_of(config, device), config.rollout.sync_timeout_s
    if backend == "ipc":
        return IpcSender(fleet, timeout_s=timeout_s, device=device)
    if backend == "nccl":
        options = config.rollout.engine_options
        num_ranks = int(options.get("tensor_parallel_size", 1)) * int(options.get("pipeline_parallel_size", 1))
        return NcclSender(
            fleet,
            timeout_s=timeout_s,
            ranks_per_worker=num_ranks,
            join=lambda unique_id, world_size: NcclGroup(unique_id, world_size, device),
        )
    return None


def backend_of(config: Config, device: torch.device) -> Literal["nccl", "ipc", "file"]:
    """`rollout.weight_transfer`, with `auto` resolved. Raises: ConfigError if the learner cannot send."""
    wanted, has_one_rank = config.rollout.weight_transfer, config.learner.num_ranks == 1
    if wanted in {"nccl", "ipc"} and device.type != "cuda":
        raise ConfigError(f"rollout.weight_transfer = {wanted} needs a learner on a GPU: use auto or file")
    if wanted == "ipc" and not has_one_rank:
        raise ConfigError(f"rollout.weight_transfer = ipc needs learner.num_ranks = 1, not {config.learner.num_ranks}")
    if wanted != "auto":
        return wanted
    if device.type != "cuda" or config.rollout.engine != "vllm":
        return "file"
    if MAY_SHARE_GPUS in config.rollout.engine_options:  # NCCL refuses two ranks on one GPU
        return "ipc" if has_one_rank else "file"
    return "nccl"


def in_daemon_thread(work: Callable[[], Result]) -> Future[Result]:
    """The result of a call that may never return, and must not keep the process from exiting."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the caller reads the future
            future.set_exception(error)

    threading.Thread(target=run, name="transfer", daemon=True).start()
    return future
