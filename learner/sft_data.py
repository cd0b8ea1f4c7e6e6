"""Conversations as batches of supervised fine-tuning: the assistant's messages train, everything else is context.

    {"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]}
    {"prompt": "2+2=", "completion": "4"}

    user 2+2 assistant | 4 <eos>     user and 3+3 assistant | 6 <eos>
    prompt               trained     context                  trained        one turn per message of the assistant

The tokens are those of the chat template, whole conversation by whole conversation. A template that changes earlier
messages (some strip reasoning) makes a turn of its own for each message, with the history that it shows there. What
follows the end-of-sequence token of a message is context: a model never writes it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bapo.config.tree import Config
from bapo.core.codec import pack_batch
from bapo.core.errors import ConfigError
from bapo.core.sequences import SampledSequence, group_columns
from bapo.core.turns import FROM_NOTHING, FROM_PROMPT, Turns
from bapo.core.types import Batch, BatchEntry, Group, Origin, Outcome, Prompt, Purpose, Timing
from bapo.tasks.base import ASSISTANT
from bapo.tasks.data_files import Row, read_rows

log = logging.getLogger(__name__)

TASK = "sft"

NO_BUFFERS = {"num_bad": 0, "num_high": 0}

Trained = tuple[list[int], list[int]]
"""(all ids before a message of the assistant, its own ids)."""


def conversations(path: str) -> Iterator[Row]:
    """The rows of a file. Raises: ConfigError that names the row."""
    for row in read_rows(path):
        texts = (row.values.get("prompt"), row.values.get("completion"))
        if not (_is_conversation(row.values.get("messages")) or all(isinstance(text, str) for text in texts)):
            raise ConfigError(
                f'{row.where}: expected {{"messages": [...]}} with texts and a message of the assistant, or '
                f'{{"prompt": "...", "completion": "..."}}; the row is {json.dumps(row.values)[:100]}'
            )
        yield row


def _is_conversation(messages: object) -> bool:
    return (
        isinstance(messages, list)
        and all(
            isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
            for one in messages
        )
        and any(one["role"] == ASSISTANT for one in messages)
    )


class SftData:
    """The batches of a run, in place of a buffer service: step t always has the same batch."""

    def __init__(self, config: Config) -> None:
        """Read and tokenize everything. Raises: ConfigError."""
        from transformers import AutoTokenizer  # here: a second

        assert config.sft is not None
        self._config, self._settings = config, config.sft
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(config.model.path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path: cannot load the tokenizer of {config.model.path}: {error}") from error
        self._groups: list[Group] = []
        num_left_out, num_endless, most = 0, 0, config.learner.microbatch_tokens
        for number, row in enumerate(conversations(self._settings.data), 1):
            parts = _parts(tokenizer, row.values, row.where)
            num_endless += any(tokenizer.eos_token_id not in own for _, own in parts)
            if max(len(before) + len(own) for before, own in parts) > most:
                num_left_out += 1
            else:
                self._groups.append(_group(row.values, parts, number))
        if not self._groups:
            raise ConfigError(
                f"{self._settings.data} has no conversation of at most learner.microbatch_tokens = {most} tokens"
            )
        if num_left_out:
            log.warning(
                "%d of %d conversations are longer than learner.microbatch_tokens = %d and are left out",
                num_left_out,
                num_left_out + len(self._groups),
                most,
            )
        if num_endless:
            log.warning(
                "%d conversations have a message of the assistant that the chat template ends without the "
                "end-of-sequence token %r of %s: the model does not learn to end where engines stop; use the tokenizer "
                "of a chat model, or set eos_token in tokenizer_config.json to what ends a message",
                num_endless,
                tokenizer.eos_token,
                config.model.path,
            )

    def batch_frame(self, step: int, *, timeout_s: float, on_wait: Callable[[str], None] | None = None) -> bytes:
        """The batch of a step: a part of the epoch's order."""
        per_epoch = -(-self._config.run.num_steps // self._settings.epochs)
        epoch, place = divmod(step - 1, per_epoch)
        order = np.random.default_rng([self._config.run.seed, epoch]).permutation(len(self._groups))
        chosen = np.array_split(order, per_epoch)[place].tolist()
        entries = tuple(BatchEntry(origin=Origin.X1, group=self._groups[index]) for index in chosen)
        return pack_batch(Batch(step=step, entries=entries, r_tot=0.0, facts=NO_BUFFERS, results=()))

    def commit(self, step: int, *, checkpointed: int) -> bool:
        """Nothing is stored, so no checkpoint is ever wanted early."""
        return False

    def snapshot(self) -> bytes:
        """Nothing to restore: a step follows from the data."""
        return b""

    def report_progress(self, progress: object) -> None:
        """No service waits for it."""

    def resume(self, step: int) -> None:
        """Any step can be next."""

    def restore(self, data: bytes) -> None:
        """Nothing was stored."""

    def wait_ready(self, timeout_s: float) -> None:
        """It is."""

    def untrained(self, step: int) -> list[Group]:
        """Everything trains."""
        return []


def _parts(tokenizer: Any, row: Mapping[str, Any], where: str) -> list[Trained]:
    """What trains of one conversation, each with all that comes before it. Raises: ConfigError."""
    if "messages" not in row:
        before = tokenizer.encode(row["prompt"])
        if tokenizer.eos_token_id is not None and before[-1:] == [tokenizer.eos_token_id]:
            before = before[:-1]
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return [(before, tokenizer.encode(row["completion"], add_special_tokens=False) + end)]
    if tokenizer.chat_template is None:
        raise ConfigError(f"{where}: the tokenizer has no chat template; use rows with prompt and completion")
    found = []
    for place, message in enumerate(row["messages"]):
        if message["role"] == ASSISTANT:
            before = _rendered(tokenizer, row, place, where, add_generation_prompt=True)
            after = _rendered(tokenizer, row, place + 1, where)
            if after[: len(before)] != before or len(after) == len(before):
                raise ConfigError(
                    f"{where}: the chat template writes message {place} otherwise than it asks for it, so its tokens "
                    "cannot be found; use rows with prompt and completion"
                )
            found.append((before, _to_last_end(after[len(before) :], tokenizer.eos_token_id)))
    return found


def _rendered(tokenizer: Any, row: Mapping[str, Any], num: int, where: str, **options: Any) -> list[int]:
    try:
        text = tokenizer.apply_chat_template(row["messages"][:num], tools=row.get("tools"), tokenize=False, **options)
    except Exception as error:  # a template is code of the model's author
        raise ConfigError(f"{where}: the chat template failed: {error}") from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def _to_last_end(ids: list[int], end: int | None) -> list[int]:
    """Up to the last end-of-sequence token; all of it without one."""
    return ids[: len(ids) - ids[::-1].index(end)] if end in ids else ids


def _group(row: Mapping[str, Any], parts: Sequence[Trained], number: int) -> Group:
    first, _ = parts[0]
    sampled = [np.array(own, np.int32) for _, own in parts]
    num = sum(map(len, sampled))
    digest = hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]
    sequence = SampledSequence(
        token_ids=np.concatenate(sampled),
        rollout_logprobs=np.zeros(num, np.float32),
        versions=np.zeros(num, np.int32),
        outcome=Outcome.EXPERT,
        turns=_turns(parts),
    )
    return Group(
        group_id=f"sft-{number:08d}",
        prompt=Prompt(prompt_id=digest, text=f"line {number}", task=TASK, answer={}),
        purpose=Purpose.FRESH,
        step=1,
        label="",
        worker_id=TASK,
        prompt_token_ids=np.array(first, np.int32),
        rewards=np.ones(1, np.float32),
        timing=Timing(claimed_at=0.0, sample_s=0.0, grade_s=0.0),
        **group_columns([sequence]),
    )


def _turns(parts: Sequence[Trained]) -> Turns | None:
    """None for one message."""
    if len(parts) == 1:
        return None
    parents, contexts = [FROM_PROMPT], [np.zeros(0, np.int32)]
    for place, (before, _) in enumerate(parts[1:]):
        history = parts[place][0] + parts[place][1]
        continues = before[: len(history)] == history
        parents.append(place if continues else FROM_NOTHING)
        contexts.append(np.array(before[len(history) :] if continues else before, np.int32))
    return Turns(
        parents_U=np.array(parents, np.int32),
        num_context_U=np.array([len(ids) for ids in contexts], np.int32),
        num_sampled_U=np.array([len(own) for _, own in parts], np.int32),
        context_ids=np.concatenate(contexts),
    )
