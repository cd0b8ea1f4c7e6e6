"""vLLM's own OpenAI and Anthropic routes in a process without an engine.

    route (vLLM: chat template, parsers of tools and reasoning) --generate--> `Client` --ModelCall--> recorder.py

Nothing is sent before the turn is recorded: a streamed reply is a record that is read out, token by token. The rest of
vLLM's `EngineClient` is not for agents, and refuses.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from fastapi import FastAPI
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.anthropic.api_router import attach_router as attach_messages
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.api_router import attach_router as attach_chat
from vllm.entrypoints.openai.completion.api_router import attach_router as attach_completions
from vllm.entrypoints.openai.models.api_router import attach_router as attach_models
from vllm.entrypoints.openai.responses.api_router import attach_router as attach_responses
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.renderers.registry import renderer_from_config
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.input_processor import InputProcessor

from bapo.config.tree import Config
from rollout_server.engines.vllm import engine_arguments
from rollout_server.episodes.caller import CALLER
from rollout_server.episodes.gate import MODEL_PATHS
from rollout_server.episodes.recorder import ModelCall, Reply

Sample = Callable[[ModelCall], Awaitable[Reply]]

BIASES = ("logit_bias", "allowed_token_ids", "bad_words_token_ids", "logits_processors")
"""What samples from another distribution than the one whose log-probs are recorded.

Not `structured_outputs`: the gate refuses by name what asks for them. What is left are vLLM's grammars for `strict`
tools and for `parallel_tool_calls = false`, which SDKs send of their own accord. The policy is not held to them:
whether its calls are valid is what it learns.
"""


class Client(EngineClient):
    """vLLM's view of an engine, in front of the recorder."""

    def __init__(self, config: Config) -> None:
        """Load tokenizer and templates. `sample` is set before the first call."""
        arguments = engine_arguments(config, on_cpus=current_platform.is_cpu())
        self.vllm_config = EngineArgs(**arguments).create_engine_config()
        self.model_config = self.vllm_config.model_config
        self.renderer = renderer_from_config(self.vllm_config)
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)
        self.sample: Sample | None = None

    @cached_property
    def tokenizer(self) -> Any:
        """The model's."""
        return self.renderer.get_tokenizer()

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one call. Raises: VLLMValidationError for what would bias training."""
        for name in BIASES:
            if getattr(sampling_params, name, None):
                raise VLLMValidationError(
                    f"{name} changes what is sampled, and training would not know", parameter=name
                )
        if sampling_params.n != 1:
            raise VLLMValidationError("an episode samples one reply at a time: n must be 1", parameter="n")
        assert self.sample is not None
        caller = CALLER.get()
        reply = await self.sample(
            ModelCall(
                key=caller.key,
                digest=caller.digest,
                is_retry=caller.is_retry,
                text=prompt.get("prompt"),
                token_ids=prompt["prompt_token_ids"],
                max_tokens=sampling_params.max_tokens or self.model_config.max_model_len,
                stop=tuple(sampling_params.stop or ()),
            )
        )
        for output in self._outputs(reply, prompt.get("prompt"), sampling_params, request_id):
            yield output

    def _outputs(self, reply: Reply, text: str | None, params: SamplingParams, request_id: str) -> list[RequestOutput]:
        """One output, or one per token where the route streams."""
        params = params.clone()
        params.detokenize = True
        request = EngineCoreRequest(
            request_id=request_id, prompt_token_ids=reply.prompt_token_ids, mm_features=None, sampling_params=params,
            pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
        )  # fmt: skip
        detokenizer = IncrementalDetokenizer.from_new_request(self.tokenizer, request)
        streams = params.output_kind == RequestOutputKind.DELTA
        ids = reply.token_ids.tolist()
        steps = [[token] for token in ids] if streams else [ids]
        outputs, sampled = [], 0
        for number, new in enumerate(steps):
            is_last = number == len(steps) - 1
            ends = is_last and not reply.truncated and self._is_end(new[-1])
            stop = detokenizer.update(list(new), ends)
            shown = detokenizer.get_next_output_text(is_last, streams)
            span = slice(sampled, sampled + len(new))
            sampled += len(new)
            outputs.append(self._output(reply, text, request_id, params, span, shown, stop, is_last=is_last))
        return outputs

    def _output(
        self, reply: Reply, text: str | None, request_id: str, params: SamplingParams, span: slice, shown: str,
        stop: str | None, *, is_last: bool,
    ) -> RequestOutput:  # fmt: skip
        ids, logprobs = reply.token_ids[span].tolist(), reply.logprobs[span].tolist()
        known = [
            {token: Logprob(logprob=value, rank=1, decoded_token=self.tokenizer.decode([token]))}
            for token, value in zip(ids, logprobs, strict=True)
        ]
        output = CompletionOutput(
            index=0,
            text=shown,
            token_ids=ids,
            cumulative_logprob=float(sum(logprobs)),
            logprobs=None if params.logprobs is None else known,
            finish_reason=("length" if reply.truncated else "stop") if is_last else None,
            stop_reason=stop,
        )
        return RequestOutput(request_id, text, reply.prompt_token_ids, None, [output], is_last, num_cached_tokens=0)

    def _is_end(self, token: int) -> bool:
        ends = self.model_config.try_get_generation_config().get("eos_token_id")
        known = {self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
        return token in known

    is_running = True
    is_stopped = False
    errored = False
    dead_error = RuntimeError("the front has no engine of its own")

    async def abort(self, request_id: Any) -> None:
        """The generator's end aborts its call."""

    async def check_health(self) -> None:
        """There is nothing that could be unhealthy."""

    async def do_log_stats(self) -> None:
        """None are kept."""

    async def is_tracing_enabled(self) -> bool:
        """No."""
        return False

    async def notify_kv_transfer_request_rejected(self, request_id: str, *args: Any, **options: Any) -> None:
        """Nothing is transferred."""

    async def is_sleeping(self) -> bool:
        """Never."""
        return False

    async def is_paused(self) -> bool:
        """Never."""
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing runs here."""


def _refused(name: str) -> Any:
    async def refuse(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{name} is not for agents")

    return refuse


for _name in sorted(EngineClient.__abstractmethods__ - set(vars(Client))):
    setattr(Client, _name, _refused(_name))
Client.__abstractmethods__ = frozenset()


_tokenize_params = ResponsesRequest.build_tok_params


def _without_special_tokens(request: ResponsesRequest, model_config: Any) -> Any:
    """A chat template writes all of them, and vLLM's route of responses, unlike that of chats, adds those of a text."""
    return replace(_tokenize_params(request, model_config), add_special_tokens=False)


ResponsesRequest.build_tok_params = _without_special_tokens  # type: ignore[assignment, method-assign]


async def make_app(config: Config, client: Client, chat_variables: Mapping[str, Any]) -> FastAPI:
    """The routes that agents call, without any gate.

    Args:
        chat_variables: of the chat template, besides the conversation; what a call says itself comes first.
    """
    settings = config.agents
    assert settings is not None
    flags = ["--model", config.model.path, "--served-model-name", settings.model_name, "--generation-config", "vllm"]
    if settings.tool_call_parser:
        flags += ["--enable-auto-tool-choice", "--tool-call-parser", settings.tool_call_parser]
    if settings.reasoning_parser:
        flags += ["--reasoning-parser", settings.reasoning_parser]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)  # type: ignore[no-untyped-call]
    args.default_chat_template_kwargs = dict(chat_variables)  # not by the parser: some are functions
    app = FastAPI(title="BAPO episodes")
    await init_app_state(client, app.state, args, ("generate",))
    init_exception_handler(app)
    for attach in (attach_chat, attach_completions, attach_responses, attach_messages, attach_models):
        attach(app)
    # vLLM's routers bring further routes (batches, stored responses), which no episode has.
    served = {*MODEL_PATHS, "/v1/models"}
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") in served]
    return app
