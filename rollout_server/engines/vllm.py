"""vLLM as an engine: one `LLMEngine` in this process, stepped by the thread that owns it.

What vLLM 0.32 needs for reinforcement learning is in this file and in `_vllm_receiver.py`:

* log-probs are those of the distribution that was sampled from (`processed_logprobs`), not of the raw logits;
* no prompt uses a KV cache of older weights: blocks of old weights would change log-probs by several nats. They are
  salted with the version, and after an update responses in flight are recomputed, unless
  `rollout.kv_cache_at_update = "keep"`;
* the canary of an update does not wait for responses in flight: it has a priority and a seat of its own;
* each response has the versions that sampled its tokens (vLLM's weight-version spans);
* no per-request seeds: on CPU they crash the engine in chunked prefill;
* torch.compile, CUDA graphs and async scheduling are disabled on CPUs only; they work with in-place weight updates.

Prompts with images: `_vllm_vision.py`.

Not supported: speculative decoding, LoRA, video, and an engine core in its own process. Only vLLM's AsyncLLM can pause
such a core for an update, so it would be a second way to run every engine, and the scheduler, whose load is reported
and which gives the canary its seat, would be out of reach.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bapo.config.tree import Config
from bapo.core.errors import ConfigError, ContractError, WeightMismatchError
from bapo.core.token_arrays import Float32s, Int32s
from bapo.core.types import Prompt, RolloutRequest
from bapo.runtime.machine import VLLM_FOR_GPUS, parallelism_problem, vllm_build
from bapo.runtime.model_files import folder_of, how_to_fetch, is_hub_id, missing_parts
from bapo.runtime.sampling_limits import LOGPROBS, sampling_problems
from bapo.runtime.torchvision_build import complete_torchvision
from bapo.runtime.vision import ImageReader, ReadImage, missing_package, vision_model
from bapo.tasks.prompt_tokens import ended_prompts, prompt_token_ids, round_trips_of
from rollout_server.engines import _vllm_vision
from rollout_server.engines.base import INITIAL_VERSION, Continuation, Occupancy, SampledGroup, no_image

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm.outputs import CompletionOutput, RequestOutput

log = logging.getLogger(__name__)

EVERYWHERE: Mapping[str, str] = {
    # The engine core in this process: updates are atomic between steps, start time and memory are halved.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # On busy cores two OpenMP threads are four to ten times slower than one.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    # It cannot return processed log-probs, so vLLM would import it, and ask for a compiler, but never use it.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
ON_CPUS: Mapping[str, str] = {
    # Otherwise vLLM compiles its sampler in the first batch, for 18 s.
    "TORCH_COMPILE_DISABLE": "1",
}


def environment_of(build: str | None) -> dict[str, str]:
    """Environment variables for a build of vLLM, which reads them when it is imported."""
    return dict(EVERYWHERE) if build == VLLM_FOR_GPUS else {**EVERYWHERE, **ON_CPUS}


ENVIRONMENT: Mapping[str, str] = environment_of(vllm_build())
IN_PROCESS = False

CACHE_BYTES = 256 << 20
"""KV cache of one engine on CPU, where vLLM would take 92 % of the memory; on a GPU vLLM's default applies."""
ARGUMENTS_ON_CPUS: Mapping[str, Any] = {
    "enforce_eager": True,
    "async_scheduling": False,
    "kv_cache_memory_bytes": CACHE_BYTES,
}
"""On GPUs vLLM's defaults apply: compiled, with CUDA graphs and async scheduling."""
CANARY_ID = "canary"
CANARY_PRIORITY = -1
"""Ahead of all other requests, which have 0; responses that vLLM has preempted keep their place among these."""


class VllmEngine:
    """An `Engine` over one `LLMEngine`."""

    def __init__(self, config: Config, image: ReadImage = no_image, worker_id: str = "") -> None:
        complete_torchvision()
        from vllm import LLMEngine, SamplingParams, TokensPrompt  # here: the fleet reads ENVIRONMENT without vLLM
        from vllm.engine.arg_utils import EngineArgs
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind
        from vllm.usage.usage_lib import UsageContext

        self._rollout = config.rollout
        self._images = _image_reader(config, image)
        _vllm_vision.register(config.model.path)
        # LLM_CLASS: its default of max_num_batched_tokens is 8192 or 16384 by GPU, otherwise it would be 2048.
        self._engine: LLMEngine = LLMEngine.from_engine_args(
            EngineArgs(**_engine_args(config, worker_id)), usage_context=UsageContext.LLM_CLASS
        )
        self._tokenizer: Any = self._engine.get_tokenizer()
        core: Any = self._engine.engine_core  # in this process: ENVIRONMENT
        self._core: Any = core.engine_core
        self._scheduler: Any = self._core.scheduler
        self._tokens_prompt = TokensPrompt
        self._refusals = (VLLMClientError, ValueError)
        """What vLLM raises for one request that it cannot sample; the others are as they were."""
        # detokenize=False: texts are decoded once per group, not once per token.
        # flat_logprobs: lists instead of a dict per token, 20 % faster. logprobs=0: only of the sampled token.
        self._sampling = SamplingParams(
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            max_tokens=config.rollout.max_response_tokens,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._probe = SamplingParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        self._seed = config.run.seed if config.run.deterministic else None
        self._sampling_ids: set[str] = set()
        self._early: list[SampledGroup] = []
        self._parts: dict[str, Continuation] = {}
        self._excluded: frozenset[int] = frozenset()
        if self._images is not None:
            self._excluded = frozenset(self._images.model.excluded)
            self._engine.collective_rpc("exclude_tokens", args=(self._images.model.excluded,))
        self._set_version(INITIAL_VERSION)

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample the next token."""
        return self._version

    @property
    def num_sampling(self) -> int:
        """Groups that `step` has not returned yet."""
        return len(self._sampling_ids) + len(self._early)

    @property
    def occupancy(self) -> Occupancy:
        """From vLLM's scheduler itself."""
        running, waiting = self._scheduler.get_request_counts()
        return Occupancy(running, waiting, self._scheduler.get_kv_cache_usage())

    def check_prompts(self, prompts: Sequence[Prompt], image: ReadImage = no_image) -> None:
        """Raises: ConfigError if most prompts change when encoded and decoded, or one is too long with its images."""
        found = round_trips_of(self._tokenizer, prompts)
        if found.is_wrong:
            raise ConfigError(found.complaint)
        for complaint in (found.complaint if found.num_changed else "", ended_prompts(self._tokenizer, prompts)):
            if complaint:
                log.warning("%s", complaint)
        images = None if self._images is None else ImageReader(self._images.model, image)
        try:
            for prompt in prompts:
                self._check_length(len(self._encode_prompt(prompt, images)), prompt.text)
        except ContractError as error:
            raise ConfigError(str(error)) from error

    def encode_response(self, text: str) -> Int32s:
        """[L] tokens of a response, and the end-of-sequence token."""
        encoded: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        token_ids = [token for token in encoded if token not in self._excluded]
        end = self._tokenizer.eos_token_id
        closed = token_ids if end is None else [*token_ids, end]
        return np.array(closed[: self._rollout.max_response_tokens], np.int32)

    def submit(self, request: RolloutRequest, most: int | None = None) -> None:
        """G responses to one prompt. Raises: ContractError if it is too long, or vLLM refuses it."""
        token_ids = self._encode_prompt(request.prompt, self._images)
        self._check_length(len(token_ids), request.prompt.text)
        sampling = self._sampling.clone()
        sampling.n = request.group_size
        if self._seed is not None:
            sampling.seed = seed_of(self._seed, request.request_id)  # vLLM adds the response's place in the group
        sampling.temperature = request.temperature or sampling.temperature
        sampling.top_p = request.top_p or sampling.top_p
        if most is not None:
            sampling.max_tokens = min(most, self._rollout.max_response_tokens)
        self._add(request.request_id, token_ids, sampling, request.prompt.images)

    def resume(self, part: Continuation) -> None:
        """A new request whose prompt is the prompt and the tokens so far."""
        sampling = self._sampling.clone()
        sampling.max_tokens = part.most
        token_ids = [*part.prompt_token_ids.tolist(), *part.token_ids.tolist()]
        self._add(part.part_id, token_ids, sampling, part.request.prompt.images)
        self._parts[part.part_id] = part

    def abort(self, request_id: str) -> None:
        """Stop sampling a group."""
        if request_id in self._sampling_ids:
            self._parts.pop(request_id, None)
            self._sampling_ids.remove(request_id)
            self._engine.abort_request([request_id])

    def step(self) -> list[SampledGroup]:
        """One token for every response in flight; returns the finished groups."""
        finished, self._early = self._early, []
        if self._sampling_ids:
            finished += [self._sampled(output) for output in self._outputs()]
        return finished

    def load_weights(self, path: str, version: int) -> None:
        """Replace the weights in place; responses in flight continue with the new ones."""
        self._replace_weights("load_weight_file", path, version)

    def join_transfer(self, backend: str, init_info: Mapping[str, Any]) -> None:
        """Create vLLM's weight transfer engine, unless it is there."""
        self._engine.collective_rpc("join_transfer", args=(backend, dict(init_info)))

    def receive_weights(self, update_info: Mapping[str, Any], version: int) -> None:
        """As `load_weights`."""
        self._replace_weights("receive_weights", dict(update_info), version)

    def _replace_weights(self, method: str, argument: Any, version: int) -> None:
        """`method`: of `WeightReceiver`, in every rank of the engine."""
        keeps = self._rollout.kv_cache_at_update == "keep"
        if keeps:
            self._finish_batches()
        self._engine.collective_rpc(method, args=(argument,))
        if problems := [problem for problem in self._engine.collective_rpc("kernel_problem") if problem]:
            raise WeightMismatchError(f"after the update to version {version}, {problems[0]}")
        if not keeps:
            if not self._engine.reset_prefix_cache(reset_running_requests=True):
                raise RuntimeError("vLLM did not reset its KV cache after the weight update")
            if self._images is not None:
                self._engine.reset_encoder_cache()  # outputs of the vision tower, by image
        self._set_version(version)

    def logprobs(self, token_ids: Sequence[int]) -> Float32s | None:
        """[len - 1] log-probs at temperature 1. Responses in flight get their next token in the same step."""
        longest = self._rollout.max_prompt_tokens + self._rollout.max_response_tokens
        if not 2 <= len(token_ids) < longest:
            raise ContractError(f"log-probs need at least 2 and fewer than {longest} tokens, got {len(token_ids)}")
        # vLLM preempts a running response for memory, never for a seat in the batch.
        self._scheduler.max_num_active_reqs += 1
        self._add(CANARY_ID, list(token_ids), self._probe, priority=CANARY_PRIORITY)
        while CANARY_ID in self._sampling_ids:
            for output in self._outputs():
                if output.request_id == CANARY_ID:
                    self._sampling_ids.remove(CANARY_ID)
                    probe = output
                else:
                    self._early.append(self._sampled(output))
        self._scheduler.max_num_active_reqs -= 1
        measured: Any = probe.prompt_logprobs
        rows = zip(token_ids[1:], measured[1:], strict=True)
        return np.array([row[token_id].logprob for token_id, row in rows], np.float32)

    def close(self) -> None:
        """Free the model."""
        self._engine.engine_core.shutdown()

    def _finish_batches(self) -> None:
        """Take the tokens of batches that the device has begun (async scheduling): the old weights sample them."""
        self._core.pause_scheduler(mode="keep", clear_cache=False)
        while any(request.num_in_flight_tokens for request in self._scheduler.requests.values()):
            self._early += [self._sampled(output) for output in self._outputs()]
        self._core.resume_scheduler()

    def _set_version(self, version: int) -> None:
        self._engine.set_weight_version(str(version))
        self._version = version

    def _add(
        self, request_id: str, token_ids: list[int], sampling: Any, images: Sequence[str] = (), priority: int = 0
    ) -> None:
        salt = str(self._version)
        prompt: Any = self._tokens_prompt(prompt_token_ids=token_ids, cache_salt=salt)
        if images:
            assert self._images is not None  # or its prompt was refused
            patches = [(digest, self._images.patches(digest)) for digest in images]
            prompt = _vllm_vision.prompt_with_images(token_ids, patches, self._images.model, salt)
        try:
            self._engine.add_request(request_id, prompt, sampling, priority=priority)
        except self._refusals as error:
            raise ContractError(f"vLLM refuses request {request_id}: {error}") from error
        self._sampling_ids.add(request_id)

    def _outputs(self) -> list[RequestOutput]:
        return [output for output in self._engine.step() if output.finished]  # type: ignore[misc]

    def _sampled(self, output: RequestOutput) -> SampledGroup:
        self._sampling_ids.remove(output.request_id)
        responses, part = output.outputs, self._parts.pop(output.request_id, None)
        token_ids = [response.token_ids for response in responses]
        whole = token_ids if part is None else [[*part.token_ids.tolist(), *token_ids[0]]]
        return SampledGroup(
            request_id=output.request_id,
            prompt_token_ids=part.prompt_token_ids if part else np.array(output.prompt_token_ids, np.int32),
            token_ids=np.concatenate([np.array(ids, np.int32) for ids in token_ids]),
            logprobs=np.concatenate([_sampled_logprobs(response) for response in responses]),
            lengths=np.array([len(ids) for ids in token_ids], np.int32),
            truncated=np.array([response.finish_reason == "length" for response in responses]),
            versions=np.array([_versions(response) for response in responses], np.int32),
            texts=tuple(self._tokenizer.batch_decode(whole, skip_special_tokens=True)),
            spans=_spans(responses),
        )

    def _encode_prompt(self, prompt: Prompt, images: ImageReader | None) -> list[int]:
        """Token ids, including those of images. Raises: ContractError."""
        token_ids = prompt_token_ids(self._tokenizer, prompt)
        if images is not None:
            return images.model.expanded(token_ids, images.of_prompt(prompt))
        if prompt.images:
            raise ContractError(
                f"the prompt {_shown(prompt.text)!r} has images, but the model reads text only: set model.path to a "
                "vision-language model"
            )
        return token_ids

    def _check_length(self, num_tokens: int, text: str) -> None:
        """Raises: ContractError."""
        longest = self._rollout.max_prompt_tokens
        if num_tokens == 0:  # vLLM's own error would kill the engine
            raise ContractError(f"the prompt {text!r} has no tokens")
        if num_tokens > longest:
            shown = _shown(text)
            message = f"the prompt {shown!r} has {num_tokens} tokens, more than rollout.max_prompt_tokens={longest}"
            raise ContractError(message)


def _shown(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _image_reader(config: Config, image: ReadImage) -> ImageReader | None:
    model = vision_model(config.model.path, config.model.max_image_pixels)
    return None if model is None else ImageReader(model, image)


def check(config: Config) -> None:
    """Raises: ConfigError if `model.path` cannot be loaded without a download."""
    path = config.model.path
    folder = folder_of(path)
    if folder is None:
        raise ConfigError(
            f"model.path: {path!r} is neither a folder nor a model in the local Hugging Face cache; "
            f"fix the path, or {how_to_fetch(path)}"
        )
    missing = missing_parts(folder)
    if not (folder / "tokenizer_config.json").is_file():
        missing.append("tokenizer_config.json")
    if missing:
        advice = f"; {how_to_fetch(path)}" if is_hub_id(path) else ""
        found = f"{path} is not a model in Hugging Face format"
        raise ConfigError(f"model.path: {found}: {missing[0]} is missing{advice}")
    if vision_model(path) is not None and (problem := missing_package()):
        raise ConfigError(f"model.path: {path} is a vision-language model: {problem}")
    if problem := parallelism_problem(config.rollout):
        raise ConfigError(problem)
    if problems := list(sampling_problems(config)):
        raise ConfigError("\n".join(problems))


def make_engine(config: Config, image: ReadImage = no_image, worker_id: str = "") -> VllmEngine:
    """Load `model.path`. Raises: ConfigError for an unknown engine option."""
    return VllmEngine(config, image, worker_id)


def seed_of(seed: int, name: str) -> int:
    """The seed of a worker's engine, by its id: with one seed, all workers and their replacements would draw the same
    numbers. With `run.deterministic`, the seed of a request."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4])


def _engine_args(config: Config, worker_id: str) -> dict[str, Any]:
    """The settings above, overridden by `rollout.engine_options`."""
    from dataclasses import fields

    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    unknown = set(config.rollout.engine_options) - {field.name for field in fields(EngineArgs)}
    if unknown:
        raise ConfigError(f"rollout.engine_options: vLLM has no engine argument {', '.join(sorted(unknown))}")
    return engine_arguments(config, worker_id, on_cpus=current_platform.is_cpu())


def engine_arguments(config: Config, worker_id: str = "", *, on_cpus: bool) -> dict[str, Any]:
    """Keywords of vLLM's EngineArgs."""
    rollout = config.rollout
    seats = rollout.engine_options.get("max_num_seqs", rollout.max_groups_in_flight * config.algorithm.group_size)
    chosen: dict[str, Any] = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "max_model_len": rollout.max_prompt_tokens + rollout.max_response_tokens,
        "max_num_active_seqs": seats,
        "scheduling_policy": "priority",
        "logprobs_mode": LOGPROBS,
        "worker_extension_cls": "rollout_server.engines._vllm_receiver.WeightReceiver",
        "disable_log_stats": True,
        "seed": seed_of(config.run.seed, worker_id),
    }
    if vision_model(config.model.path) is not None:
        chosen |= _vllm_vision.ARGUMENTS
    chosen |= (dict(ARGUMENTS_ON_CPUS) if on_cpus else {}) | rollout.engine_options
    return chosen | {"max_num_seqs": seats + 1}  # one for the canary


def _sampled_logprobs(response: CompletionOutput) -> Float32s:
    """[T] log-probs of the sampled tokens: with `logprobs=0` the flat list has one entry per token."""
    flat: Any = response.logprobs
    values = np.array(flat.logprobs, np.float32)
    if len(values) != len(response.token_ids):
        raise RuntimeError(f"vLLM returned {len(values)} log-probs for {len(response.token_ids)} tokens")
    return values


def _versions(response: CompletionOutput) -> tuple[int, int]:
    """Oldest and newest policy version that sampled a token of this response."""
    versions = [int(span.version) for span in response.weight_versions or ()]
    return min(versions), max(versions)


def _spans(responses: Sequence[CompletionOutput]) -> Int32s | None:
    """[S, 2] runs (tokens, version) over all responses; None when each response has one version."""
    if all(len(response.weight_versions or ()) <= 1 for response in responses):
        return None
    spans = [span for response in responses for span in response.weight_versions or ()]
    return np.array([(span.end - span.start, int(span.version)) for span in spans], np.int32)
