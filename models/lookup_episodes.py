"""Run the agent of `lookup` with a model in this process: all episodes at once, one batch of calls after the other.

The agent is the program that training uses. Its client is replaced: a call waits until every episode that has not ended
waits, then all are answered. Tool calls are read from the text as the `hermes` parser of engines does.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessage
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from bapo.core.types import Prompt
from contrib.lookup.agent import rollout
from contrib.lookup.task import OPERATIONS
from models.lookup_data import Message, rendered
from models.lookup_tokenizer import CALL_END, CALL_START
from models.sampler import MAX_ROWS, sample_rows

MAX_NEW_TOKENS = 48
"""Of one message; the teacher's longest has 24."""
_CALL = re.compile(f"{CALL_START}(.*?){CALL_END}|{CALL_START}(.*)", re.DOTALL)
_OWN = re.compile(r"([0-9]+)([-+])([0-9]+)=([0-9]+);")

Kind = Literal["every value and step by tool", "every value by tool, a step without", "a value made up"]
KINDS: tuple[Kind, ...] = ("every value and step by tool", "every value by tool, a step without", "a value made up")

Call = tuple[list[int], asyncio.Future[tuple[str, int]]]
"""Token ids of its history, and where its reply is awaited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One graded episode."""

    reward: float
    num_tokens: int
    """Sampled ones, with the ends of messages."""
    num_calls: int
    """Of the model."""
    gets: frozenset[str]
    """Keys that were looked up."""
    calcs: int
    """Calls of `calc`."""
    own: tuple[bool, ...]
    """Of each calculation without it: whether it is right."""
    num_keys: int

    @property
    def kind(self) -> Kind:
        """How much of it was left to the tools."""
        if len(self.gets) < self.num_keys:
            return "a value made up"
        return KINDS[0] if self.calcs >= self.num_keys - 1 else KINDS[1]


class Client:
    """What one episode uses of `openai.AsyncOpenAI`."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self.chat = SimpleNamespace(completions=self)
        self.messages: list[Message] = []
        self.num_tokens = self.num_calls = 0

    async def create(self, *, messages: list[Message], **_: Any) -> SimpleNamespace:
        """The next message. The list is the agent's own, which it continues."""
        self.messages = messages
        text, num_tokens = await self._batches.reply(messages)
        self.num_tokens += num_tokens
        self.num_calls += 1
        return SimpleNamespace(choices=[SimpleNamespace(message=read_message(text))])

    def called(self, name: str) -> list[str]:
        """Arguments of all calls of a tool."""
        calls = (call["function"] for message in self.messages for call in message.get("tool_calls", ()))
        return [argument for f in calls if f["name"] == name for argument in json.loads(f["arguments"]).values()]


class Batches:
    """Calls that wait, and the model that answers them together."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        tokenizer: PreTrainedTokenizerFast,
        generator: torch.Generator,
        temperature: float,
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._generator, self._temperature = generator, temperature
        self._waiting: list[Call] = []

    async def reply(self, messages: list[Message]) -> tuple[str, int]:
        """Text of the next message without its end, and its number of tokens with it."""
        ids = self._tokenizer(rendered(self._tokenizer, messages, ask=True))["input_ids"]
        future: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((ids, future))
        return await future

    async def serve(self, episodes: Sequence[asyncio.Task[float | None]]) -> None:
        """Answer until all episodes have ended."""
        while running := sum(not episode.done() for episode in episodes):
            await asyncio.sleep(0)
            if len(self._waiting) == running:
                self._answer()

    def _answer(self) -> None:
        waiting, self._waiting = sorted(self._waiting, key=lambda call: len(call[0])), []
        for _, calls in groupby(waiting, key=lambda call: len(call[0])):
            while chunk := list(islice(calls, MAX_ROWS)):
                self._sample(chunk)

    def _sample(self, calls: Sequence[Call]) -> None:
        """Answer calls whose histories have the same length."""
        eos = self._tokenizer.eos_token_id
        ids_RT = torch.tensor([ids for ids, _ in calls])
        sampled = sample_rows(self._model, ids_RT, eos, MAX_NEW_TOKENS, self._generator, self._temperature)
        for (_, future), ids in zip(calls, sampled, strict=True):
            text = str(self._tokenizer.decode(ids[:-1] if ids[-1] == eos else ids))
            future.set_result((text, len(ids)))


def read_message(text: str) -> ChatCompletionMessage:
    """The message of a text; one whose tool calls cannot be read is content alone."""
    try:
        read = [json.loads(closed or left_open) for closed, left_open in _CALL.findall(text)]
        functions = [{"name": call["name"], "arguments": json.dumps(call["arguments"])} for call in read]
    except (ValueError, KeyError, TypeError):
        functions = []
    calls = [{"id": f"call-{i}", "type": "function", "function": function} for i, function in enumerate(functions)]
    content = text[: text.find(CALL_START)] if calls else text
    return ChatCompletionMessage.model_validate(
        {"role": "assistant", "content": content or None, "tool_calls": calls or None}
    )


def episodes_of(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    generator: torch.Generator,
    temperature: float,
) -> list[list[Episode]]:
    """`group_size` episodes of each prompt, in the order of `prompts`."""

    async def run() -> list[Episode]:
        batches = Batches(model, tokenizer, generator, temperature)
        rows = [(prompt, Client(batches)) for prompt in prompts for _ in range(group_size)]
        tasks = [asyncio.create_task(_rollout(client, prompt)) for prompt, client in rows]
        await batches.serve(tasks)
        return [_episode(prompt, client, await task) for (prompt, client), task in zip(rows, tasks, strict=True)]

    episodes = asyncio.run(run())
    return [episodes[start : start + group_size] for start in range(0, len(episodes), group_size)]


async def _rollout(client: Client, prompt: Prompt) -> float | None:
    return await rollout(cast("AsyncOpenAI", client), prompt)


def _episode(prompt: Prompt, client: Client, reward: float | None) -> Episode:
    return Episode(
        reward=reward or 0.0,
        num_tokens=client.num_tokens,
        num_calls=client.num_calls,
        gets=frozenset(client.called("get")) & frozenset(prompt.answer["values"]),
        calcs=len(client.called("calc")),
        own=tuple(
            OPERATIONS[sign](int(left), int(right)) == int(result)
            for message in client.messages
            if message["role"] == "assistant"
            for left, sign, right, result in _OWN.findall(message.get("content") or "")
        ),
        num_keys=prompt.answer["num_keys"],
    )
