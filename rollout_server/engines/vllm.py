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

Not supported: speculative decoding, LoRA kernels (adapters are merged), video, and an engine core in its own process.
Only vLLM's AsyncLLM can pause such a core for an update, so it would be a second way to run every engine, and the
scheduler, whose load is reported and which gives the canary its seat, would be out of reach.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bapo.config.tree import Config
from bapo.core.errors import ConfigError, ContractError, WeightMismatchError
from bapo.core.sequences import SampledSequence
from bapo.core.token_arrays import Float32s
from bapo.core.types import Outcome
from bapo.runtime.machine import VLLM_FOR_GPUS, parallelism_problem, vllm_build
from bapo.runtime.model_files import folder_of, how_to_fetch, is_hub_id, missing_parts, num_parameters
from bapo.runtime.sampling_limits import LOGPROBS, sampling_problems
from bapo.runtime.torchvision_build import complete_torchvision
from bapo.runtime.vision import Patches, ReadImage, missing_package, vision_model
from rollout_server.engines import _vllm_vision
from rollout_server.engines.base import INITIAL_VERSION, Completed, Completion, Occupancy, seed_of
from rollout_server.tokenization import Tokenization, no_image

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
SMALL = 100_000_000
"""Parameters of a model that is not worth compiling for on a GPU: it took 63 of 77 seconds of an engine's start (0.6 B
on one H200, docs/gpus.md). Where the gain begins was not measured."""
AS_ASKED = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
"""Sampling values with one name here and in vLLM."""
CANARY_ID = "canary"
CANARY_PRIORITY = -1
"""Ahead of all other requests, which have 0; responses that vLLM has preempted keep their place among these."""


class VllmEngine:
    """An `Engine` over one `LLMEngine`."""

    def __init__(self, config: Config, worker_id: str = "") -> None:
        complete_torchvision()
        from vllm import LLMEngine, SamplingParams, TokensPrompt  # here: the fleet reads ENVIRONMENT without vLLM
        from vllm.engine.arg_utils import EngineArgs
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind
        from vllm.usage.usage_lib import UsageContext

        self._rollout, self._model = config.rollout, config.model
        self._vision = vision_model(config.model.path, config.model.max_image_pixels)
        _vllm_vision.register(config.model.path)
        # LLM_CLASS: its default of max_num_batched_tokens is 8192 or 16384 by GPU, otherwise it would be 2048.
        self._engine: LLMEngine = LLMEngine.from_engine_args(
            EngineArgs(**_engine_args(config, worker_id)), usage_context=UsageContext.LLM_CLASS
        )
        core: Any = self._engine.engine_core  # in this process: ENVIRONMENT
        self._core: Any = core.engine_core
        self._scheduler: Any = self._core.scheduler
        self._tokens_prompt = TokensPrompt
        self._refusals = (VLLMClientError, ValueError)
        """What vLLM raises for one request that it cannot sample; the others are as they were."""
        # detokenize=False: texts are decoded once per group (`Tokenization`), not once per token.
        # flat_logprobs: lists instead of a dict per token, 20 % faster. logprobs=0: only of the sampled token.
        self._sampling = SamplingParams(
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._probe = SamplingParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        self._calls: set[str] = set()
        self._early: list[Completed] = []
        """Finished outside of `step`, which returns them."""
        if self._vision is not None:
            self._engine.collective_rpc("exclude_tokens", args=(self._vision.excluded,))
        self._set_version(INITIAL_VERSION)

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample the next token."""
        return self._version

    @property
    def occupancy(self) -> Occupancy:
        """From vLLM's scheduler itself."""
        running, waiting = self._scheduler.get_request_counts()
        return Occupancy(running, waiting, self._scheduler.get_kv_cache_usage())

    def add(self, completion: Completion) -> None:
        """Raises: ContractError if vLLM refuses it."""
        sampling = self._sampling.clone()
        sampling.n, sampling.max_tokens = completion.num, completion.max_tokens
        for name in AS_ASKED:
            setattr(sampling, name, getattr(completion, name))
        sampling.min_tokens = min(completion.min_tokens, completion.max_tokens)
        if completion.seed is not None:
            sampling.seed = completion.seed  # vLLM adds the response's place among the `num`
        if completion.stop:  # found in the text, so that this call is detokenized, with the special tokens
            sampling.stop, sampling.detokenize = list(completion.stop), True
            sampling.skip_special_tokens = False
        self._add(completion.call_id, list(completion.token_ids), sampling, completion.images)

    def abort(self, call_id: str) -> None:
        """Stop sampling a call."""
        if call_id in self._calls:
            self._calls.remove(call_id)
            self._engine.abort_request([call_id])

    def step(self) -> list[Completed]:
        """One token for every response in flight; returns the finished calls."""
        finished, self._early = self._early, []
        if self._calls:
            finished += [self._completed(output) for output in self._outputs()]
        return finished

    def load_weights(self, path: str, version: int) -> bool:
        """Replace the weights in place; responses in flight continue with the new ones."""
        if (lora := self._model.lora) is not None:
            return self._replace_weights("load_adapter_file", (path, self._model.path, lora.model_dump()), version)
        return self._replace_weights("load_weight_file", path, version)

    def join_transfer(self, backend: str, init_info: Mapping[str, Any]) -> None:
        """Create vLLM's weight transfer engine, unless it is there."""
        self._engine.collective_rpc("join_transfer", args=(backend, dict(init_info)))

    def receive_weights(self, update_info: Mapping[str, Any], version: int) -> bool:
        """As `load_weights`."""
        return self._replace_weights("receive_weights", dict(update_info), version)

    def _replace_weights(self, method: str, argument: Any, version: int) -> bool:
        """`method`: of `WeightReceiver`, in every rank of the engine."""
        keeps = self._rollout.kv_cache_at_update == "keep"
        if keeps:
            self._finish_batches()
        self._engine.collective_rpc(method, args=(argument,))
        verdicts: list[tuple[str, bool]] = self._engine.collective_rpc("kernel_problem")
        if problems := [problem for problem, _ in verdicts if problem]:
            raise WeightMismatchError(f"after the update to version {version}, {problems[0]}")
        if not keeps:
            if not self._engine.reset_prefix_cache(reset_running_requests=True):
                raise RuntimeError("vLLM did not reset its KV cache after the weight update")
            if self._vision is not None:
                self._engine.reset_encoder_cache()  # outputs of the vision tower, by image
        self._set_version(version)
        return all(decides for _, decides in verdicts)

    def logprobs(self, token_ids: Sequence[int]) -> Float32s | None:
        """[len - 1] log-probs at temperature 1. Responses in flight get their next token in the same step."""
        longest = self._rollout.max_prompt_tokens + self._rollout.max_response_tokens
        if not 2 <= len(token_ids) < longest:
            raise ContractError(f"log-probs need at least 2 and fewer than {longest} tokens, got {len(token_ids)}")
        # vLLM preempts a running response for memory, never for a seat in the batch.
        self._scheduler.max_num_active_reqs += 1
        self._add(CANARY_ID, list(token_ids), self._probe, priority=CANARY_PRIORITY)
        while CANARY_ID in self._calls:
            for output in self._outputs():
                if output.request_id == CANARY_ID:
                    self._calls.remove(CANARY_ID)
                    probe = output
                else:
                    self._early.append(self._completed(output))
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
            self._early += [self._completed(output) for output in self._outputs()]
        self._core.resume_scheduler()

    def _set_version(self, version: int) -> None:
        self._engine.set_weight_version(str(version))
        self._version = version

    def _add(
        self,
        call_id: str,
        token_ids: list[int],
        sampling: Any,
        images: Sequence[tuple[str, Patches]] = (),
        priority: int = 0,
    ) -> None:
        salt = str(self._version)
        prompt: Any = self._tokens_prompt(prompt_token_ids=token_ids, cache_salt=salt)
        if images:
            assert self._vision is not None  # or its prompt was refused
            prompt = _vllm_vision.prompt_with_images(token_ids, images, self._vision, salt)
        try:
            self._engine.add_request(call_id, prompt, sampling, priority=priority)
        except self._refusals as error:
            raise ContractError(f"vLLM refuses request {call_id}: {error}") from error
        self._calls.add(call_id)

    def _outputs(self) -> list[RequestOutput]:
        return [output for output in self._engine.step() if output.finished]  # type: ignore[misc]

    def _completed(self, output: RequestOutput) -> Completed:
        self._calls.remove(output.request_id)
        return Completed(
            call_id=output.request_id,
            token_ids=np.array(output.prompt_token_ids, np.int32),
            sequences=tuple(_sequence(response) for response in output.outputs),
        )


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


def make_engine(config: Config, worker_id: str = "") -> VllmEngine:
    """Load `model.path`. Raises: ConfigError for an unknown engine option."""
    return VllmEngine(config, worker_id)


def make_tokenization(config: Config, image: ReadImage = no_image) -> Tokenization:
    """By the tokenizer that vLLM chooses for the model."""
    complete_torchvision()
    from vllm.tokenizers import get_tokenizer

    options = config.rollout.engine_options
    chosen = {name: options[name] for name in ("tokenizer_mode", "trust_remote_code") if name in options}
    tokenizer = get_tokenizer(
        options.get("tokenizer") or config.model.path, revision=options.get("tokenizer_revision"), **chosen
    )
    return Tokenization(tokenizer, config, image)


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
    if on_cpus:
        chosen |= ARGUMENTS_ON_CPUS
    elif not is_worth_compiling(config) and "compilation_config" not in rollout.engine_options:
        chosen["enforce_eager"] = True
    chosen |= rollout.engine_options
    return chosen | {"max_num_seqs": seats + 1}  # one for the canary


def is_worth_compiling(config: Config) -> bool:
    """Whether an engine on a GPU samples for long enough to win back what compilation takes."""
    folder = folder_of(config.model.path)
    parameters = None if folder is None else num_parameters(folder)
    return not config.is_short and (parameters is None or parameters >= SMALL)


def _sequence(response: CompletionOutput) -> SampledSequence:
    flat: Any = response.logprobs  # with `logprobs=0` the flat list has one entry per token
    if len(flat.logprobs) != len(response.token_ids):
        raise RuntimeError(f"vLLM returned {len(flat.logprobs)} log-probs for {len(response.token_ids)} tokens")
    spans = response.weight_versions or ()
    return SampledSequence(
        token_ids=np.array(response.token_ids, np.int32),
        rollout_logprobs=np.array(flat.logprobs, np.float32),
        versions=np.repeat([int(s.version) for s in spans], [s.end - s.start for s in spans]).astype(np.int32),
        outcome=Outcome.TRUNCATED if response.finish_reason == "length" else Outcome.GRADED,
    )
