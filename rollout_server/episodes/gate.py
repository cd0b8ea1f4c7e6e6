"""What a call of an agent meets before vLLM's routes: whose episode it is, and what may not be asked.

    Authorization: Bearer KEY | x-api-key: KEY | /e/KEY/v1/...      any SDK that takes a base_url and an api_key

    KeyInPath --> HttpGuard --> Gate --> vLLM's routes, ours

Sampling parameters (temperature, top_p, seed, penalties) are accepted and have no effect. What would make the recorded
log-probs those of another distribution is refused by name, with a status that SDKs do not retry.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from starlette.responses import JSONResponse

from bapo.core.errors import AccessError, BapoError, LimitError
from bapo.core.types import Prompt
from bapo.runtime.auth.api_tokens import Keyring, Role
from bapo.tasks.base import is_templated
from bapo.tasks.prompt_tokens import is_complete
from bapo.transport.http_guard import App, Message, Receive, Scope, Send
from rollout_server.episodes.caller import CALLER, Caller

MODEL_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
BY_PATH = "/e/"
KEY = "bapo.key"
"""Of the scope: the key that was in the path."""
OPENING = "POST /v1/episodes gives one"
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Of a reply, as the endpoints name it."""
RETRIES = b"x-stainless-retry-count"
"""Sent by the SDKs of OpenAI and Anthropic; above 0 for a request that is sent again."""


def _kind(value: Any) -> Any:
    """Of a tool choice: OpenAI's is a word or an object, Anthropic's an object."""
    return value.get("type") if isinstance(value, dict) else value


FORBIDDEN = (
    "logit_bias", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "allowed_token_ids", "bad_words", "use_beam_search", "ignore_eos", "min_tokens", "stop_token_ids", "echo",
    "prompt_logprobs", "truncate_prompt_tokens", "logits_processors", "prompt_embeds",
)  # fmt: skip
REFUSED: Mapping[str, Callable[[Any], bool]] = dict.fromkeys(FORBIDDEN, bool) | {
    "tool_choice": lambda value: (
        (value.get("type") if isinstance(value, dict) else value) not in (None, "auto", "none")
    ),
    "prompt": lambda value: isinstance(value, list) and not all(isinstance(one, int) for one in value),
    "response_format": lambda value: isinstance(value, dict) and value.get("type") != "text",
    "text": lambda value: isinstance(value, dict) and _kind(value.get("format") or "text") not in (None, "text"),
    "n": lambda value: value not in (None, 1),
    "best_of": lambda value: value not in (None, 1),
}
"""Parameters that change what is sampled, or what the engine sees, and when."""


CONVERSATIONS = ("messages", "input", "system", "instructions")
"""Fields that a chat template is applied to."""


class KeyInPath:
    """ASGI middleware before the guard, which knows the paths without a key."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take the key of an episode out of the path."""
        if scope["type"] == "http" and scope["path"].startswith(BY_PATH):
            key, slash, rest = scope["path"].removeprefix(BY_PATH).partition("/")
            scope = {**scope, "path": slash + rest, "raw_path": (slash + rest).encode(), KEY: key}
        await self._app(scope, receive, send)


class Gate:
    """ASGI middleware around vLLM's app."""

    def __init__(
        self,
        app: App,
        *,
        prompt_of: Callable[[str], Prompt],
        keyring: Keyring | None,
        model_name: str,
        longest: int,
        begin: str | None,
    ) -> None:
        """
        Args:
            prompt_of: that of an episode's key; raises the error of a key that has no open episode.
            keyring: of the tokens that some take for keys.
            model_name: that of the one model that is served.
            longest: tokens of the longest call, prompt and reply together.
            begin: the tokenizer's BOS token, if it has one.
        """
        self._app, self._prompt_of, self._keyring = app, prompt_of, keyring
        self._model_name, self._longest, self._begin = model_name, longest, begin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a call on, or refuse it."""
        path = scope["path"] if scope["type"] == "http" else ""
        if path not in MODEL_PATHS or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        key = key_of(scope)
        try:
            body = await _read(receive)
            prompt = self._prompt(key)
            fields = fields_of(body)
            refuse_rendered(fields, prompt)
        except BapoError as error:
            await refusal_of(error)(scope, receive, send)
            return
        CALLER.set(Caller(key=key, digest=digest_of(path, body), is_retry=is_retry(scope)))
        served = adapted(path, fields, prompt, model_name=self._model_name, longest=self._longest, begin=self._begin)
        await self._app(scope, _replayed(json.dumps(served).encode(), receive), send)

    def _prompt(self, key: str) -> Prompt:
        """Raises: AccessError, or that of `prompt_of`."""
        if not key:
            raise AccessError(f"no key: send the key of an episode as the API key ({OPENING})")
        try:
            return self._prompt_of(key)
        except AccessError:
            role = self._keyring.role_of(key) if self._keyring else None
            if role is None:
                raise
            whose = "the agents' token" if role is Role.AGENT else f"a token of role {role}"
            raise AccessError(f"this is {whose}: open an episode and use its key ({OPENING})") from None


def key_of(scope: Scope) -> str:
    """The key of an episode, or "". One in the path comes first: the client has sent another because it must."""
    if key := scope.get(KEY):
        return str(key)
    headers: dict[bytes, bytes] = dict(scope["headers"])
    bearer = headers.get(b"authorization", b"").decode("latin-1")
    if bearer.lower().startswith("bearer "):
        return bearer[7:].strip()
    return str(headers.get(b"x-api-key", b"").decode("latin-1"))


def digest_of(path: str, body: bytes) -> str:
    """Of one request: a retry has the same."""
    return hashlib.blake2b(path.encode() + b"\n" + body, digest_size=16).hexdigest()


def is_retry(scope: Scope) -> bool:
    """Whether the client sends a request again."""
    given: str = dict(scope["headers"]).get(RETRIES, b"0").decode("latin-1")
    return given.isdecimal() and int(given) > 0


class CallError(BapoError):
    """A call that cannot be part of an episode."""

    http_status = 400


def fields_of(body: bytes) -> dict[str, Any]:
    """What a client asks for. Raises: CallError."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise CallError("the body is not JSON") from None
    if not isinstance(fields, dict):
        raise CallError("the body is not a JSON object")
    for name, is_refused in REFUSED.items():
        if is_refused(fields.get(name)):
            shown = json.dumps(fields[name])[:100]
            raise CallError(
                f"{name} = {shown} changes what is sampled or seen, so that the recorded log-probs would be of another "
                "distribution: remove it (temperature, top_p, seed and penalties are accepted and have no effect)"
            )
    return fields


def refuse_rendered(fields: Mapping[str, Any], prompt: Prompt) -> None:
    """A conversation with the prompt's rendered text would be trained with the chat template applied twice.

    Raises: CallError.
    """
    for name in CONVERSATIONS if is_templated(prompt) else ():
        if any(prompt.text in text for text in texts_in(fields.get(name))):
            raise CallError(
                f"{name} has the prompt's text, which has its chat template already, and would get it a second time: "
                "begin with the prompt's messages (prompt.messages), or send the text to /v1/completions"
            )


def texts_in(value: Any) -> Iterator[str]:
    """All texts in a conversation, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts_in(part)


def adapted(
    path: str, fields: Mapping[str, Any], prompt: Prompt, *, model_name: str, longest: int, begin: str | None
) -> dict[str, Any]:
    """The call as vLLM serves it: whatever model the client names is the policy, a limit of its own never too large.

    Messages without tools have the choice of none: for a missing one vLLM parses calls of tools, and then shows none.
    A text gets no special tokens where it has them, as the prompt of a run without agents, unless the client says so.
    """
    limits = {name: min(fields[name], longest) for name in LIMITS if type(fields.get(name)) is int}
    is_plain = path == "/v1/messages" and not fields.get("tools")
    choice = {"tool_choice": {"type": "none"}} if is_plain else {}
    text = fields.get("prompt")
    is_whole = path == "/v1/completions" and isinstance(text, str) and is_complete(prompt, text, begin)
    special = {"add_special_tokens": False} if is_whole else {}
    return {**special, **fields, "model": model_name, **limits, **choice}


def refusal_of(error: BapoError) -> JSONResponse:
    """An episode at its limit has the code that OpenAI gives a conversation that is too long."""
    code = "context_length_exceeded" if isinstance(error, LimitError) else None
    return error_response(error.http_status, str(error), code)


def error_response(status: int, message: str, code: str | None = None) -> JSONResponse:
    """An error as OpenAI's and Anthropic's SDKs read it."""
    return JSONResponse(
        {
            "error": {
                "message": message,
                "type": "invalid_request_error" if status < 500 else "server_error",
                "code": code or status,
            }
        },
        status_code=status,
        headers={"retry-after": "1"} if status == 503 else None,
    )


async def _read(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body again, then what follows: a disconnect."""
    is_sent = False

    async def next_message() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message
